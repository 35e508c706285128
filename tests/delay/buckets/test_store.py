"""The set of buckets: what is spilled is there, whatever is cut into what; what counts no more goes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from journal.errors import Corrupt, Full, Stopped, TooLarge
from tests.delay.arrival_log_rig import START_MS, Rig, Wanted
from tests.delay.bucket_rig import BILLS, DAY, HOUR, MINUTE, NEAR, NOW, ORDERS, SECOND, Bench, Kept, everything, kept_of
from tests.scale import seeded
from tfmq.delay.arrivals.log import ArrivalBatch, read_batches
from tfmq.delay.buckets import store as module
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import StoreIdentity, TimeSpan
from tfmq.delay.buckets.store import BucketIds


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_new_set_is_made_once_and_keeps_its_name(bench: Bench) -> None:
    assert (bench.ids, bench.buckets.store_id) == (1, 7)
    again = bench.crash()
    assert (again.ids, again.buckets.store_id, again.buckets.identity) == (0, 7, bench.buckets.identity)


def test_what_is_spilled_is_there_after_a_power_cut(bench: Bench) -> None:
    bench.arrive(NOW + 5 * SECOND, NOW + 5 * SECOND, NOW + DAY, absolute=True)
    bench.arrive(NOW + 1, NOW + 400 * DAY, 2**63 - 1, log_id=BILLS)
    spilled = bench.spill()
    assert spilled == 6
    assert bench.contents() == bench.expected() and len(bench.expected()) == 6
    again = bench.crash()
    assert again.contents() == bench.expected()
    assert (again.buckets.spilled_offset, again.buckets.spilled_number) == (800, 8)
    assert (sum(each.count for each in again.buckets.live_buckets), again.buckets.broker_ms) == (6, NOW)


def test_dues_go_to_the_leaf_that_covers_them_else_to_spans_the_coarser_the_later(bench: Bench) -> None:
    bench.put(NOW + SECOND, NOW + 2 * HOUR, NOW + 10 * DAY, NOW + 300 * DAY)
    assert [span.exponent for span in bench.spans()] == [16, 22, 28, 34]
    bench.put(NOW + 11 * DAY, NOW + 2 * HOUR + 1)
    assert len(bench.spans()) == 4
    assert bench.contents() == bench.expected()


def test_a_batch_of_all_kinds_lies_sorted_in_its_buckets(bench: Bench) -> None:
    generator = seeded("all kinds")
    dues = [NOW + generator.randrange(1, 3 * HOUR) for _ in range(3000)]
    bench.put(*dues)
    assert bench.contents() == bench.expected()
    assert sum(bucket.count for bucket in bench.buckets.live_buckets) == 3000


def test_what_was_settled_is_left_out(bench: Bench) -> None:
    first, second, third = bench.arrive(NOW + 1, NOW + 2, NOW + DAY)
    (bill,) = bench.arrive(NOW + 3, log_id=BILLS)
    asked = []

    def pending(log_id, dues, numbers):  # type: ignore[no-untyped-def]
        asked.append((log_id, list(dues), list(numbers)))
        return False if log_id == BILLS else bytes(number != second.number for number in numbers)

    assert bench.spill(pending=pending) == 2
    assert bench.contents() == {each.number: kept_of(each) for each in (first, third)}
    assert asked == [(ORDERS, [NOW + 1, NOW + 2, NOW + DAY], [0, 1, 2]), (BILLS, [NOW + 3], [bill.number])]


def test_a_spill_of_nothing_moves_the_place_all_the_same(bench: Bench) -> None:
    bench.arrive(NOW + 1)
    assert bench.spill(pending=lambda *_: False) == 0
    assert bench.crash().buckets.spilled_number == bench.next_number
    assert bench.files() == []


def test_a_read_ends_after_the_record_that_reaches_the_bound(bench: Bench) -> None:
    sent = bench.put(*[NOW + 1] * 5, size=1000)
    bucket = bench.bucket(NOW + 1)
    (columns,) = bucket.read_columns(bench.buckets.files)
    asked = (bucket.bucket_id, columns.positions, columns.numbers)
    records = [each.record for each in sent]
    size = len(records[0])
    for bytes_max, count in ((1, 1), (size, 1), (size + 1, 2), (3 * size, 3), (99 * size, 5)):
        assert bench.buckets.read(*asked, bytes_max) == records[:count]
        assert bench.buckets.read_cached(*asked, bytes_max) == records[:count]
    bench.disk.is_cached = False
    assert bench.buckets.read_cached(*asked) is None
    bench.disk.is_cached = True
    bench.buckets.files.close()
    assert bench.buckets.read_cached(*asked) is None


def test_a_note_is_kept_through_spills_until_another_one_comes(bench: Bench) -> None:
    bench.buckets.commit(NOW, b"first")
    bench.put(NOW + 1)
    assert bench.buckets.queue_state == bench.crash().buckets.queue_state == b"first"
    bench.buckets.commit(NOW, b"")
    assert bench.buckets.queue_state == bench.crash().buckets.queue_state == b""
    with pytest.raises(TooLarge):
        bench.buckets.commit(NOW, bytes(8193))
    bench.buckets.close(NOW, b"last")
    assert bench.crash().buckets.queue_state == b"last"


def test_one_that_is_abandoned_writes_nothing_and_keeps_nothing_open(bench: Bench) -> None:
    before = bench.disk.number
    bench.buckets.abandon()
    bench.buckets.abandon()
    assert bench.disk.number == before and not bench.disk.open_files


def test_a_coarse_one_is_cut_when_its_time_comes_near(bench: Bench) -> None:
    bench.put(NEAR + HOUR * 2, NEAR + HOUR * 2 + MINUTE * 3, NEAR + HOUR * 2 + MINUTE * 3 + 1)
    (bucket,) = bench.buckets.live_buckets
    start = bucket.span.start
    assert bucket.span.exponent == 22
    assert bench.buckets.due_for_split(start - 131_073) == []
    assert bench.buckets.due_for_split(start - 131_072) == [bucket]
    assert bench.buckets.due_for_split(start + HOUR) == [bucket]
    assert bench.buckets.due_for_split(bucket.span.end) == []
    children = bench.buckets.split(bucket, everything)
    assert {child.span.exponent for child in children} == {16}
    assert list(bench.buckets.live_buckets) == children
    assert bench.contents() == bench.expected() == bench.crash().contents()


def test_a_split_one_is_read_until_it_is_released_and_is_gone_after_the_next_checkpoint(bench: Bench) -> None:
    sent = bench.put(NEAR, NEAR + 5 * SECOND)
    parent = bench.bucket(NEAR)
    (columns,) = parent.read_columns(bench.buckets.files)
    bench.buckets.split(parent, everything)
    bench.buckets.commit(NOW)
    assert len(bench.files()) == 3
    assert bench.buckets.read(parent.bucket_id, columns.positions, columns.numbers) == [each.record for each in sent]
    assert bench.contents() == bench.expected()
    bench.buckets.release(parent)
    bench.buckets.commit(NOW)
    assert len(bench.files()) == 2
    with pytest.raises(KeyError):
        bench.buckets.read(parent.bucket_id, columns.positions, columns.numbers)


def test_a_start_removes_what_a_split_left(bench: Bench) -> None:
    bench.put(NEAR, NEAR + 5 * SECOND)
    bench.buckets.split(bench.bucket(NEAR), everything)
    again = bench.crash()
    assert again.buckets.recovery_labels == {"whole", "unlisted"}
    assert len(again.files()) == 2 and again.contents() == bench.expected()


def test_later_arrivals_go_straight_to_the_finer_ones_and_make_new_ones_beside_them(bench: Bench) -> None:
    bench.put(NEAR, NEAR + 5 * SECOND)
    bench.buckets.split(bench.bucket(NEAR), everything)
    bench.put(NEAR + 1, NEAR + 30 * SECOND)
    assert {span.exponent for span in bench.spans()} == {10} and len(bench.spans()) == 3
    assert bench.contents() == bench.expected() == bench.crash().contents()


def test_one_that_got_too_much_is_to_be_split_but_never_the_finest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPLIT_MESSAGES", 3)
    bench.put(*[NEAR] * 4, NOW + DAY)
    (full,) = bench.buckets.oversized
    (finest,) = bench.buckets.split(full, everything)
    assert finest.span == TimeSpan(NEAR, 10)
    assert bench.buckets.oversized == [] and bench.buckets.split(finest, everything) is None


def test_what_is_settled_goes_with_the_next_checkpoint_and_before_that_comes_back(bench: Bench) -> None:
    bench.put(NOW + 1, NOW + DAY)
    bucket = bench.bucket(NOW + 1)
    bench.buckets.mark_obsolete(bucket)
    assert len(bench.buckets.live_buckets) == 1
    assert len(bench.crash().buckets.live_buckets) == 2
    bench.buckets.commit(NOW + MINUTE)
    assert len(bench.files()) == 1
    again = bench.crash()
    assert len(again.buckets.live_buckets) == 1 and again.buckets.broker_ms == NOW + MINUTE


def test_one_that_is_settled_counts_again_when_something_new_comes_into_it(bench: Bench) -> None:
    bench.put(NOW + 1)
    bucket = bench.bucket(NOW + 1)
    bench.buckets.mark_obsolete(bucket)
    bench.buckets.mark_obsolete(bucket)
    bench.put(NOW + 1)
    assert bench.bucket(NOW + 1) is bucket and bucket.count == 2
    bench.buckets.commit(NOW)
    assert bench.contents() == bench.expected() == bench.crash().contents()


def test_one_that_is_settled_while_it_is_split_goes_all_the_same(bench: Bench) -> None:
    bench.put(NEAR, NEAR + 5 * SECOND)
    parent = bench.bucket(NEAR)

    def settle(kind: str, path: str) -> None:
        bench.buckets.mark_obsolete(parent)

    bench.disk.after = settle
    children = bench.buckets.split(parent, everything)
    bench.disk.after = None
    assert list(bench.buckets.live_buckets) == children and bench.contents() == bench.expected()
    for child in children:
        bench.buckets.mark_obsolete(child)
    bench.buckets.release(parent)
    bench.buckets.commit(NOW)
    assert bench.files() == [] and bench.crash().contents() == {}


def test_one_that_is_settled_while_a_checkpoint_is_written_stays_until_the_next(bench: Bench) -> None:
    bench.put(NOW + 1, NOW + DAY)
    bucket = bench.bucket(NOW + 1)
    bench.disk.after = lambda kind, path: bench.buckets.mark_obsolete(bucket)
    bench.buckets.commit(NOW)
    bench.disk.after = None
    assert len(bench.buckets.live_buckets) == 1
    assert bench.crash().contents() == bench.crash("everything").contents() == bench.expected()
    bench.buckets.commit(NOW)
    assert len(bench.files()) == 1 and len(bench.crash("everything").contents()) == 1


def test_one_that_is_settled_while_it_gets_more_counts_again(bench: Bench) -> None:
    bench.put(NOW + 1)
    bucket = bench.bucket(NOW + 1)
    bench.arrive(NOW + 1)
    bench.disk.after = lambda kind, path: bench.buckets.mark_obsolete(bucket)
    bench.spill()
    bench.disk.after = None
    assert bench.bucket(NOW + 1) is bucket
    bench.buckets.commit(NOW)
    assert bench.contents() == bench.expected() == bench.crash().contents()


def test_a_list_passes_over_what_goes_while_it_is_made(bench: Bench) -> None:
    bench.put(NOW + 1, NOW + 10 * MINUTE, NOW + DAY)
    rows = bench.buckets.rows((0, 0), 1 << 63)
    first = next(rows)
    for bucket in bench.buckets.live_buckets[:2]:
        bench.buckets.mark_obsolete(bucket)
    bench.buckets.commit(NOW)
    assert [first.due, *(row.due for row in rows)] == [NOW + 1, NOW + DAY]
    rows = bench.buckets.rows((0, 0), 1 << 63)
    bench.disk.unlink(bench.buckets.live_buckets[0].path)
    bench.buckets.files.close()
    with pytest.raises(FileNotFoundError):
        next(rows)


def test_readers_and_writers_do_not_disturb_each_other(bench: Bench) -> None:
    """A worker spills, splits and commits while another thread reads what counts."""
    bench.put(NEAR + 1, NEAR + 30 * SECOND)
    faults: list[BaseException] = []

    def work() -> None:
        try:
            for n in range(60):
                bench.put(NEAR + n * 700, NEAR + HOUR + n)
                full = [leaf for leaf in bench.buckets.live_buckets if leaf.span.exponent > 10]
                if n % 9 == 5 and full:
                    bench.buckets.split(full[0], everything)
                bench.buckets.commit(NOW + n)
        except BaseException as error:
            faults.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    rounds = 0
    while worker.is_alive() or not rounds:
        rounds += 1
        for row in list(bench.buckets.rows((0, 0), 1 << 63)):
            slot, position = row.locator >> 48, row.locator & (1 << 48) - 1
            assert bench.buckets.read(slot, [position], [row.number]) == [bench.arrived[row.number].record]
    worker.join()
    assert faults == [] and bench.contents() == bench.expected() == bench.crash().contents()


def test_what_the_arrivals_give_is_what_the_buckets_have() -> None:
    rig = Rig(segment_bytes=8 << 20)
    generator = seeded("arrivals to buckets")
    for producer_id in range(70, 90):
        count = generator.choice((1, 5, 900))
        dues = [START_MS + generator.randrange(1, 3 * HOUR) for _ in range(count)]
        payloads = [generator.randbytes(generator.choice((100, 100, 3000))) for _ in range(count)]
        log_id, topic = generator.choice(((ORDERS, "orders"), (BILLS, "bills")))
        rig.send(Wanted(producer_id, sorted(dues), payloads, log_id, topic, bytes(n & 1 for n in range(count))))
        if producer_id % 7 == 0:
            rig.cancel((rig.sent[0].due, rig.sent[0].number))
    rig.log.force()
    bench = Bench()
    log, end = rig.log, rig.log.end_offset
    spilled = bench.buckets.spill(read_batches(log, 0, end), end, log.end_ordinal, START_MS, everything)
    assert spilled == len(rig.sent)
    expected = {e.number: Kept(e.due, e.log_id, e.absolute, e.record) for e in rig.sent}
    assert bench.contents() == expected == bench.crash().contents()


def test_a_new_one_never_takes_the_file_of_one_that_is_still_read(bench: Bench) -> None:
    sent = bench.put(NEAR)
    parent = bench.bucket(NEAR)
    (columns,) = parent.read_columns(bench.buckets.files)
    (child,) = bench.buckets.split(parent, everything)
    bench.buckets.mark_obsolete(child)
    bench.buckets.commit(NOW)
    bench.put(NEAR + 20 * SECOND)
    assert bench.bucket(NEAR + 20 * SECOND).span.exponent == 10
    assert bench.buckets.read(parent.bucket_id, columns.positions, columns.numbers) == [sent[0].record]


def test_a_split_waits_for_the_release_of_a_finer_one(bench: Bench) -> None:
    """The child's name is taken by a file that is still read."""
    bench.put(NEAR)
    fine = bench.bucket(NEAR)
    (child,) = bench.buckets.split(fine, everything)
    bench.buckets.mark_obsolete(child)
    bench.buckets.commit(NOW)
    bench.arrive(NEAR + HOUR, NEAR + 1)
    bench.spill(NOW - 10 * HOUR)
    coarse = bench.bucket(NEAR + 1)
    assert coarse.span.exponent == 22 and bench.buckets.split(coarse, everything) is None
    bench.buckets.release(fine)
    bench.buckets.commit(NOW)
    assert len(bench.buckets.split(coarse, everything)) == 2


