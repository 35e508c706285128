"""The start of the buckets: it looks at names and sizes, refuses what it cannot answer for, clears the rest away."""

from __future__ import annotations

import pytest

from journal.errors import Corrupt
from tests.delay.bucketing import DAY, FOLDER, NOW, Bench, everything
from tfmq.delay.buckets.format import TimeSpan, bucket_name


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.put(NOW + 1, NOW + DAY)
    return bench


def first_name(bench: Bench) -> str:
    return bench.buckets.live_buckets[0].path.rpartition("/")[2]


def picture(bench: Bench) -> dict[str, bytes]:
    return {name: bench.disk.read_file(f"{FOLDER}/{name}") for name in bench.disk.list(FOLDER)}


def test_a_start_reads_the_checkpoint_and_no_bucket(bench: Bench) -> None:
    reads = bench.disk.faults.counts["read"]
    bench.on(bench.disk)
    assert bench.disk.faults.counts["read"] == reads + 1


def test_more_bytes_than_listed_are_cut(bench: Bench) -> None:
    whole = picture(bench)
    bench.damage_file(first_name(bench), lambda data: data.extend(b"more"))
    again = bench.on(bench.disk)
    assert again.buckets.recovery_labels == {"whole", "unlisted chunks"}
    assert picture(again) == whole and picture(again.crash()) == whole


def test_what_is_not_listed_is_removed_and_what_is_not_ours_is_left(bench: Bench) -> None:
    whole = picture(bench)
    for name in (bucket_name(TimeSpan(0, 16)), "checkpoint.new", f"{first_name(bench)}.repaired"):
        bench.disk.write_file(f"{FOLDER}/{name}", b"left over")
    bench.disk.write_file(f"{FOLDER}/stranger", b"?")
    bench.disk.make_folder(f"{FOLDER}/arrivals")
    bench.on(bench.disk)
    bench.disk.remove_folder(f"{FOLDER}/arrivals")
    assert picture(bench) == whole | {"stranger": b"?"}


def test_a_missing_file_is_refused_by_name_and_nothing_is_changed(bench: Bench) -> None:
    bench.disk.unlink(f"{FOLDER}/{first_name(bench)}")
    bench.disk.write_file(f"{FOLDER}/{bucket_name(TimeSpan(0, 16))}", b"left over")
    before = picture(bench)
    with pytest.raises(Corrupt, match=f"{first_name(bench)}.*missing.*1 messages.*tfmq log repair"):
        bench.on(bench.disk)
    assert picture(bench) == before


def test_a_missing_or_rotten_checkpoint_is_refused_and_nothing_is_changed(bench: Bench) -> None:
    bench.damage_file("checkpoint", lambda data: data.__setitem__(slice(None), bytes(len(data))))
    before = picture(bench)
    with pytest.raises(Corrupt, match="both of its copies"):
        bench.on(bench.disk)
    bench.disk.unlink(f"{FOLDER}/checkpoint")
    before.pop("checkpoint")
    with pytest.raises(Corrupt, match=r"checkpoint of 2 buckets.*missing"):
        bench.on(bench.disk)
    assert picture(bench) == before


def test_nothing_is_removed_before_the_checkpoint_is_sure(bench: Bench) -> None:
    """An earlier process may have died between its rename and the force of the folder."""
    order: list[str] = []
    bench.buckets.split(bench.buckets.live_buckets[1], everything)
    state = bench.disk.crash(keep="everything")
    state.after = lambda kind, path: order.append(kind)
    bench.on(state)
    assert order.index("force_folder") < order.index("unlink")
