"""Promises about delayed messages that only two brokers, or two states of one, can show."""

from __future__ import annotations

import pytest

from journal.errors import Corrupt
from journal.testing import SimulatedDisk
from tests.broker.helpers import Broker, after, handles
from tests.broker.test_delay_opening import ARRIVALS, files, put
from tfmq.broker import startup
from tfmq.delay import memory_window
from tfmq.protocol.delayed_handle import parse_handle

SECOND, MINUTE = 1000, 60_000


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