def test_next_after_goes_from_leaf_to_leaf(bench: Bench) -> None:
    bench.put(NEAR, NEAR + 3 * MINUTE, NEAR + 2 * DAY)
    window_end, met = NOW, []
    while (bucket := bench.buckets.next_after(window_end)) is not None:
        met.append(bucket)
        window_end = bucket.span.end
    assert met == list(bench.buckets.live_buckets) and len(met) == 3


def test_a_full_disk_leaves_all_as_it_was_and_the_spill_is_tried_again(bench: Bench) -> None:
    bench.put(NOW + 1)
    before, refused = bench.contents(), set()
    for kind in ("write", "create", "rename"):
        for nth in range(1, 9):
            bench.arrive(NOW + 1, NOW + 2 * DAY, NOW + 3 * HOUR, NOW + len(bench.arrived) * MINUTE)
            rule = bench.disk.faults.fail(kind, nth=nth, error=errno.ENOSPC)
            opened = set(bench.disk.open_files)
            try:
                bench.spill()
            except Full:
                refused.add(kind)
                assert bench.contents() == before
                assert bench.crash("everything").contents() == before
                assert len(bench.files()) == len(bench.buckets.live_buckets)
                assert all(bench.disk.size(leaf.path) == leaf.size for leaf in bench.buckets.live_buckets)
                assert not any(file.path.endswith("bucket") for file in bench.disk.open_files - opened)
            assert bench.buckets.stop_reason is None
            bench.disk.faults.clear()
            assert rule.hit <= 1
            bench.spill()
            before = bench.contents()
            assert before == bench.expected()
    assert refused == {"write", "create", "rename"}


