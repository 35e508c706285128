"""Verification of a store: what is damaged or missing is named, with the times that cannot be restored."""

import pytest

from tests.replication.objects import CallsItself, HookedStore, Primary, empty_disk, read_tree
from tests.replication.test_materialize import materialized, random_history, restorable
from tests.replication.test_sweep import history_of_snapshots, swept
from tests.scale import scaled, seeded
from tfmq.replication.entries import (
    IDENTITY_KEY,
    EntryKind,
    Position,
    encode_entry,
    entry_key,
    handover_key,
    manifest_key,
    term_key,
)
from tfmq.replication.errors import InvalidObject, NewerObject, NoReplica
from tfmq.replication.verify import Finding, Range, Verification, count_bytes, verify

pytestmark = pytest.mark.usefixtures("small_chunks")


def verified(primary: Primary) -> Verification:
    return verify(primary.store, CallsItself())


def test_a_whole_replica_has_no_findings() -> None:
    primary = history_of_snapshots(3)
    done: list[int] = []
    found = verify(primary.store, CallsItself(), done.append)
    assert not found.is_damaged
    assert (found.manifests, found.chunks, found.entries) == (3, 2 + 3, 2)
    assert (found.first_ms, found.last_ms) == (primary.times[Position(1, 2)], primary.time_ms)
    assert sum(done) == found.bytes <= count_bytes(primary.store)


def test_damage_is_named_with_what_it_costs() -> None:
    primary = history_of_snapshots(3)
    first, middle, last = (Position(1, slot) for slot in (2, 3, 4))
    times = primary.times
    primary.store.damage(manifest_key(middle))
    assert verified(primary).findings == [Finding(manifest_key(middle), "fails its checksum", ())]
    del primary.store.objects[entry_key(middle)]
    lost = (Range(times[first], times[last]),)
    assert verified(primary).findings == [
        Finding(manifest_key(middle), "fails its checksum", ()),
        Finding(entry_key(middle), "is missing", lost),
    ]
    primary.store.damage(manifest_key(last))
    for_ever = (Range(times[first], None),)
    assert [finding.lost for finding in verified(primary).findings] == [(), (), for_ever]


def test_a_chunk_is_named_once_with_the_times_that_all_its_snapshots_cost() -> None:
    primary = history_of_snapshots(3)
    chunk = next(chunk for chunk in primary.snapshot().chunks() if chunk.size == 700 - 512)
    del primary.store.objects[chunk.key]
    assert verified(primary).findings == [
        Finding(chunk.key, "is missing", (Range(primary.times[Position(1, 2)], None),))
    ]


def test_changed_and_cut_chunks_and_entries_are_found() -> None:
    primary = history_of_snapshots(2)
    primary.write_file("a", b"1")
    chunks = primary.store.keys("chunks/")
    primary.store.damage(chunks[0])
    primary.store.objects[chunks[1]] = (b"", 0.0)
    entry = entry_key(primary.position)
    primary.store.damage(entry)
    whats = {finding.key: finding.what for finding in verified(primary).findings}
    assert whats[chunks[0]] == "does not have the content that its name says"
    assert whats[chunks[1]].startswith("has 0 bytes instead of ")
    assert whats[entry] == "fails its checksum"


def test_entries_in_flight_are_no_gap_and_a_broken_chain_is_one() -> None:
    primary = history_of_snapshots(1)
    for name in "abcd":
        primary.write_file(name, b"1")
    del primary.store.objects[entry_key(Position(1, 4))]
    assert not verified(primary).is_damaged
    primary.begin()
    assert verified(primary).findings == [
        Finding(entry_key(Position(1, 4)), "is missing", (Range(primary.times[Position(1, 3)], None),))
    ]
    del primary.store.objects[entry_key(Position(1, 6))]
    assert [finding.key for finding in verified(primary).findings] == [
        entry_key(Position(1, 4)),
        entry_key(Position(1, 6)),
    ]
    primary.store.damage(entry_key(Position(2, 0)))
    (finding,) = verified(primary).findings
    assert finding.what == f"{entry_key(Position(2, 0))} fails its checksum"


def test_a_fence_ahead_of_a_primary_is_no_gap() -> None:
    """A claimant puts it there if the primary still writes, and may die before the term has ended."""
    primary = history_of_snapshots(1)
    primary.fence(Position(1, primary.position.slot + 200))
    assert not verified(primary).is_damaged
    primary.fence(Position(1, primary.position.slot + 1))
    assert not verified(primary).is_damaged


def test_damage_of_the_entry_of_the_newest_snapshot_hinders_nothing() -> None:
    primary = history_of_snapshots(1)
    primary.store.damage(entry_key(primary.position))
    assert not verified(primary).is_damaged


def test_what_a_newer_version_has_stored_is_no_damage() -> None:
    primary = history_of_snapshots(1)
    data, modified = primary.store.objects[manifest_key(primary.position)]
    primary.store.objects[manifest_key(primary.position)] = (bytes([*data[:4], 2, *data[5:]]), modified)
    with pytest.raises(NewerObject):
        verified(primary)
    with pytest.raises(NoReplica, match="there is no replica"):
        verify(HookedStore(), CallsItself())


