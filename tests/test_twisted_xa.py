"""The Twisted XA resource: the blocking one's names and promises, in Deferreds."""

from typing import Any

import pytest

import tfmq
from tests.client.fake_broker import FakeBroker, listening
from tests.reactor import play
from tfmq import twisted


@pytest.mark.parametrize("wrong", [None, tfmq.Producer])
def test_what_is_no_producer_of_twisted_is_refused_by_name(wrong: Any) -> None:
    given = wrong and wrong("127.0.0.1:1")
    with pytest.raises(TypeError, match=r"tfmq\.twisted\.XAResource needs a tfmq\.twisted\.Producer, not"):
        twisted.XAResource(given)
    if given:
        given.close()


def test_a_transaction_manager_drives_it_through_both_phases() -> None:
    async def story(reactor: Any) -> None:
        async with twisted.Producer(servers, reactor=reactor) as producer:
            resource = producer.xa()
            assert isinstance(resource, twisted.XAResource)
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
        play(story)
    assert broker.payloads("orders") == [b"1"]
