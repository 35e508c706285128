"""The asyncio XA resource: the blocking one's names and promises, awaited."""

import asyncio
import inspect
from typing import Any

import pytest

import tfmq
from tests.client.fake_broker import FakeBroker, listening
from tfmq import aio, aio_transactions, transactions


def test_both_faces_have_the_same_names_parameters_and_docs() -> None:
    ours = {name: each for name, each in vars(transactions.XAResource).items() if not name.startswith("_")}
    theirs = {name: each for name, each in vars(aio_transactions.XAResource).items() if not name.startswith("_")}
    assert ours.keys() == theirs.keys()
    for name, member in ours.items():
        mine, other = inspect.signature(member), inspect.signature(theirs[name])
        assert list(mine.parameters.values()) == list(other.parameters.values()), name
        assert theirs[name].__doc__ == member.__doc__, name


@pytest.mark.parametrize("wrong", [None, tfmq.Producer])
def test_what_is_no_asynchronous_producer_is_refused_by_name(wrong: Any) -> None:
    with listening(FakeBroker()) as servers:
        given = wrong and wrong(servers)
        with pytest.raises(TypeError, match=r"tfmq\.aio\.XAResource needs a tfmq\.aio\.Producer, not"):
            aio.XAResource(given)
        if given:
            given.close()


def test_a_transaction_manager_drives_it_through_both_phases() -> None:
    async def story(servers: str) -> None:
        async with aio.Producer(servers) as producer:
            resource = producer.xa()
            assert isinstance(resource, aio.XAResource)
            tx = await resource.start("branch-1")
            await tx.send("orders", b"1")
            resource.end("branch-1")
            assert await resource.prepare("branch-1") == "prepared"
            assert await resource.recover() == ["branch-1"]
            assert await resource.commit("branch-1") == "committed"
            await resource.start("branch-2")
            resource.end("branch-2")
            assert await resource.rollback("branch-2") == "rolled_back"
            assert await resource.forget("branch-1") is False

    broker = FakeBroker()
    with listening(broker) as servers:
        asyncio.run(asyncio.wait_for(story(servers), 20))
    assert broker.payloads("orders") == [b"1"]
