"""What `limits.delayed` is held against: what was taken back, moved or belongs to a topic that went makes room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.broker.helpers import Broker, after, handles

DAY = 86_400_000


def same(broker: Broker) -> Broker:
    return broker


def killed(broker: Broker) -> Broker:
    return broker.crashed(broker.disk.crash(keep="everything"))


def cut_off(broker: Broker) -> Broker:
    return broker.crashed(broker.disk.crash(keep="nothing"))


ENDS: list[Callable[[Broker], Broker]] = [same, Broker.restart, killed, cut_off]


def full(count: int = 20) -> tuple[Broker, list[str]]:
    """No more may wait."""
    broker = Broker(limits__delayed=count)
    broker.create()
    broker.create("others")
    producer, found = broker.lease(), []
    for number in range(count):
        found += handles(broker.delay(producer, number, [b"%d" % number], due=after(DAY + number * 600_000)))
    broker.advance(1)
    refused = broker.delay(broker.lease(), 0, [b"more"], due=after(DAY))
    assert refused.code == "busy"
    return broker, found


def has_room(broker: Broker) -> bool:
    return broker.delay(broker.lease(), 0, [b"more"], due=after(DAY)).code == "ok"


def waiting(broker: Broker) -> int:
    """As the status has it, as it is listed and as it is counted."""
    reported = broker.engine.broker.delay_commands.queue.status()["pending"]
    assert reported == len(broker.delayed()), "the list has others"
    return int(reported)


@pytest.mark.parametrize("spilled", [False, True], ids=["in arrivals", "in buckets"])
@pytest.mark.parametrize("end", ENDS)
def test_what_is_taken_back_makes_room(end: Callable[[Broker], Broker], spilled: bool) -> None:
    broker, found = full()
    if spilled:
        broker.advance(70)
    for handle in found:
        assert broker.cancel_delayed(handle).state == "cancelled"
    broker.advance(1)
    again = end(broker)
    again.advance(1)
    assert waiting(again) == 0 and has_room(again)


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_a_message_that_is_moved_again_and_again_is_one(end: Callable[[Broker], Broker]) -> None:
    broker, found = full(10)
    for handle in found[1:]:
        broker.cancel_delayed(handle)
    handle = found[0]
    for number in range(150):
        handle = broker.reschedule(handle, after(DAY + number * 1000)).handle
        broker.advance(1)
    again = end(broker)
    again.advance(1)
    assert waiting(again) == 1 and has_room(again)


@pytest.mark.parametrize("end", ENDS)
def test_a_topic_that_is_deleted_makes_room(end: Callable[[Broker], Broker]) -> None:
    broker, _ = full()
    broker.advance(70)
    assert broker.delete().code == "ok"
    again = end(broker)
    again.advance(3)
    assert waiting(again) == 0
    producer = again.lease()
    assert again.delay(producer, 0, [b"more"], topic="others", due=after(DAY)).code == "ok"
