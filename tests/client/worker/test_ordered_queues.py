"""The order of jobs: one after the other in an ordered queue, queues in turn, and waiting jobs block no other."""

from collections import Counter

import pytest

from tests.client.blocks import INCARNATION, Bytes
from tests.scale import seeded
from tfmq.client.consumer.ack_tracker import AckTracker
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReadPosition
from tfmq.client.worker.ordered_queues import NEVER, ORDERS, HandlerJob, OrderedQueues
from tfmq.offsets.storage import PartitionName


def ledger(partition: int = 0) -> AckTracker:
    return AckTracker(PartitionName("orders", partition), ReadPosition(0, 0, 1))


def jobs(owner: AckTracker, *keys: str | None) -> list[HandlerJob]:
    log = Bytes(owner.name.partition)
    log.append_records([log.record(b"x", key=key) if key else log.record(b"x") for key in keys])
    (block,) = Decoder("orders", owner.name.partition, INCARNATION).decode(log.body(), 0, 0, log.end)
    return [HandlerJob(message, owner) for message in block.messages]


def added(queues: OrderedQueues, *made: HandlerJob) -> None:
    for job in made:
        queues.add(job)


def test_a_partition_is_a_queue_and_queues_take_turns() -> None:
    queues = OrderedQueues("partition")
    a, b = jobs(ledger(0), None, None), jobs(ledger(1), None, None)
    added(queues, *a, *b)
    assert [queues.next(0), queues.next(0), queues.next(0)] == [a[0], b[0], None]
    queues.complete(b[0])
    assert queues.next(0) is b[1]
    queues.complete(a[0])
    assert queues.next(0) is a[1]


def test_one_worker_takes_queues_in_turns_too() -> None:
    queues = OrderedQueues("partition")
    a, b = jobs(ledger(0), None, None), jobs(ledger(1), None, None)
    added(queues, *a, *b)
    found = []
    while (job := queues.next(0)) is not None:
        found.append(job)
        queues.complete(job)
    assert found == [a[0], b[0], a[1], b[1]]


def test_a_key_of_a_partition_is_a_queue_and_a_message_without_key_waits_for_no_other() -> None:
    queues = OrderedQueues("key")
    made = jobs(ledger(), "x", "x", "y", None, None)
    added(queues, *made)
    assert [queues.next(0) for _ in range(5)] == [made[0], made[2], made[3], made[4], None]
    queues.complete(made[0])
    assert queues.next(0) is made[1]


def test_the_same_key_in_two_partitions_is_two_queues() -> None:
    queues = OrderedQueues("key")
    a, b = jobs(ledger(0), "x"), jobs(ledger(1), "x")
    added(queues, *a, *b)
    assert [queues.next(0), queues.next(0)] == [*a, *b]


def test_without_an_order_all_begin_as_they_come() -> None:
    queues = OrderedQueues("none")
    made = jobs(ledger(), "x", "x", None)
    added(queues, *made)
    assert [queues.next(0) for _ in range(4)] == [*made, None]


def test_one_that_is_called_again_blocks_its_queue_and_no_other() -> None:
    queues = OrderedQueues("key")
    first, second, other = jobs(ledger(), "x", "x", "y")
    added(queues, first, second, other)
    assert queues.next(10) is first
    queues.retry_at(first, at=12.0)
    assert queues.next_retry_at() == 12.0
    assert queues.next(11) is other
    assert queues.next(11.9) is None
    assert queues.next(12) is first
    queues.complete(first)
    assert queues.next(12) is second
    assert queues.next_retry_at() == NEVER


def test_what_is_void_never_begins() -> None:
    queues, gone = OrderedQueues("partition"), ledger()
    made = jobs(gone, None, None, None)
    added(queues, *made)
    assert queues.next(0) is made[0]
    gone.invalid = gone.revoked = True
    queues.complete(made[0])
    assert queues.next(0) is None
    mine = jobs(ledger(), None)
    added(queues, *mine)
    assert queues.next(0) is mine[0]


def test_what_is_leaving_waits_until_it_stays_or_is_gone() -> None:
    queues, owner = OrderedQueues("none"), ledger()
    made = jobs(owner, None, None)
    added(queues, *made)
    owner.revoked = True
    assert queues.next(0) is None
    owner.revoked = False
    assert queues.next(0) is made[0]
    owner.revoked = True
    assert queues.next(0) is None
    owner.invalid = True
    assert queues.next(0) is None
    assert not queues.has_ready


def test_a_dead_letter_that_is_handled_again_is_in_no_queue_and_can_be_taken_back() -> None:
    queues = OrderedQueues("partition")
    (mine,) = jobs(ledger(), None)
    letter, other = HandlerJob(mine.message), HandlerJob(mine.message)
    added(queues, mine, letter, other)
    other.cancelled = True
    assert [queues.next(0), queues.next(0), queues.next(0)] == [letter, mine, None]
    queues.complete(letter)
    assert not queues.has_ready
    queues.add(letter)
    assert queues.has_ready
    assert (queues.next_dead_letter(), queues.next_dead_letter()) == (letter, None)


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_fails_and_ends_all_are_done_once_and_each_queue_in_order(order: str) -> None:
    """Invariants: in an ordered queue one at a time and in order; every job is done once."""
    chance = seeded("lanes", order)
    queues, now = OrderedQueues(order), 0.0
    made = [job for number in range(3) for job in jobs(ledger(number), *chance.choices(["x", "y", None], k=30))]
    added(queues, *made)
    busy: list[HandlerJob] = []
    done: list[HandlerJob] = []
    while len(done) < len(made):
        job = queues.next(now)
        if job is not None:
            assert all(job.queue is not each.queue for each in busy)
            busy.append(job)
        if busy and (job is None or chance.random() < 0.5):
            ended = busy.pop(chance.randrange(len(busy)))
            if chance.random() < 0.3:
                queues.retry_at(ended, now + chance.random())
            else:
                queues.complete(ended)
                done.append(ended)
        elif job is None:
            assert queues.next_retry_at() > now
            now = queues.next_retry_at()
    assert max(Counter(map(id, done)).values()) == 1
    for ordered_queue in {id(job.queue): job.queue for job in made}.values():
        in_queue = [job.message.offset for job in done if job.queue is ordered_queue]
        assert in_queue == sorted(in_queue)