@pytest.mark.parametrize("kind", ["write", "force", "force_folder", "rename", "create"])
def test_an_error_of_the_disk_stops_the_store_and_what_was_fsynced_is_served(kind: str) -> None:
    struck = 0
    for nth in range(1, 8):
        bench = Bench()
        bench.put(NOW + 1, NOW + DAY)
        before = bench.contents()
        bench.arrive(NOW + 1, NOW + 3 * HOUR)
        rule = bench.disk.faults.fail(kind, nth=nth)
        try:
            bench.spill()
        except OSError:
            struck += 1
            bench.disk.faults.clear()
            assert bench.buckets.stop_reason is not None and "failed" in bench.buckets.stop_reason
            assert bench.contents() == before
            for attempt in (bench.spill, lambda bench=bench: bench.buckets.commit(NOW)):
                with pytest.raises(Stopped):
                    attempt()
            assert [path for path in bench.disk.closed_unforced if path.endswith(".bucket")] == []
            again = bench.crash()
            assert again.contents() in (before, again.expected())
            again.spill()
            assert again.contents() == again.expected()
        else:
            assert not rule.hit
    assert struck


def test_an_error_while_the_arrivals_are_read_takes_everything_back_and_stops_nothing(bench: Bench) -> None:
    bench.put(NOW + 1)
    before = bench.contents()
    sent = bench.arrive(NOW + 1, NOW + DAY)

    def broken() -> Iterator[ArrivalBatch]:
        yield from bench.batches()
        raise OSError(errno.EIO, "the arrivals cannot be read")

    with pytest.raises(OSError, match="cannot be read"):
        bench.buckets.spill(broken(), 900, 9, NOW, everything)
    assert bench.buckets.stop_reason is None and bench.contents() == before
    bench.spill()
    assert len(bench.contents()) == len(before) + len(sent)


