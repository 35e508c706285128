"""The register is a fold over entries: the same from a snapshot, and damage is named, never guessed away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import NewerFormat
from tests.memory_bombs import NESTED_LISTS, refused_in_little_memory
from tfmq.bounded_msgpack import pack, unpack_stored
from tfmq.broker.catalog_state import (
    CREATE,
    DELAY_STORE,
    DELETE,
    GENERATION,
    GONE,
    GROUP_GONE,
    GROUP_OWNERS,
    GROW,
    ID_FIRST,
    JOURNAL,
    LEASE,
    LEASE_SPACING_MS,
    OFFSETS,
    OWNERS_EXPIRED,
    READY,
    SCHEDULE,
    SCHEDULE_GONE,
    SCHEDULE_ROW_BYTES,
    SCHEDULE_STATE,
    SETTINGS,
    TX_OFFSETS,
    CatalogState,
    CommittedOffset,
    PartitionOwner,
    ScheduleRow,
    ScheduleTable,
)


def register(*entries: tuple[Any, ...]) -> CatalogState:
    made = CatalogState()
    for entry in entries:
        made.apply_entry(entry)
    return made


def test_a_topic_is_there_once_it_is_ready() -> None:
    made = register((CREATE, "orders", 20, 4, {}))
    assert (made.topics[20].state, made.topics[20].partitions) == ("creating", 0)
    made.apply_entry((READY, 20))
    assert (made.topics[20].state, made.topics[20].partitions) == ("open", 4)


def test_a_growth_is_finished_or_taken_back() -> None:
    made = register((CREATE, "orders", 20, 1, {}), (READY, 20), (GROW, 20, 3))
    assert (made.topics[20].state, made.topics[20].partitions, made.topics[20].target) == ("growing", 1, 3)
    made.apply_entry((GROW, 20, 1))
    assert (made.topics[20].state, made.topics[20].partitions) == ("open", 1)


def test_settings_of_a_topic_are_replaced_whole() -> None:
    made = register((CREATE, "orders", 20, 1, {"flush.messages": 1}), (SETTINGS, 20, {"flush.seconds": 2}))
    assert made.topics[20].settings == {"flush.seconds": 2}
    with pytest.raises(ValueError):
        made.apply_entry((SETTINGS, 21, {}))


def test_nothing_of_a_deleted_group_is_left() -> None:
    made = register(
        (CREATE, "orders", 20, 1, {}),
        (READY, 20),
        (GROUP_OWNERS, "billing", 5, [("ada", 9000, [(20, 0)])]),
        (OFFSETS, "billing", 5, [(20, 0, 100, 0, 1)]),
        (GROUP_GONE, "billing"),
        (GROUP_GONE, "nobody"),
    )
    assert (made.groups, made.offsets_count, made.owners_count, made.generation) == ({}, 0, 0, 5)


def test_offsets_of_a_deleted_topic_are_forgotten() -> None:
    made = register(
        (CREATE, "orders", 20, 1, {}),
        (READY, 20),
        (GENERATION, "billing", 1, "m"),
        (OFFSETS, "billing", 1, [(20, 0, 100, 0, 1), (77, 0, 5, 0, 1)]),
    )
    assert list(made.groups["billing"].offsets) == [(20, 0)]
    made.apply_entry((DELETE, 20))
    made.apply_entry((GONE, 20))
    assert made.groups["billing"].offsets == {}
    assert made.topics == {}


def test_partitions_change_their_owners_one_by_one_and_a_new_beginning_frees_all() -> None:
    made = register(
        (CREATE, "orders", 20, 3, {}),
        (READY, 20),
        (GROUP_OWNERS, "billing", 5, [("ada", 9000, [(20, 0), (20, 1)]), ("bob", 8000, [(20, 2), (77, 0)])]),
        (GROUP_OWNERS, "billing", 6, [("bob", 8000, [(20, 1)]), ("", 0, [(20, 0), (20, 9)])]),
    )
    row = made.groups["billing"]
    assert row.owners == {(20, 1): PartitionOwner("bob", 6, 8000), (20, 2): PartitionOwner("bob", 5, 8000)}
    assert (row.generation, made.generation, made.owners_count) == (6, 6, 2)
    made.apply_entry((GENERATION, "billing", 7, ""))
    assert (row.owners, row.generation, made.owners_count) == ({}, 7, 0)
    made.apply_entry((GROUP_OWNERS, "billing", 8, [("ada", 9000, [(20, 0)])]))
    made.apply_entry((DELETE, 20))
    made.apply_entry((GONE, 20))
    assert (row.owners, made.owners_count) == ({}, 0)


def test_an_owner_that_has_expired_owns_its_partitions_with_its_generation_also_in_a_snapshot() -> None:
    made = register(
        (CREATE, "orders", 20, 3, {}),
        (READY, 20),
        (GROUP_OWNERS, "billing", 5, [("ada", 9000, [(20, 0), (20, 1)])]),
        (OWNERS_EXPIRED, "billing", [(20, 0, 5, True), (20, 1, 4, True), (20, 2, 5, True)]),
        (OWNERS_EXPIRED, "nobody", [(20, 0, 5, True)]),
    )
    read = CatalogState()
    read.load(made.dump())
    owners = read.groups["billing"].owners
    assert {key: (owner.generation, owner.expired) for key, owner in owners.items()} == {
        (20, 0): (5, True),
        (20, 1): (5, False),
    }
    read.apply_entry((OWNERS_EXPIRED, "billing", [(20, 0, 5, False)]))
    assert owners[20, 0] == PartitionOwner("ada", 5, 9000) and list(read.groups) == ["billing"]


def test_a_snapshot_has_owners_and_offsets() -> None:
    """Compared with what was entered: two dumps that both leave something out are the same, too."""
    made = register(
        (CREATE, "orders", 20, 2, {}),
        (READY, 20),
        (GROUP_OWNERS, "billing", 5, [("ada", 9000, [(20, 0)]), ("bob", 8000, [(20, 1)])]),
        (OFFSETS, "billing", 5, [(20, 1, 64, 0, 3)]),
    )
    read = CatalogState()
    read.load(made.dump())
    row = read.groups["billing"]
    assert (row.generation, read.generation, read.owners_count, read.offsets_count) == (5, 5, 2, 1)
    assert row.owners == {(20, 0): PartitionOwner("ada", 5, 9000), (20, 1): PartitionOwner("bob", 5, 8000)}
    assert row.offsets == {(20, 1): CommittedOffset(64, 0, 3, 5)}


def test_a_snapshot_from_before_there_were_owners_is_read() -> None:
    made = CatalogState()
    made.load(pack((3, 30, 9, (), (), [("billing", 4, "m1", [(20, 0, 100, 0, 1, 4)])], 0, (), 0, ())))
    assert (made.groups["billing"].generation, made.owners_count, made.offsets_count) == (4, 0, 1)


def test_the_age_of_an_id_is_known_and_never_too_young() -> None:
    made = register((LEASE, 100, 1000), (LEASE, 200, 1000 + LEASE_SPACING_MS), (LEASE, 300, 1001 + LEASE_SPACING_MS))
    assert made.lease_time_ms(ID_FIRST - 1) is None
    assert made.lease_time_ms(ID_FIRST) == 1000
    assert made.lease_time_ms(99) == 1000
    assert made.lease_time_ms(100) == 1000 + LEASE_SPACING_MS
    assert made.lease_time_ms(299) == 1000 + LEASE_SPACING_MS
    assert made.lease_time_ms(300) is None


@pytest.mark.parametrize(
    "entry",
    [(READY, 99), (LEASE, 3, 0), (CREATE, "x"), (GENERATION,), (GROW, "a", "b"), (TX_OFFSETS, 7, 1), (JOURNAL,)],
    ids=repr,
)
def test_an_entry_that_does_not_fit_is_damage(entry: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        register((CREATE, "orders", 20, 1, {}), (LEASE, 100, 0)).apply_entry(entry)


def test_an_entry_of_a_later_release_is_named_as_such() -> None:
    with pytest.raises(NewerFormat):
        register((99, "what"))


def billing(offset: int, partition: int = 0) -> list[tuple[Any, ...]]:
    return [("billing", 1, [(20, partition, offset, 0, 1)])]


def test_offsets_of_a_transaction_count_once_and_in_the_order_of_their_places() -> None:
    made = register((CREATE, "orders", 20, 2, {}), (READY, 20))
    made.apply_entry((TX_OFFSETS, 7, 100, 3, billing(50)))
    for place in ((100, 3), (100, 2), (99, 9)):
        made.apply_entry((TX_OFFSETS, 7, *place, billing(10)))
    assert made.groups["billing"].offsets[20, 0].offset == 50
    made.apply_entry((TX_OFFSETS, 7, 100, 4, billing(60, 1)))
    made.apply_entry((TX_OFFSETS, 8, 1, 1, billing(70)))
    assert [place.offset for place in made.groups["billing"].offsets.values()] == [70, 60]
    assert made.applied_lsns == {7: (100, 4), 8: (1, 1)} and made.offsets_count == 2


def test_a_snapshot_of_the_first_version_is_read() -> None:
    groups = (("billing", 3, "m", ((20, 0, 50, 0, 1, 3),)),)
    old: tuple[Any, ...] = (1, 4112, 3, ((16, 1000),), (("orders", 20, 1, 1, "open", {}),), groups)
    made = CatalogState()
    made.load(pack(old))
    assert (made.next_id, made.topics[20].name, made.groups["billing"].offsets[20, 0].offset) == (4112, "orders", 50)
    assert (made.journal_id, made.applied_lsns) == (0, {})
    made.apply_entry((JOURNAL, 7))
    again = CatalogState()
    again.load(made.dump())
    assert again.journal_id == 7 and again.groups["billing"].offsets == made.groups["billing"].offsets


def test_a_snapshot_of_the_second_version_is_read() -> None:
    old: tuple[Any, ...] = (2, 4112, 3, ((16, 1000),), (("orders", 20, 1, 1, "open", {}),), (), 7, ((7, 100, 4),))
    made = CatalogState()
    made.load(pack(old))
    assert (made.journal_id, made.applied_lsns, made.delay_store) == (7, {7: (100, 4)}, 0)
    made.apply_entry((DELAY_STORE, 21))
    again = CatalogState()
    again.load(made.dump())
    assert (again.journal_id, again.applied_lsns, again.delay_store) == (7, {7: (100, 4)}, 21)


ENTRIES = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(1, 3)),
        st.tuples(st.just("delete")),
        st.tuples(st.just("lease"), st.integers(1, 50)),
        st.tuples(st.just("group"), st.sampled_from("ab"), st.integers(0, 1000)),
        st.tuples(st.just("owners"), st.sampled_from("ab"), st.sampled_from(["m", "n", ""]), st.integers(0, 3)),
        st.tuples(st.just("schedule"), st.sampled_from("ab"), st.booleans()),
        st.tuples(st.just("unschedule"), st.sampled_from("ab")),
        st.tuples(
            st.just("transaction"), st.integers(7, 8), st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)
        ),
    ),
    max_size=20,
)


@given(ENTRIES, st.integers(0, 20))
def test_a_snapshot_anywhere_gives_the_same_register(plan: list[Any], cut: int) -> None:
    whole, entries = CatalogState(), []

    def enter(*entry: Any) -> None:
        entries.append(unpack_stored(pack(entry)))
        whole.apply_entry(entry)

    number = 20
    for time, (what, *fields) in enumerate(plan):
        if what == "create":
            number += 1
            enter(CREATE, f"t{number}", number, fields[0], {"flush.messages": 1})
            enter(READY, number)
        elif what == "delete" and whole.topics:
            enter(DELETE, max(whole.topics))
            enter(GONE, max(whole.topics))
        elif what == "lease":
            enter(LEASE, whole.next_id + fields[0], time * LEASE_SPACING_MS // 2)
        elif what == "group":
            enter(GENERATION, fields[0], whole.generation + 1, "m")
            enter(OFFSETS, fields[0], whole.generation, [(number, 0, fields[1], 0, 1)])
        elif what == "owners":
            group, member, count = fields
            keys = [(number, partition) for partition in range(count)]
            enter(GROUP_OWNERS, group, whole.generation + 1, [(member, 5000, keys)])
        elif what == "transaction":
            journal_id, group, *place = fields
            enter(JOURNAL, journal_id)
            enter(DELAY_STORE, journal_id + 10)
            enter(TX_OFFSETS, journal_id, *place, [(group, 1, [(number, 0, sum(place), 0, 1)])])
        elif what == "schedule":
            name, paused = fields
            enter(SCHEDULE, 100 + time, name, "0 9 * * *", "UTC", "t", None, b"", b"go", "one", time, 21, 0, time)
            enter(SCHEDULE_STATE, 100 + time, 21, 0, time, paused)
        elif what == "unschedule":
            row = next((each for each in whole.schedules if each.name == fields[0]), None)
            enter(SCHEDULE_GONE, 0 if row is None else row.id)
    halfway = register(*entries[:cut])
    resumed = CatalogState()
    resumed.load(halfway.dump())
    for entry in entries[cut:]:
        resumed.apply_entry(entry)
    assert resumed.dump() == whole.dump()


def test_a_snapshot_that_is_none_is_refused() -> None:
    for data in (b"\xc1", pack((1, 2)), msgpack.packb(5)):
        with pytest.raises(ValueError):
            CatalogState().load(data)
    with pytest.raises(NewerFormat):
        CatalogState().load(pack((99, 0, 0, (), (), ())))


def test_a_snapshot_or_an_entry_that_announces_too_much_takes_no_memory() -> None:
    with refused_in_little_memory("catalog's snapshot does not decode"):
        CatalogState().load(NESTED_LISTS)
    with refused_in_little_memory("in the middle of a value"):
        unpack_stored(NESTED_LISTS)


def test_the_golden_entries_are_read_and_written_as_they_are_documented() -> None:
    lines = Path("tests/golden/catalog.hex").read_text().split()
    made, states, most = CatalogState(), [], 0
    for line in lines:
        entry = unpack_stored(bytes.fromhex(line))
        assert pack(entry).hex() == line
        made.apply_entry(entry)
        states.append(made.topics[16].state if 16 in made.topics else "")
        most = max(most, made.owners_count)
    assert states == ["", "creating", "open", "growing", *["open"] * 14, "deleting", "", ""]
    assert (made.next_id, made.generation, made.groups, made.offsets_count) == (4112, 3, {}, 0)
    assert (most, made.owners_count) == (3, 0)
    assert (made.journal_id, made.applied_lsns, made.delay_store) == (17, {17: (4160, 3)}, 18)
    assert list(made.schedules) == []
    assert made.node == "0123456789abcdef" * 2
    page = Path("docs/formats/catalog.md").read_text()
    assert all(line in page for line in lines)


# The book of schedules: one row a name, under an id that never comes again.

ROW = ScheduleRow(20, "daily", "0 9 * * *", "UTC", "orders", None, b"att", b"payload", "one", 5, 17, 2, 5)


def book(*rows: ScheduleRow) -> ScheduleTable:
    return ScheduleTable(rows)


def test_a_schedule_is_there_until_it_is_gone() -> None:
    made = ScheduleTable()
    made.add(*ROW[:-1])
    assert list(made) == [ROW] and len(made) == 1
    made.remove(20)
    assert not list(made)


def test_its_state_changes_without_its_words() -> None:
    made = book(ROW)
    made.set_state(20, 18, 0, 99, True)
    assert list(made) == [ROW._replace(incarnation=18, partition=0, through_ms=99, paused=True)]


def test_what_comes_late_for_one_that_is_gone_changes_nothing() -> None:
    made = book(ROW)
    made.remove(20)
    made.remove(20)
    made.set_state(20, 18, 0, 99, True)
    assert not list(made) and made.size_bytes == 0


def test_made_anew_under_its_name_it_takes_the_place_of_the_old_one() -> None:
    made = book(ROW)
    made.add(*ROW._replace(id=21, payload=b"")[:-1])
    assert [(each.name, each.id) for each in made] == [("daily", 21)] and len(made) == 1
    assert made.size_bytes == SCHEDULE_ROW_BYTES + len(b"att")


def test_an_id_that_comes_twice_is_damage() -> None:
    made = book(ROW)
    with pytest.raises(ValueError, match="20"):
        made.add(*ROW._replace(name="other")[:-1])


def test_the_bytes_of_all_are_counted() -> None:
    tombstone = ROW._replace(id=21, name="other", payload=None, attribute=b"")
    made = book(ROW, tombstone)
    assert made.size_bytes == 2 * SCHEDULE_ROW_BYTES + len(b"att" + b"payload")
    assert (ROW.size_bytes, tombstone.size_bytes) == (SCHEDULE_ROW_BYTES + 10, SCHEDULE_ROW_BYTES)


def test_the_same_words_are_the_same_wherever_it_is_bound_to() -> None:
    assert ROW.same_definition(ROW._replace(id=99, made_ms=7, incarnation=3, partition=1, through_ms=8, paused=True))
    for changed in (
        {"cron": "0 8 * * *"},
        {"timezone": "Europe/Berlin"},
        {"topic": "bills"},
        {"partition_wanted": 2},
        {"attribute": b""},
        {"payload": None},
        {"misfire": "all"},
    ):
        assert not ROW.same_definition(ROW._replace(**changed))
