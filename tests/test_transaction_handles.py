"""An order and the check on it in one transaction; the payment cancels the check by its handle. In all API variants."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tfmq
from tests import reactor as rig
from tfmq import aio, twisted
from tfmq.testing.broker import SimulatedBroker

SECONDS = 20.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tfmq.local_server(tmp_path_factory.mktemp("data")) as address:
        yield address


def test_a_payment_cancels_the_check_of_its_order(tfmq_broker: SimulatedBroker) -> None:
    with tfmq_broker.producer() as producer:
        checks = []
        for number in ("41", "42"):
            with producer.transaction() as tx:
                tx.send("orders", number, key=number)
                checks.append(tx.send("checks", number, key=number, delay=1800))
        handles = [check.result().delayed for check in checks]
        assert producer.cancel(handles[1]) == "cancelled", "42 is paid"
    tfmq_broker.clock.advance(hours=1)
    assert [message.text for message in tfmq_broker.sent("orders")] == ["41", "42"]
    assert [message.text for message in tfmq_broker.sent("checks")] == ["41"]


def test_the_handles_are_good_after_a_crash_of_the_broker(tfmq_broker: SimulatedBroker) -> None:
    with tfmq_broker.producer() as producer:
        with producer.transaction() as tx:
            check = tx.send("checks", "42", delay=1800)
        handle = check.result().delayed
        tfmq_broker.crash()
        moved = producer.reschedule(handle, delay=7200)
        assert moved.state == "rescheduled" and producer.cancel(handle) == "cancelled"
    tfmq_broker.clock.advance(hours=3)
    assert list(tfmq_broker.sent("checks")) == []


@pytest.mark.parametrize("prepared", [False, True])
def test_they_are_there_in_both_phases_and_for_many(servers: str, prepared: bool) -> None:
    with tfmq.Producer(servers) as producer, tfmq.Admin(servers) as admin:
        tx = producer.begin(f"order-{prepared}")
        tx.send("orders", "42")
        many = tx.send_many("many", ["1", "2", "3"], delay=3600)
        one = tx.send("checks", "42", delay=1800)
        if prepared:
            tx.prepare()
        tx.commit()
        result = one.result(SECONDS)
        assert (result.offset, admin.describe_delayed(result.delayed).state) == (None, "pending")
        (entry,) = many.result(SECONDS)
        assert [producer.cancel(handle) for handle in entry.delayed] == ["cancelled"] * 3
        assert producer.cancel(result.delayed) == "cancelled"
        assert admin.describe_delayed(result.delayed).state == "cancelled"


def test_who_commits_by_name_finds_them_in_the_list(servers: str) -> None:
    with tfmq.Producer(servers) as producer, tfmq.Admin(servers) as admin:
        tx = producer.begin("taken-up")
        check = tx.send("found", "42", key="42", delay=1800)
        tx.prepare()
        with tfmq.Producer(servers) as other:
            other.resume("taken-up").commit()
        (row,) = admin.delayed("found", key="42")
        assert producer.cancel(row.handle) == "cancelled"
        tx.commit()
        assert check.result(SECONDS).delayed in (None, row.handle)


def test_with_asyncio(servers: str) -> None:
    async def story() -> None:
        async with aio.Producer(servers) as producer:
            async with producer.transaction() as tx:
                await tx.send("orders", "42")
                check = await tx.send("checks", "42", delay=1800)
            assert await producer.cancel((await check).delayed) == "cancelled"

    asyncio.run(asyncio.wait_for(story(), SECONDS))


def test_with_twisted(servers: str) -> None:
    async def story(reactor: Any) -> None:
        async with twisted.Producer(servers, reactor=reactor) as producer:
            async with producer.transaction() as tx:
                await tx.send("orders", "42")
                check = await tx.send("checks", "42", delay=1800)
            assert await producer.cancel((await check).delayed) == "cancelled"

    play: Callable[[Any], None] = rig.play
    play(story)