def test_many_files_are_fsynced_together(bench: Bench) -> None:
    forces = bench.disk.faults.counts["force"]
    bench.put(*[NOW + n * 66_000 for n in range(1, 31)])
    assert len(bench.buckets.live_buckets) >= 29
    assert bench.disk.faults.counts["sync"] == 1
    assert bench.disk.faults.counts["force"] == forces + 1  # The checkpoint's.
    assert bench.crash().contents() == bench.expected()


def test_a_joint_fsync_that_fails_without_a_loss_of_ours_changes_nothing(bench: Bench) -> None:
    bench.disk.write_file("data/other", b"")
    bench.disk.faults.fail("sync_file", path="data/other")
    bench.put(*[NOW + n * 66_000 for n in range(1, 31)])
    assert bench.buckets.stop_reason is None
    assert bench.crash().contents() == bench.expected()


def test_a_joint_fsync_that_loses_bytes_of_a_bucket_stops(bench: Bench) -> None:
    bench.arrive(*[NOW + n * 66_000 for n in range(1, 31)])
    bench.disk.faults.fail("sync_file", path=".bucket")
    with pytest.raises(OSError, match="error"):
        bench.spill()
    assert bench.buckets.stop_reason is not None
    assert bench.crash().contents() == {}


def test_more_buckets_than_descriptors(bench: Bench) -> None:
    bench.arrive(*[NOW + n * 66_000 for n in range(1, 120)])
    bench.disk.descriptors_max = len(bench.disk.open_files) + 70
    bench.spill()
    assert len(bench.contents()) == 119
    assert len(bench.disk.open_files) <= 70
    bench.buckets.close(NOW)
    assert not bench.disk.open_files


