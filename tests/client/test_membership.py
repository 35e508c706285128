"""One member of a group: its generation goes with whatever it saves, wherever that is kept."""

from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted import Broker, Script, ScriptedLink
from tfmq.client.membership import Membership
from tfmq.client.offset_storage import FileOffsets, OffsetStorage, StoredOffset
from tfmq.client.positions import PartitionName
from tfmq.client.work import inline
from tfmq.errors import Busy, Fenced
from tfmq.protocol import commands as wire

NAME = PartitionName("orders", 0)
FAR = 1e9


class Member:
    """A membership with somebody to run its operations."""

    def __init__(self, broker: Broker, storage: OffsetStorage | None = None) -> None:
        self.script = Script(broker)
        self.link: ScriptedLink = self.script.link
        self.membership = Membership(self.link, "g", run=inline, session_ms=9_000, storage=storage)

    def join(self) -> None:
        self.script.run(self.membership.join(["orders"], FAR))

    def save(self, offset: int) -> None:
        stored = StoredOffset(offset, 0, 6, 1, 0)
        self.script.run(self.membership.save({NAME: stored}, self.link.now() + 5))

    def read(self) -> Any:
        return self.script.run(self.membership.read([NAME])).get(NAME)


def test_a_member_saves_and_reads_under_its_generation() -> None:
    member = Member(Broker())
    member.join()
    member.save(700)
    assert member.read() == StoredOffset(700, 0, 6, 1, generation=1)


def test_a_member_that_joins_again_is_the_same_one() -> None:
    broker = Broker()
    first = Member(broker)
    first.join()
    first.join()
    assert (first.membership.member, first.membership.generation) == ("member-1", 2)


def test_a_heartbeat_is_due_three_times_a_session_and_a_save_counts_as_one() -> None:
    member = Member(Broker())
    assert member.membership.beat_due() == float("inf")
    member.join()
    assert member.membership.beat_due() == member.link.now() + 3
    member.link.time += 2
    member.save(1)
    assert member.membership.beat_due() == member.link.now() + 3


def test_a_heartbeat_that_fails_in_passing_is_left_to_the_next() -> None:
    broker = Broker()
    member = Member(broker)
    member.join()
    broker.fail[wire.Heartbeat] = [Busy() for _ in range(100)]
    member.script.run(member.membership.beat())
    assert member.membership.failure is None


def test_fenced_is_for_good() -> None:
    broker = Broker()
    member = Member(broker)
    member.join()
    broker.take_over("g")
    member.script.run(member.membership.beat())
    assert isinstance(member.membership.failure, Fenced)
    assert member.membership.beat_due() == float("inf")
    with pytest.raises(Fenced):
        member.save(1)
    member.script.run(member.membership.leave(FAR))
    assert broker.live["g"] == "thief"


def test_offsets_in_a_file_are_fenced_by_the_brokers_generation(tmp_path: Path) -> None:
    broker, path = Broker(), str(tmp_path / "offsets.json")
    old = Member(broker, FileOffsets(path))
    old.join()
    old.save(100)
    old.membership._storage.close()  # type: ignore[union-attr]
    broker.live.clear()
    new = Member(broker, FileOffsets(path))
    new.join()
    assert new.read().offset == 100
    new.save(200)
    new.membership.generation = 1
    with pytest.raises(Fenced):
        new.save(150)
    assert isinstance(new.membership.failure, Fenced)
    assert broker.offsets == {}
