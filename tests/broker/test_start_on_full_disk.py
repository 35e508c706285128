"""A start on a full disk: what is after the forced mark is known and not safe; a resend gets no other reply."""

import errno

from tests.broker.helpers import Answer, Broker
from tfmq.protocol.commands import ACKS_WRITTEN


def waiting() -> tuple[Broker, int, int]:
    """A broker whose log has an unforced tail that recovery could not write again; (broker, producer, closed id)."""
    broker = Broker(flush__seconds=1000, flush__messages=100_000)
    broker.create()
    producer, closed = broker.lease(), broker.lease()
    broker.produce(producer, 0, [b"safe"])
    broker.produce(producer, 1, [b"tail"], acks=ACKS_WRITTEN)
    broker.produce(closed, 0, [b"also tail"], acks=ACKS_WRITTEN)
    broker.disk.faults.fail("force", times=None, path="orders-0/")
    broker.queued = True
    broker.succeed(closed)
    disk = broker.disk.crash(None, keep="everything")
    disk.faults.fail("write", error=errno.ENOSPC, times=None, path=".zxQueue")
    broker = broker.crashed(disk)
    broker.queued = False
    assert broker.log().forced_offset == broker.log().end_offset < 400
    return broker, producer, closed


def outcome(answer: Answer) -> tuple[str, str]:
    return answer.code, answer.failure.outcome


def test_a_resend_of_what_is_in_the_tail_is_unknown_and_answered_when_there_is_space() -> None:
    broker, producer, _ = waiting()
    again = broker.produce(producer, 1, [b"tail"])
    assert outcome(again) == ("disk_full", "unknown")
    assert outcome(broker.produce(producer, 2, [b"new"])) == ("disk_full", "not done")
    broker.disk.faults.clear()
    assert broker.produce(producer, 2, [b"new"]).code == "ok"
    again = broker.produce(producer, 1, [b"tail"])
    assert (again.code, again.repeated, again.durability) == ("ok", True, 2)
    assert broker.payloads() == [b"safe", b"tail", b"also tail", b"new"]


def test_a_succession_in_the_tail_is_not_said_to_be_fsynced() -> None:
    broker, producer, closed = waiting()
    assert outcome(broker.succeed(closed)) == ("disk_full", "unknown")
    broker.disk.faults.clear()
    assert broker.produce(producer, 2, [b"new"]).code == "ok"
    answer = broker.succeed(closed)
    assert (answer.code, answer.last_sequence) == ("ok", 0)
