"""Promises about delayed messages that only two brokers, or two states of one, can show."""

from __future__ import annotations

import random

import pytest

from journal.errors import Corrupt
from journal.testing import Moment, SimulatedDisk, crash_states
from tests.broker.helpers import Broker, after, at, handles
from tests.broker.test_startup import ARRIVALS, files, put
from tests.scale import SEED
from tfmq.broker import startup
from tfmq.delay import memory_window
from tfmq.delay.arrivals.state import NumberEpochs
from tfmq.protocol.delayed_handle import format_handle, issuer, parse_handle

SECOND, MINUTE, HOUR = 1000, 60_000, 3_600_000


def another() -> Broker:
    """Of the same words as any other, but for what is left to chance."""
    broker = Broker(SimulatedDisk(), start=False)
    broker.random.count = 1_000_000
    broker.engine.start()
    broker.create()
    return broker


def test_the_handle_of_a_broker_that_counts_alike_is_unknown_and_hits_nothing() -> None:
    here, there = Broker(), another()
    here.create()
    own, strange = (handles(each.delay(each.lease(), 0, due=after(MINUTE)))[0] for each in (here, there))
    assert parse_handle(own)._replace(store_id=0) == parse_handle(strange)._replace(store_id=0)
    assert here.cancel_delayed(strange).state == "unknown"
    assert here.reschedule(strange, after(SECOND)).state == "unknown"
    assert here.describe_delayed(strange)["state"] == "unknown"
    here.advance(61)
    assert here.payloads() == [b"later"]


def durable(broker: Broker) -> SimulatedDisk:
    """A copy of the disk with what is fsynced."""
    return next(iter(crash_states(Moment(broker.disk), 1, random.Random(SEED))))


@pytest.mark.parametrize("before", [0, 1], ids=["no message before the copy", "one message before the copy"])
@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "power cut"])
def test_a_handle_from_after_the_copy_names_nothing_in_the_older_copy(before: int, stop: bool) -> None:
    """Both give the same number to a message that is due at the same ms."""
    original = Broker()
    original.create()
    known = [handles(original.delay(original.lease(), 0, due=after(HOUR)))[0] for _ in range(before)]
    if stop:
        original.stop()
    original, copy = original.crashed(durable(original)), durable(original)
    original.advance(60)
    due = at(original.clock.wall_ms() + HOUR)
    lost = handles(original.delay(original.lease(), 0, due=due))[0]
    original.advance(20)
    restored = original.crashed(copy)
    restored.advance(1)
    answer = restored.delay(restored.lease(), 0, [b"of another user"], due=due)
    (kept,) = handles(answer)
    assert parse_handle(kept)[1:] == parse_handle(lost)[1:], "the case that must not be confused"
    assert kept != lost
    for each in (lost, kept):
        again = restored.delay(restored.lease(), 0, due=due)
        restored = restored.restart()
        assert handles(again)[0] != each
    assert restored.cancel_delayed(lost).state == "unknown"
    assert restored.reschedule(lost, after(SECOND)).state == "unknown"
    assert restored.describe_delayed(lost)["state"] == "unknown"
    assert kept in {row["handle"] for row in restored.delayed()}
    assert [restored.cancel_delayed(each).state for each in (kept, *known)] == ["cancelled"] * (1 + before)


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "power cut"])
def test_handles_of_earlier_releases_stay_valid(stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """These had no epoch in the issuer, and snapshots had no epochs."""
    broker = Broker()
    broker.create()
    first = handles(broker.delay(broker.lease(), 0, due=after(HOUR)))[0]
    second = handles(broker.delay(broker.lease(), 0, due=after(HOUR)))[0]
    commands = broker.engine.broker.delay_commands
    plain = issuer(broker.engine.broker.node, commands.store_id)
    old = [format_handle(parse_handle(each)._replace(store_id=plain)) for each in (first, second)]
    with monkeypatch.context() as earlier:
        earlier.setattr(NumberEpochs, "dump", lambda self: b"")
        if stop:
            broker.stop()
        broker = broker.crashed(durable(broker))
    broker.advance(1)
    assert broker.describe_delayed(old[0])["state"] == "pending"
    later = handles(broker.delay(broker.lease(), 0, due=after(HOUR)))[0]
    for _ in range(2):
        broker = broker.restart()
        assert broker.describe_delayed(old[0])["state"] == "pending"
        assert broker.describe_delayed(later)["state"] == "pending"
        foreign = format_handle(parse_handle(later)._replace(store_id=plain))
        assert broker.describe_delayed(foreign)["state"] == "unknown", "later ones always have an epoch"
    assert [broker.cancel_delayed(each).state for each in (*old, later)] == ["cancelled"] * 3


@pytest.mark.parametrize("wanted", [SECOND, 30 * SECOND, MINUTE - SECOND])
def test_by_an_old_handle_a_message_comes_earlier_if_that_is_asked_for(wanted: int) -> None:
    broker = Broker()
    broker.create()
    (first,) = handles(broker.delay(broker.lease(), 0, due=after(10 * MINUTE)))
    assert broker.reschedule(first, after(MINUTE)).state == "rescheduled"
    moved = broker.reschedule(first, after(wanted))
    assert moved.state == "rescheduled"
    broker.advance((wanted + SECOND) / 1000 - 0.5)
    assert broker.payloads() == [b"later"]


def test_buckets_that_are_older_than_the_arrivals_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals that were given up since lie in newer buckets alone."""
    monkeypatch.setattr(startup, "_segment_bytes", lambda house: 1 << 16)
    monkeypatch.setattr(memory_window, "SPILL_BYTES", 1 << 14)
    broker = Broker()
    broker.create()
    old = files(broker.disk)
    producer = broker.lease()
    for sequence in range(100):
        broker.delay(producer, 4 * sequence, [bytes(1000)] * 4, due=after(100 * MINUTE))
        broker.advance(1)
    assert broker.arrivals.first_offset > 0
    broker.stop()
    new = files(broker.disk)
    mixed = {path: data for path, data in new.items() if path.startswith(ARRIVALS)}
    put(broker.disk, mixed | {path: data for path, data in old.items() if not path.startswith(ARRIVALS)})
    with pytest.raises(Corrupt, match=r"buckets are older.*new-delay"):
        Broker(broker.disk, broker.clock)