def test_a_closed_one_refuses_and_the_last_time_is_kept(bench: Bench) -> None:
    bench.put(NOW + 1)
    bench.buckets.close(NOW + HOUR)
    with pytest.raises(Stopped):
        bench.buckets.commit(NOW)
    assert bench.crash().buckets.broker_ms == NOW + HOUR


def test_a_closed_set_is_the_same_when_it_is_opened_again(bench: Bench) -> None:
    bench.put(NOW + 1, NOW + DAY)
    bench.buckets.close(NOW)
    again = bench.on(bench.disk)
    assert again.contents() == bench.expected()
    assert again.buckets.recovery_labels == {"whole"}


def test_a_damaged_one_is_kept_under_another_name(bench: Bench) -> None:
    bench.put(NOW + 1)
    one = bench.bucket(NOW + 1)
    content = bench.disk.read_file(one.path)
    one.damage.append(Corrupt(one.path, 0, 1, "rotten"))
    bench.disk.faults.fail("rename", error=errno.ENOSPC)
    with pytest.raises(Full):
        bench.buckets._delete_file(one)
    for _ in range(2):
        bench.buckets._delete_file(one)
        assert not bench.disk.exists(one.path) and bench.disk.read_file(f"{one.path}.damaged") == content
        bench.disk.write_file(one.path, b"again")


# Slots of buckets: each given once, and again only after all others.


def bucket_of_slots(slot: int) -> Bucket:
    return Bucket("f", StoreIdentity(1, 2), TimeSpan(slot << 16, 16), slot, 0, 0)


def test_a_slot_that_was_given_up_is_not_given_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS_MAX", 5)
    slots = BucketIds({1: bucket_of_slots(1), 2: bucket_of_slots(2)})
    assert slots[2].bucket_id == 2 and len(slots) == 2
    third = bucket_of_slots(slots.allocate())
    slots[third.bucket_id] = third
    assert third.bucket_id == 3
    del slots[3]
    with pytest.raises(KeyError):
        slots[3]
    given = []
    for _ in range(3):
        given.append(slots.allocate())
        slots[given[-1]] = bucket_of_slots(given[-1])
    assert given == [4, 5, 3]


def test_there_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS_MAX", 2)
    slots = BucketIds({1: bucket_of_slots(1), 2: bucket_of_slots(2)})
    with pytest.raises(Full, match="limit of 2"):
        slots.allocate()
    del slots[1]
    assert slots.allocate() == 1
