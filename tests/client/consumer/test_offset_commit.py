"""The offsets of a group at the broker and in storages: each partition for itself, under a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted_broker import Broker, Script, consumer_options
from tfmq.client.consumer.offset_commit import GroupOffsets
from tfmq.client.consumer.positions import Positions
from tfmq.client.operation import Executor, run_inline
from tfmq.errors import Fenced, StoreFailed, TimedOut
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.storage import OffsetStorage, PartitionName, StoredOffset
from tfmq.protocol import commands as wire

FIRST, SECOND = PartitionName("orders", 0), PartitionName("orders", 1)


class Holder:
    """A member by hand; `grants` are the generations of single partitions."""

    def __init__(self, generation: int = 1, **grants: int) -> None:
        self.group, self.member_id, self.generation = "g", "member-1", generation
        self.grants = {FIRST: grants.get("first", generation), SECOND: grants.get("second", generation)}

    def generation_of(self, name: PartitionName) -> int:
        return self.grants[name]


class Rig:
    def __init__(self, holder: Holder, storage: OffsetStorage | None = None) -> None:
        self.broker = Broker()
        self.broker.create("orders", 2)
        self.script = Script(self.broker)
        self.script.run(self._join())
        self.holder = holder
        self.offsets = self.offsets_of(storage)

    def offsets_of(self, storage: Any, run: Executor = run_inline) -> GroupOffsets:
        options = consumer_options(topics="orders", group="g", offsets=storage or "broker")
        return GroupOffsets(options, self.script.link, Positions(), self.holder, run)  # type: ignore[arg-type]

    def _join(self) -> Any:
        from tfmq.client.connection.requests import request_with_retries as ask

        yield from ask(self.script.link, wire.JoinGroup("g", "member-1", ["orders"]), 1e9)

    def save(self, first: int, second: int | None = None) -> set[PartitionName]:
        inc = self.broker.topics["orders"][0]
        rows = {FIRST: StoredOffset(first, 0, inc, 1, self.holder.generation_of(FIRST))}
        if second is not None:
            rows[SECOND] = StoredOffset(second, 0, inc, 1, self.holder.generation_of(SECOND))
        return set(self.script.run(self.offsets.save(rows, self.script.link.now() + 5)))

    def read(self) -> dict[PartitionName, int]:
        found = self.script.run(self.offsets.read([FIRST, SECOND]))
        return {name: each.offset for name, each in found.items()}

    def claim(self) -> tuple[dict[PartitionName, int], set[PartitionName]]:
        found, refused = self.script.run(self.offsets.claim([FIRST, SECOND]))
        return {name: each.offset for name, each in found.items()}, refused


def test_the_broker_keeps_and_gives_them() -> None:
    rig = Rig(Holder())
    assert rig.save(100, 200) == set()
    assert rig.read() == {FIRST: 100, SECOND: 200}
    assert rig.offsets.commit_count == 1
    assert rig.claim() == ({}, set()), "the broker fences by itself"


def test_a_partition_of_another_is_refused_and_the_rest_is_kept() -> None:
    rig = Rig(Holder())
    rig.broker.stolen.add(("orders", rig.broker.topics["orders"][0], 0))
    assert rig.save(100, 200) == {FIRST}
    assert rig.read() == {SECOND: 200}
    assert rig.save(300) == {FIRST}, "where it is all of them the broker answers with an error"
    assert rig.offsets.commit_count == 1


def test_a_storage_is_claimed_by_grant_and_refuses_the_owner_before(tmp_path: Path) -> None:
    path = str(tmp_path / "offsets.json")
    old = Rig(Holder(4), FileOffsets(path))
    assert old.claim() == ({}, set())
    assert old.save(100, 200) == set()
    new = Rig(Holder(9, first=9, second=4), FileOffsets(path))
    assert new.claim() == ({FIRST: 100, SECOND: 200}, set())
    assert old.save(150, 250) == {FIRST}, "the second one is under the grant that it always was"
    assert new.read() == {FIRST: 100, SECOND: 250}


def test_a_claim_that_comes_too_late_gives_the_others_all_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "offsets.json")
    later = Rig(Holder(9), FileOffsets(path))
    later.save(100)
    assert Rig(Holder(5), FileOffsets(path)).claim() == ({}, {FIRST})


class Slipping(OffsetStorage):
    """Loses one partition more to another member at each claim."""

    def read(self, group: str, partitions: Sequence[PartitionName]) -> dict[PartitionName, StoredOffset]:
        return {}

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None: ...

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> dict[PartitionName, StoredOffset]:
        raise Fenced("It is another's by now.", partitions=[list(partitions[0])])


def test_a_claim_may_find_one_after_the_other_owned_by_another() -> None:
    assert Rig(Holder(), Slipping()).claim() == ({}, {FIRST, SECOND})


class Plain:
    """A storage that claims nothing, and names nothing."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, StoredOffset]:
        return {}

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None: ...


