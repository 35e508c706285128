"""What nobody waits for any more counts as little, whenever that was not known."""

from tests.delay.desk import BILLS, START_MS, Desk, Handle

DAY = 86_400_000


def filled() -> tuple[Desk, list[Handle], list[Handle]]:
    """In buckets: ten for orders and ten for bills, of which half of the orders are cancelled."""
    desk = Desk()
    orders = desk.send([b"%d" % n for n in range(10)], [DAY + n * 3_600_000 for n in range(10)])
    bills = desk.send([b"b%d" % n for n in range(10)], [DAY + n * 3_600_000 for n in range(10)], key=BILLS)
    desk.listed()
    for handle in orders[::2]:
        desk.cancel(handle)
    desk.advance(1)
    return desk, orders, bills


def test_what_is_cancelled_on_the_disk_counts_no_more() -> None:
    desk, orders, _ = filled()
    assert desk.queue.pending == 15
    desk.reschedule(orders[1], 2 * DAY)
    desk.advance(1)
    assert desk.queue.pending == 15


def test_a_start_finds_out_what_was_cancelled() -> None:
    desk, _, _ = filled()
    for again in (desk.power_cut(), desk.kill()):
        again.advance(1)
        assert again.queue.pending == 15


def test_what_is_for_a_topic_that_went_counts_no_more() -> None:
    desk, _, _ = filled()
    desk.targets.delete(BILLS >> 24)
    desk.queue.topic_deleted(BILLS >> 24)
    desk.advance(1)
    assert desk.queue.pending == 5
    assert desk.histogram([0, 1 << 62]) == ([5], 5)


def test_what_was_cancelled_before_it_was_in_a_bucket_counts_no_more_either() -> None:
    desk = Desk()
    sent = desk.send([b"a", b"b", b"c"], DAY)
    desk.cancel(sent[0])
    desk.advance(1)
    assert desk.queue.pending == 2
    desk.listed()
    desk.advance(1)
    assert desk.queue.pending == 2


def test_a_bucket_that_is_cut_gives_up_what_nobody_waits_for() -> None:
    desk, orders, _ = filled()
    rows = sum(bucket.count for bucket in desk.buckets.live_buckets)
    desk.until(orders[0].due - 30_000)
    desk.listed()
    desk.advance(1)
    assert rows == 20 and sum(bucket.count for bucket in desk.buckets.live_buckets) < 20
    assert desk.queue.pending == 15
    desk.until(START_MS + 3 * DAY)
    assert desk.queue.pending == 0 and len(desk.fired) == 15


def test_one_count_at_a_time_is_asked_for() -> None:
    desk, _, _ = filled()
    desk.queued = True
    for _ in range(5):
        desk.queue.topic_deleted(99)
    assert len(desk.jobs) == 1
    desk.work()
    assert desk.queue.pending == 15
