"""The offline repair of the buckets: all that is whole is kept, what is lost is said, and the store opens again."""

from __future__ import annotations

import pytest

from journal.clock import SystemClock
from journal.errors import Corrupt
from journal.fsck.replacement import remove_originals
from journal.log.log import Log
from journal.record.batch import Batch
from journal.testing import Moment, SimulatedDisk, crash_states
from tests.delay.bucketing import DAY, FOLDER, HOUR, MINUTE, NEAR, NOW, Bench, everything, flip, record_of
from tests.scale import seeded
from tfmq.delay.arrivals.log import LOG_ID, arrival_options
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


def test_a_folder_without_anything_has_nothing_to_mend(bench: Bench) -> None:
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
    sizes = {
        "all but a byte": bucket.size - 1,
        "half": bucket.size * 3 // 4,
        "the columns": chunk.records_position,
    }
    bench.damage_file(name, lambda data: data.__delitem__(slice(sizes[left], None)))
    assert not is_whole(bench)
    served = bench.crash("everything")
    found = {number: kept for number, kept in served.contents().items() if kept.record is not None}
    assert served.buckets.damage and found == {number: whole[number] for number in found}
    assert len(found) == {"all but a byte": 39, "the columns": 0}.get(left, len(found)) and len(found) < 40
    assert left != "half" or len(found) > 5
    assert mend(bench) == [(name, len(found), 40 - len(found))]
    assert is_whole(bench) and bench.crash().contents() == found


def test_one_with_nothing_whole_in_it_goes(bench: Bench) -> None:
    name = bench.buckets.live_buckets[1].path.rpartition("/")[2]
    bench.damage_file(
        name, lambda data: data.__setitem__(slice(HEAD_SIZE, None), bytes(len(data) - HEAD_SIZE))
    )
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
def test_without_a_checkpoint_and_without_buckets_what_is_in_the_arrivals_counts(
    bench: Bench, first: int
) -> None:
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
