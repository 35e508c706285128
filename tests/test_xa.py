"""The blocking XA resource over a real socket."""

import pytest

import tfmq
from tests.client.fake_broker import FakeBroker, listening
from tfmq.errors import TransactionState
from tfmq.transactions import XAResource


@pytest.mark.parametrize("wrong", [None, "127.0.0.1:7000", tfmq.Admin])
def test_what_is_no_blocking_producer_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"tfmq\.XAResource needs a tfmq\.Producer, not"):
        tfmq.XAResource(wrong)  # type: ignore[arg-type]


def test_a_transaction_manager_drives_it_through_both_phases() -> None:
    broker = FakeBroker()
    with listening(broker) as servers, tfmq.Producer(servers, group="shop") as producer:
        resource = tfmq.XAResource(producer)
        tx = resource.start("branch-1", timeout=30)
        tx.send("orders", b"1")
        with pytest.raises(TransactionState):
            resource.prepare("branch-1")
        resource.end("branch-1")
        assert resource.start("branch-1", resume=True).send("orders", b"2") is not None
        resource.end("branch-1")
        assert resource.prepare("branch-1") == "prepared"
        assert resource.recover() == resource.recover("shop") == ["branch-1"]
        assert resource.recover("another") == []
        assert resource.commit("branch-1") == "committed"
        resource.start("branch-2").send("orders", b"3")
        resource.end("branch-2")
        assert resource.rollback("branch-2") == "rolled_back"
        assert resource.forget("branch-1") is False
    assert broker.payloads("orders") == [b"1", b"2"]


def test_a_producer_gives_one() -> None:
    producer = tfmq.Producer("127.0.0.1:1")
    assert isinstance(producer.xa(), XAResource)
    producer.close()
