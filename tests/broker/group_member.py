"""A member of a group at a broker in a simulation, which does what the page about the protocol says, step by step.

`Seat` knows what a client knows: what it holds (with the grants), what of that it is to give up, its generation. What
it is answered it takes as the page says, and nothing else.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tests.broker.helpers import Answer, Broker, Session
from tfmq.protocol import commands
from tfmq.protocol.commands import GroupOffset, HeldPartition, PartitionName, Subscription

Name = tuple[str, int, int]
"""(topic, incarnation, partition)."""


class Seat:
    def __init__(
        self,
        broker: Broker,
        name: str = "",
        *,
        group: str = "billing",
        topics: str = "orders",
        session_ms: int = 30_000,
        strategy: str = "sticky",
        only: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        self.broker, self.group, self.name = broker, group, name
        self.wishes = Subscription(
            topics.split(), session_ms, strategy, None if only is None else [PartitionName(*each) for each in only]
        )
        self.session = Session(f"{name or 'somebody'} at 127.0.0.1")
        self.generation = 0
        self.held: dict[Name, int] = {}
        self.leaving: set[Name] = set()
        self.note = ""
        self.forgotten = False
        """Whether the broker must receive its topics (again)."""

    # Requests

    def ask_join(self, *, turn: bool = True) -> Answer:
        """The request alone; `take_join` when it is answered."""
        return self.ask(commands.JoinGroup(self.group, self.name, *self.wishes), turn=turn)

    def take_join(self, answer: Answer) -> None:
        self.name, self.generation, self.note = answer.member, answer.generation, answer.note
        self.leaving.clear()
        self.held = _grants(answer.partitions)

    def join(self) -> Answer:
        answer = self.ask_join()
        self.take_join(answer)
        return answer

    def ask_beat(self, wait_ms: int = 0, *, turn: bool = True) -> Answer:
        """The request alone; `take` when it is answered."""
        held = [HeldPartition(*name, name in self.leaving) for name in sorted(self.held)]
        wishes = self.wishes if self.forgotten else None
        self.forgotten = False
        return self.ask(commands.Heartbeat(self.group, self.name, self.generation, held, wait_ms, wishes), turn=turn)

    def take(self, answer: Answer) -> None:
        """As docs/protocol.md says: goes on, leaves, or begins with each."""
        self.generation, self.note, self.forgotten = answer.generation, answer.note, answer.forgotten
        if answer.assigned is not None:
            share = _grants(answer.assigned)
            self.leaving = self.held.keys() - share.keys()
            self.held = {**{name: self.held[name] for name in self.leaving}, **share}

    def beat(self, wait_ms: int = 0) -> Answer:
        """A heartbeat that is answered at once."""
        answer = self.ask_beat(wait_ms)
        self.take(answer)
        return answer

    def finish(self) -> None:
        """Everything that it is to give up is done, and given up."""
        self.drop_leaving()
        self.beat()

    def drop_leaving(self) -> None:
        """Everything that it is to give up is done; the next heartbeat says so."""
        for name in self.leaving:
            del self.held[name]
        self.leaving = set()

    def leave(self) -> Answer:
        self.held.clear()
        return self.ask(commands.LeaveGroup(self.group, self.name, self.generation))

    def commit(self, offset: int, *names: Name) -> Answer:
        """Of all that it holds, or of these."""
        offsets = [GroupOffset(topic, inc, number, offset) for topic, inc, number in names or sorted(self.held)]
        return self.ask(commands.CommitOffsets(self.group, self.name, self.generation, offsets))

    def ask(self, request: Any, *, turn: bool = True) -> Answer:
        return self.broker.ask(request, session=self.session, turn=turn)

    # The connection

    def disconnect(self) -> None:
        self.session.close()

    def connect(self, broker: Broker | None = None) -> None:
        """Another connection, perhaps to the broker that was started anew."""
        self.broker = broker or self.broker
        self.session = Session(self.session.identity)

    # What it has

    @property
    def numbers(self) -> list[int]:
        """Of the partitions that it works on, without those that it is to give up."""
        return sorted(name[2] for name in self.held.keys() - self.leaving)

    @property
    def share(self) -> list[tuple[str, int]]:
        return sorted((name[0], name[2]) for name in self.held.keys() - self.leaving)


def _grants(rows: Iterable[Any]) -> dict[Name, int]:
    return {(row[0], row[1], row[2]): row[3] for row in rows}


def seats(broker: Broker, names: str, **wishes: Any) -> list[Seat]:
    """Members of these names, each of which has its share."""
    found = [Seat(broker, name, **wishes) for name in names.split()]
    for seat in found:
        seat.join()
    settle(*found)
    return found


def settle(*members: Seat) -> None:
    """All members send heartbeats and finish until no assignment changes."""
    for _ in range(100):
        before = [(dict(each.held), set(each.leaving)) for each in members]
        asked = any(each.forgotten for each in members)
        for each in members:
            each.beat()
            if each.leaving:
                each.finish()
        asked = asked or any(each.forgotten for each in members)
        if not asked and before == [(each.held, each.leaving) for each in members]:
            return
    raise AssertionError("the group does not come to rest")
