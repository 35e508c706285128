"""The offline repair of the buckets: all that is whole is kept, what is lost is said, and the store opens again."""

from __future__ import annotations

import pytest

from journal.clock import SystemClock
from journal.errors import Corrupt
from journal.fsck.findings import remove_originals
from journal.log.log import Log
from journal.record.batch import Batch
from journal.testing import Moment, SimulatedDisk, crash_states
from tests.broker.helpers import DATA, Broker, after, handles
from tests.delay.bucket_rig import DAY, FOLDER, HOUR, MINUTE, NEAR, NOW, Bench, damage_in, everything, flip, record_of
from tests.scale import seeded
from tfmq.broker.data_repair import repair_data, verify_data
from tfmq.delay.arrivals.log import LOG_ID, arrival_options
from tfmq.delay.buckets import bucket as bucket_module
from tfmq.delay.buckets.format import CHUNK_SIZE, HEAD_SIZE, ChunkHead
from tfmq.delay.buckets.fsck import BucketScan, is_bucket_folder, repair_buckets, verify_buckets


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.put(NOW + 1, NOW + 2, NOW + DAY)
    bench.put(NOW + 3, NOW + 3 * HOUR)
    return bench


def arrivals(bench: Bench, first_number: int) -> None:
    """A log of arrivals that begins at that ordinal, as truncation leaves it."""
    bench.disk.make_folder(f"{FOLDER}/arrivals")
    log = Log.open(
        bench.disk, f"{FOLDER}/arrivals", log_id=LOG_ID, clock=SystemClock(), options=arrival_options(1, 1.0)
    )
    for sequence in range(first_number):
        record = record_of(sequence)
        log.append([Batch(record, (), 70, sequence, 1)])
    log.force()
    log.truncate_before(log.end_offset)
    log.close()


def first_file(bench: Bench) -> str:
    return bench.buckets.live_buckets[0].path.rpartition("/")[2]


def mend(bench: Bench) -> list[tuple[str, int, int]]:
    open_before = set(bench.disk.open_files)
    planned = repair_buckets(bench.disk, FOLDER, dry_run=True)
    done = repair_buckets(bench.disk, FOLDER)
    assert done == planned and bench.disk.open_files == open_before
    return [(each.file.rpartition("/")[2], each.kept, each.lost) for each in done]


def is_whole(bench: Bench) -> bool:
    return not verify_buckets(bench.disk, FOLDER, records=True).damaged


def test_what_is_whole_is_left_alone(bench: Bench) -> None:
    before = {name: bench.disk.read_file(f"{FOLDER}/{name}") for name in bench.disk.list(FOLDER)}
    assert mend(bench) == []
    assert {name: bench.disk.read_file(f"{FOLDER}/{name}") for name in bench.disk.list(FOLDER)} == before


def test_a_folder_without_anything_has_nothing_to_repair(bench: Bench) -> None:
    bench.disk.make_folder("data/empty")
    assert repair_buckets(bench.disk, "data/empty") == []


@pytest.mark.parametrize(
    ("position", "lost"),
    [(8, set()), (HEAD_SIZE + 3, {0, 1}), (HEAD_SIZE + CHUNK_SIZE + 5, {0, 1}), (-3, {4})],
    ids=["head", "chunk", "columns", "record"],
)
def test_a_damaged_bucket_keeps_all_that_is_whole(bench: Bench, position: int, lost: set[int]) -> None:
    expected = {number: kept for number, kept in bench.contents().items() if number not in lost}
    name = first_file(bench)
    bench.damage_file(name, flip(position))
    damaged = bench.disk.read_file(f"{FOLDER}/{name}")
    assert mend(bench) == [(name, 3 - len(lost), len(lost))]
    assert is_whole(bench) and mend(bench) == []
    assert bench.disk.read_file(f"{FOLDER}/{name}.damaged") == damaged
    again = bench.crash()
    assert again.contents() == expected
    assert remove_originals(again.disk, FOLDER) == [f"{name}.damaged"]
    again.put(NOW + 7)
    assert len(again.contents()) == len(expected) + 1