def test_what_a_sweep_deletes_meanwhile_is_no_damage() -> None:
    primary = history_of_snapshots(6)
    store = primary.store
    calls = 0

    def sweep_once(call: str, key: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            store.before = lambda call, key: None
            swept(store)

    store.before = sweep_once
    assert not verified(primary).is_damaged
    assert len(store.keys("manifests/")) == 3


@pytest.mark.parametrize("number", range(scaled(100)))
def test_the_times_that_are_lost_are_those_that_cannot_be_restored(number: int) -> None:
    generator = seeded("verify", number)
    primary = random_history(HookedStore(), generator)
    assert not verified(primary).is_damaged
    manifests = primary.store.keys("manifests/")
    for key in generator.sample(manifests, min(len(manifests), 2)):
        primary.store.damage(key)
    keys = primary.store.keys("chunks/") or manifests
    primary.store.objects.pop(generator.choice(keys))
    lost = [each for finding in verified(primary).findings for each in finding.lost]
    for position in restorable(primary):
        disk = empty_disk()
        try:
            materialized(primary.store, disk, until=position)
        except InvalidObject:
            at = primary.times[position]
            assert any(each.from_ms <= at and (each.to_ms is None or at <= each.to_ms) for each in lost)
        else:
            assert read_tree(disk) == primary.trees[position]
    if lost:
        unknown = [position for position in restorable(primary) if not _can_restore(primary, position)]
        assert unknown


def _can_restore(primary: Primary, position: Position) -> bool:
    try:
        materialized(primary.store, empty_disk(), until=position)
    except InvalidObject:
        return False
    return True


def test_what_only_servers_read_is_verified_too() -> None:
    primary = history_of_snapshots(1)
    primary.begin(skipped=2)
    store = primary.store
    for term in (1, 4):
        store.put_new(handover_key(term), b"m 1")
    assert not verified(primary).is_damaged
    store.damage(IDENTITY_KEY)
    store.damage(term_key(1))
    for term in (2, 3):
        del store.objects[term_key(term)]
    store.objects[handover_key(4)] = (b"m" * 65, 0.0)
    found = {finding.key: finding.what for finding in verified(primary).findings}
    assert found.pop(IDENTITY_KEY).startswith("cannot be read: ") and found.pop(term_key(1))
    assert found == {term_key(2): "and the 1 after it are missing", handover_key(4): "does not name a member"}
    del store.objects[IDENTITY_KEY]
    del store.objects[term_key(4)]
    found = {finding.key: finding.what for finding in verified(primary).findings}
    assert (found[IDENTITY_KEY], found[term_key(4)]) == ("is missing", "is missing, although the term has entries")
    lost = {finding.key: finding.lost for finding in verified(primary).findings}
    assert lost.pop(term_key(4)) == (Range(primary.time_ms, None),), "servers would not look for its entries"
    assert set(lost.values()) == {()}, "a restore needs none of these"


def test_a_fence_that_is_missing_or_was_replaced_is_found() -> None:
    """Without it, the server that was primary in the term would acknowledge what no other server reads."""
    primary = history_of_snapshots(1)
    primary.write_file("a", b"1")
    end = primary.position
    primary.begin()
    store, key = primary.store, entry_key(Position(end.term, end.slot + 1))
    fence = store.objects.pop(key)
    (finding,) = verified(primary).findings
    assert (finding.key, finding.lost) == (key, ()) and "missing" in finding.what and "acknowledge" in finding.what
    store.objects[key] = (
        encode_entry(EntryKind.OPERATIONS, Position(end.term, end.slot + 1), primary.time_ms, [b""]),
        0.0,
    )
    (finding,) = verified(primary).findings
    assert finding.key == key and "where a fence has ended the term" in finding.what
    store.objects[key] = fence
    store.damage(key)
    (finding,) = verified(primary).findings
    assert (finding.key, finding.what) == (key, "fails its checksum")


def test_a_first_snapshot_that_is_missing_is_found() -> None:
    """Before a sweep that of the first BASE, after one that of the first entry."""
    primary = Primary(HookedStore())
    primary.begin()
    primary.base()
    first, begin_ms = primary.position, primary.time_ms
    primary.write_file("a", b"1")
    store = primary.store
    kept = store.objects.pop(manifest_key(first))
    assert verified(primary).findings == [Finding(manifest_key(first), "is missing", (Range(0, None),))]
    primary.snapshot()
    (finding,) = verified(primary).findings
    assert finding.key == manifest_key(first) and finding.lost == (Range(begin_ms, primary.time_ms),)
    store.objects[manifest_key(first)] = kept
    assert not verified(primary).is_damaged
    for name in "bcd":
        store.now += 600
        primary.write_file(name, b"1")
        primary.snapshot()
    oldest = swept(store).oldest
    assert oldest is not None and not verified(primary).is_damaged
    del store.objects[manifest_key(oldest)]
    (finding,) = verified(primary).findings
    assert finding.key == manifest_key(oldest) and finding.lost[0].from_ms == primary.times[oldest]
    # An interrupted sweep leaves entries, too.
    store.put_new("sweeps/1", b"")
    assert not verified(primary).is_damaged


def test_what_a_server_that_slept_has_stored_before_the_history_is_no_damage() -> None:
    primary = history_of_snapshots(6)
    kept = primary.store.objects[entry_key(Position(1, 1))]
    swept(primary.store)
    primary.store.objects[entry_key(Position(1, 1))] = kept
    assert not verified(primary).is_damaged