def test_a_storage_of_ones_own_that_names_nothing_has_refused_it_all() -> None:
    storage = Plain()
    rig = Rig(Holder(), storage)
    storage.error = Fenced("planted")
    assert rig.save(1, 2) == {FIRST, SECOND}
    storage.error = StoreFailed("planted")
    with pytest.raises(StoreFailed):
        rig.save(1, 2)


def test_a_save_without_a_waiting_caller_is_not_overtaken(tmp_path: Path) -> None:
    """A task that is cancelled, Ctrl-C: the thread that saves goes on, and an older place must not come last."""
    rig, work = Rig(Holder(), FileOffsets(str(tmp_path / "offsets.json"))), []

    def later(call: Any, done: Any) -> None:
        work.append((call, done))

    rig.offsets = rig.offsets_of(FileOffsets(str(tmp_path / "offsets.json")), later)
    inc = rig.broker.topics["orders"][0]

    def save(offset: int, seconds: float = 5) -> Any:
        rows = {FIRST: StoredOffset(offset, 0, inc, 1, 1)}
        return rig.offsets.save(rows, rig.script.link.now() + seconds)

    cancelled = save(100)
    next(cancelled)
    cancelled.close()
    with pytest.raises(TimedOut):
        rig.script.run(save(150, 0))
    newer = save(200)
    next(newer)
    assert len(work) == 1, "it waits for the one before, which is at work in its thread"
    run_inline(*work[0])
    next(newer)
    run_inline(*work[1])
    assert list(newer) == []
    rig.offsets = rig.offsets_of(FileOffsets(str(tmp_path / "offsets.json")))
    assert rig.read() == {FIRST: 200}


def test_a_forked_child_waits_for_no_save_of_its_parent() -> None:
    rig = Rig(Holder(), Plain())
    rows = {FIRST: StoredOffset(1, 0, 1, 1, 1)}
    offsets = rig.offsets_of(Plain(), lambda call, done: None)
    next(offsets.save(rows, 0))
    offsets.reset_after_fork()
    waits = next(offsets.save(rows, 0))
    assert waits.seconds is None, "for its own work"


# Saves: one at a time, newest last, and a store's failure reported once.

NAME = PartitionName("orders", 0)


class Memory:
    """A storage of a user's own."""

    def __init__(self) -> None:
        self.kept: dict[PartitionName, StoredOffset] = {}
        self.fail: Exception | None = None
        self.closed = False

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, StoredOffset]:
        return {name: self.kept[name] for name in partitions if name in self.kept}

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        if self.fail is not None:
            raise self.fail
        self.kept.update(offsets)

    def close(self) -> None:
        self.closed = True


def consumer(broker: Broker, **arguments: Any) -> Script:
    log = broker.create("orders")
    for n in range(4):
        log.append(b"%d" % n)
    return Script(broker, group="g", **arguments)


def test_a_storage_of_ones_own_is_used_and_closed() -> None:
    store, broker = Memory(), Broker()
    script = consumer(broker, offsets=store)
    script.poll(count=2)
    script.commit()
    script.close()
    place = store.kept[NAME]
    assert (place.offset, place.generation, place.epoch) == (broker.topics["orders"][1][0].pieces[2].offset, 1, 1)
    assert store.closed
    assert Script(broker, group="g", offsets=store).poll() == [b"2", b"3"]


def test_what_a_store_raises_in_the_background_is_reported_by_the_next_call_and_tried_again() -> None:
    store = Memory()
    script = consumer(Broker(), offsets=store)
    script.poll(count=2)
    script.poll(count=1)
    store.fail = OSError("planted")
    script.pass_time(6)
    with pytest.raises(OSError, match="planted"):
        script.poll()
    store.fail = None
    assert script.poll() == [b"3"]
    script.commit()
    assert NAME in store.kept


def test_a_store_that_does_not_answer_for_a_while_is_tried_again_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Memory()
    script = consumer(Broker(), offsets=store)
    script.poll(count=2)
    script.poll(count=1)
    store.fail = StoreFailed("planted")
    script.pass_time(6)
    assert script.poll() == [b"3"]
    assert "not saved, trying again" in caplog.text and store.kept == {}
    store.fail = None
    script.pass_time(6)
    assert NAME in store.kept


def test_a_save_waits_for_the_one_before_and_takes_the_places_that_hold_then() -> None:
    broker = Broker()
    script = consumer(broker)
    script.poll(count=1)
    script.commit()
    first = script.core.commit(None)
    script.core.positions.ack_delivered()
    script.poll(count=2)
    next(first)
    second = script.core.commit(None)
    next(second)
    assert len(broker.sent(type(broker.requests[-1]))) == 2, "the second is not on its way yet"
    script.run(first)
    script.run(second)
    assert broker.saved("g") == broker.topics["orders"][1][0].pieces[3].offset


def test_a_save_that_never_gets_its_turn_ends_in_time() -> None:
    broker = Broker()
    script = consumer(broker, timeout=1)
    script.poll(count=1)
    stuck = script.core.commit(None)
    next(stuck)
    broker.down = True
    script.link.connection_count = 1
    with pytest.raises(TimedOut):
        script.commit()