def test_one_that_lost_its_end_and_one_that_is_missing(bench: Bench) -> None:
    short, missing = first_file(bench), bench.buckets.live_buckets[2].path.rpartition("/")[2]
    bench.damage_file(short, lambda data: data.__delitem__(slice(-10, None)))
    bench.disk.unlink(f"{FOLDER}/{missing}")
    with pytest.raises(Corrupt, match="1 messages in all"):
        bench.crash("everything")
    assert mend(bench) == [(missing, 0, 1), (short, 2, 1)]
    assert is_whole(bench)
    assert sorted(bench.crash().contents()) == [0, 1, 5]


@pytest.mark.parametrize("left", ["all but a byte", "half", "the columns"])
def test_a_chunk_cut_off_by_the_end_of_the_file_keeps_every_record_before_that(left: str) -> None:
    bench = Bench()
    bench.put(*range(NOW + 1, NOW + 41))
    whole, name = bench.contents(), first_file(bench)
    ((_, bucket),) = BucketScan(bench.disk, FOLDER).buckets()
    with bench.buckets.files.opened(bucket.path) as file:
        (chunk,) = bucket.chunks(file)
    assert isinstance(chunk, ChunkHead)
    sizes = {"all but a byte": bucket.size - 1, "half": bucket.size * 3 // 4, "the columns": chunk.records_position}
    bench.damage_file(name, lambda data: data.__delitem__(slice(sizes[left], None)))
    assert not is_whole(bench)
    served = bench.crash("everything")
    found = {number: kept for number, kept in served.contents().items() if kept.record is not None}
    assert damage_in(served.buckets) and found == {number: whole[number] for number in found}
    assert len(found) == {"all but a byte": 39, "the columns": 0}.get(left, len(found)) and len(found) < 40
    assert left != "half" or len(found) > 5
    assert mend(bench) == [(name, len(found), 40 - len(found))]
    assert is_whole(bench) and bench.crash().contents() == found


def test_one_with_nothing_whole_in_it_goes(bench: Bench) -> None:
    name = bench.buckets.live_buckets[1].path.rpartition("/")[2]
    bench.damage_file(name, lambda data: data.__setitem__(slice(HEAD_SIZE, None), bytes(len(data) - HEAD_SIZE)))
    assert mend(bench) == [(name, 0, 1)]
    assert len(bench.crash().buckets.live_buckets) == 2
    assert bench.disk.exists(f"{FOLDER}/{name}.damaged")


def test_a_lost_checkpoint_is_made_anew_and_what_the_arrivals_have_counts_there(bench: Bench) -> None:
    whole = bench.contents()
    arrivals(bench, 4)
    for name in (None, "checkpoint"):
        if name is None:
            bench.disk.unlink(f"{FOLDER}/checkpoint")
        else:
            bench.damage_file(name, lambda data: data.__setitem__(slice(None), b"x" * len(data)))
        with pytest.raises(Corrupt):
            bench.crash("everything")
        repair_buckets(bench.disk, FOLDER)
        assert is_whole(bench)
        again = bench.crash()
        assert again.contents() == {number: kept for number, kept in whole.items() if number < 4}
        assert again.buckets.store_id == 7 and again.buckets.spilled_number == 4
        again.spill()
        assert again.contents() == whole


def test_without_a_checkpoint_a_split_that_was_not_over_counts_once(bench: Bench) -> None:
    bench.put(NEAR, NEAR + 5_000, NEAR + MINUTE)
    whole = bench.contents()
    bench.buckets.split(bench.bucket(NEAR), everything)
    assert len(bench.files()) > len(bench.buckets.live_buckets)
    arrivals(bench, bench.next_number)
    bench.disk.unlink(f"{FOLDER}/checkpoint")
    ((_, kept, lost),) = mend(bench)
    assert (kept, lost) == (len(whole), 0) and is_whole(bench)
    again = bench.crash()
    assert again.contents() == whole
    assert again.buckets.recovery_labels == {"whole", "foreign"}


def test_without_a_checkpoint_and_without_arrivals_nothing_is_guessed(bench: Bench) -> None:
    bench.disk.unlink(f"{FOLDER}/checkpoint")
    with pytest.raises(Corrupt, match="arrivals"):
        repair_buckets(bench.disk, FOLDER)


@pytest.mark.parametrize("first", [0, 4])
def test_without_a_checkpoint_and_without_buckets_what_is_in_the_arrivals_counts(bench: Bench, first: int) -> None:
    for name in [*bench.files(), "checkpoint"]:
        bench.disk.unlink(f"{FOLDER}/{name}")
    arrivals(bench, first)
    assert is_bucket_folder(bench.disk, FOLDER) and not is_whole(bench)
    with pytest.raises(Corrupt, match="identifies the store"):
        repair_buckets(bench.disk, FOLDER)
    (done,) = repair_buckets(bench.disk, FOLDER, store_id=7)
    assert ("cannot be told apart" in done.note) == (first > 0)
    assert is_whole(bench) and repair_buckets(bench.disk, FOLDER, store_id=7) == []
    again = bench.crash().buckets
    assert (again.store_id, again.spilled_number, again.live_buckets) == (7, first, ())


def test_where_nothing_says_whose_they_are_nothing_is_made_of_it(bench: Bench) -> None:
    bench.disk.unlink(f"{FOLDER}/checkpoint")
    for name in bench.files():
        bench.damage_file(name, flip(8))
    with pytest.raises(Corrupt, match="identifies the store"):
        repair_buckets(bench.disk, FOLDER)


@pytest.mark.parametrize("without", ["records", "checkpoint"])
def test_a_power_cut_in_the_middle_of_a_repair_leaves_something_that_it_goes_on_with(
    bench: Bench, without: str
) -> None:
    bench.put(NEAR, NEAR + 5_000)
    if without == "checkpoint":
        bench.buckets.split(bench.bucket(NEAR), everything)
        arrivals(bench, bench.next_number)
        bench.disk.unlink(f"{FOLDER}/checkpoint")
    else:
        bench.damage_file(first_file(bench), flip(-3))
    undisturbed = bench.on(mended(bench)).contents()
    generator = seeded("repair", without)
    states = 0
    state = bench.disk.crash(keep="everything")
    moments: list[Moment] = []
    state.after = lambda kind, path: moments.append(Moment(state))
    repair_buckets(state, FOLDER)
    for moment in moments:
        for again in crash_states(moment, 6, generator):
            repair_buckets(again, FOLDER)
            assert bench.on(again).contents() == undisturbed
            states += 1
    assert states > 10


def mended(bench: Bench) -> SimulatedDisk:
    state = bench.disk.crash(keep="everything")
    repair_buckets(state, FOLDER)
    return state


# With a broker, whose arrival log still has what the bucket has.

HOURS = 3 * 3_600_000
BUCKETS = f"{DATA}/delay"
COUNT = 12


def with_one_bucket() -> tuple[Broker, list[bytes]]:
    """Stopped after a spill to one bucket; what is to be delivered, in order.

    One message was cancelled before the spill, one after it, one moved.
    """
    broker = Broker()
    broker.create("orders", 1)
    producer = broker.lease()
    given: list[str] = []
    for number in range(COUNT):
        due = after(HOURS + 1000 * (number % 5))
        given += handles(broker.delay(producer, number, [b"message %02d" % number], due=due))
    assert broker.cancel_delayed(given[2]).state == "cancelled"
    broker.advance(90)
    assert broker.cancel_delayed(given[7]).state == "cancelled"
    broker.reschedule(given[0], after(HOURS + 60_000))
    broker.stop()
    order = sorted(set(range(1, COUNT)) - {2, 7}, key=lambda number: (number % 5, number))
    return broker, [b"message %02d" % number for number in [*order, 0]]


def damage_bucket(disk: SimulatedDisk, *positions: int) -> str:
    """Flips bits in the only bucket; returns its path."""
    (path,) = [f"{BUCKETS}/{name}" for name in disk.list(BUCKETS) if name.endswith(".bucket")]
    data = bytearray(disk.read_file(path))
    for position in positions:
        flip(position)(data)
    disk.write_file(path, bytes(data))
    return path


def assert_delivered_once(broker: Broker, expected: list[bytes]) -> None:
    broker.advance(3 * 3600 - 91)
    assert broker.payloads() == []
    broker.advance(30)
    again = broker.restart()
    again.advance(4000)
    assert again.payloads() == expected


COLUMNS = HEAD_SIZE + CHUNK_SIZE
ROWS = COUNT - 1
CUT_PLACES = {
    "head": HEAD_SIZE + 1,
    "due time": COLUMNS + 7,
    "number": COLUMNS + 8 * ROWS + 7,
    "target": COLUMNS + 16 * ROWS + 3,
    "size": COLUMNS + 20 * ROWS + 3,
    "flag": COLUMNS + 24 * ROWS,
    "table": COLUMNS + 25 * ROWS + 2,
    "record": -3,
}


@pytest.mark.long
@pytest.mark.parametrize("how", ["repair", "start"])
@pytest.mark.parametrize("place", CUT_PLACES)
def test_what_the_arrival_log_still_has_of_a_damaged_bucket_is_delivered_once(place: str, how: str) -> None:
    broker, expected = with_one_bucket()
    disk = broker.disk
    path = damage_bucket(disk, CUT_PLACES[place])
    before = disk.read_file(path)
    report = verify_buckets(disk, BUCKETS)
    rebuilt = 1 if place == "record" else ROWS
    (what,) = [finding.what for finding in report.findings if finding.field != "count"]
    assert f"rebuilds {rebuilt} of its messages from the arrival log" in what and "messages are lost" not in what
    if how == "repair" or place == "record":  # a start reads no record
        planned = repair_data(disk, DATA, dry_run=True).buckets
        (done,) = repair_data(disk, DATA).buckets
        assert [done] == planned and (done.kept, done.lost) == (ROWS, 0)
        assert f"{rebuilt} of the messages kept are rebuilt" in done.note
        assert not any(report.damaged for report in verify_data(disk, DATA))
    again = Broker(disk, broker.clock)
    assert disk.read_file(path + ".damaged") == before
    assert len(again.delayed()) == len(expected)
    assert_delivered_once(again, expected)
    assert not verify_buckets(disk, BUCKETS, records=True).damaged


def test_what_the_arrival_log_has_no_more_is_named_as_lost() -> None:
    broker, expected = with_one_bucket()
    disk = broker.disk
    damage_bucket(disk, COLUMNS)
    (name,) = [name for name in disk.list(f"{BUCKETS}/arrivals") if name.endswith(".arrivals")]
    arrived = f"{BUCKETS}/arrivals/{name}"
    disk.damage(arrived, disk.read_file(arrived).index(b"message 05"), b"#")
    (finding,) = [each for each in verify_buckets(disk, BUCKETS).findings if each.field == "columns"]
    assert f"rebuilds {ROWS - 1} of its messages from the arrival log, 1 are lost" in finding.what
    (done,) = repair_data(disk, DATA).buckets
    assert (done.kept, done.lost) == (ROWS - 1, 1)
    assert_delivered_once(Broker(disk, broker.clock), [each for each in expected if each != b"message 05"])


def test_a_start_reads_only_the_last_chunks_of_a_bucket_for_what_arrivals_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "TAIL_WINDOW_BYTES", 64)
    bench = Bench()
    for _ in range(40):
        bench.put(NOW + DAY)
    ((_, bucket),) = BucketScan(bench.disk, FOLDER).buckets()
    with bench.buckets.files.opened(bucket.path) as file:
        every = list(bucket.chunks(file))
        offsets = [part.arrival_offset for part in every if isinstance(part, ChunkHead)]
        assert len(offsets) == 40
        for count in (0, 1, 2, 39, 40):
            after_offset = offsets[39 - count] if count < 40 else 0
            assert list(bucket.last_chunks(file, after_offset)) == every[40 - count :]
