"""A broker, its group, and workers that keep to the protocol and to nothing else: they freeze, die, lose connections
and replies, and work on unnoticed. Nothing in here is a message: partitions are counters, and what was
worked on is written down.
"""

import random
from collections.abc import Callable
from typing import Any

from tests.broker.group_member import Name, Seat
from tests.broker.helpers import Answer, Broker
from tfmq.protocol.commands import CommitOffsets, GroupOffset, GrowTopic, PartitionName, ReadOffsets, TransactionOffsets

SESSION_MS = 9000
BEAT_SECONDS = 3.0
"""Of a worker that is awake: a third of its session."""


class Worker(Seat):
    """Takes on what it is given, works through it in order, saves, gives up what is revoked when that is done."""

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world.broker, name, topics="orders bills", session_ms=SESSION_MS, strategy=world.strategy)
        self.world = world
        self.frozen = False
        self.joining: Answer | None = None
        self.beating: Answer | None = None
        self.reading: tuple[Answer, dict[Name, int]] | None = None
        self.saving: tuple[Answer, dict[Name, int]] | None = None
        self.position: dict[Name, int] = {}
        self.saved: dict[Name, int] = {}
        self.joined = False
        self.beat_at = 0.0
        self.lapses = self.mended = 0
        """How often the broker may have received nothing of it; up to which of these it got its share again."""
        self.asked_in = 0

    # What the others may not do meanwhile

    def punctual(self) -> bool:
        """Whether it gave no reason to be declared dead since it got its share."""
        return self.lapses == self.mended

    def goes_away(self) -> None:
        self.lapses += 1

    # Steps

    def step(self) -> None:
        """Something of what it could do now."""
        if self.session.is_closed:
            self.connect(self.world.broker)
            self.joining = self.beating = self.reading = self.saving = None
        chance = self.world.chance
        answered = [
            each
            for each in (
                self.apply_join_reply,
                self.apply_heartbeat_reply,
                self.apply_read_reply,
                self.apply_commit_reply,
            )
            if each(look=True)
        ]
        if answered:
            chance.choice(answered)()
        elif not self.joined:
            if self.joining is None:
                self.asked_in, self.beat_at = self.lapses, self.world.now()
                self.joining = self.ask_join()
        else:
            chance.choice([self.work, self.work, self.save, self.let_go, self.look_for_places, self.beat_if_idle])()

    def apply_join_reply(self, look: bool = False) -> bool:
        answer = self.joining
        if look or answer is None:
            return answer is not None and answer.done
        self.joining = None
        if answer.code == "ok":
            self.position.clear()
            self.saved.clear()
            self.take_join(answer)
            self.joined, self.mended = True, self.asked_in
            if self.world.now() - self.beat_at > BEAT_SECONDS:
                self.goes_away()  # it was long in coming, and nothing was heard of its member meanwhile
            self.world.reported(self)
        return True

    def apply_heartbeat_reply(self, look: bool = False) -> bool:
        answer = self.beating
        if look or answer is None:
            return answer is not None and answer.done
        self.beating = None
        if answer.code == "ok":
            before = dict(self.held)
            self.take(answer)
            for name in [name for name in self.position if self.held.get(name) != before.get(name)]:
                self.drop(name)
            self.mended = self.asked_in
            self.world.reported(self)
        elif answer.code == "fenced":
            self.lose_all()
        return True

    def apply_read_reply(self, look: bool = False) -> bool:
        if look or self.reading is None:
            return self.reading is not None and self.reading[0].done
        (answer, grants), self.reading = self.reading, None
        if answer.code == "ok":
            found = {(row[0], row[1], row[2]): row[3] for row in answer.offsets}
            for name, grant in grants.items():
                if self.held.get(name) == grant and name not in self.leaving and name not in self.position:
                    self.position[name] = self.saved[name] = self.world.begins(name, found.get(name, 0))
        return True

    def apply_commit_reply(self, look: bool = False) -> bool:
        if look or self.saving is None:
            return self.saving is not None and self.saving[0].done
        self.world.note_saved()
        (answer, places), self.saving = self.saving, None
        fenced: set[tuple[str, int]] = set()
        if answer.code == "fenced":
            fenced = {(name[0], name[2]) for name in places}
        elif answer.code == "ok" and hasattr(answer.fields, "fenced"):
            fenced = {(row[0], row[1]) for row in answer.fenced}
        for name, place in places.items():
            if (name[0], name[2]) in fenced:
                self.drop(name)
                self.held.pop(name, None)
                self.leaving.discard(name)
            elif answer.code == "ok" and name in self.saved:
                self.saved[name] = max(self.saved[name], place)
        return True

    def work(self) -> None:
        """The next of some partition; one that it is to leave is finished, and no more."""
        for name in sorted(self.position.keys() - self.leaving):
            if self.world.chance.random() < 0.6 and self.world.has_more(name, self.position[name]):
                self.world.worked(self, name, self.position[name])
                self.position[name] += 1

    def save(self) -> None:
        unsaved = {name: place for name, place in self.position.items() if place != self.saved[name]}
        if self.saving is not None or not unsaved:
            return
        if self.world.chance.random() < 0.3:
            answer = self.world.transact(self, self._rows(unsaved))
        else:
            answer = self.ask(self._request(unsaved), turn=self.world.ends_turn())
        self.saving = (answer, dict(unsaved))

    def _request(self, places: dict[Name, int]) -> Any:
        return CommitOffsets(self.group, self.name, self.generation, self._offsets(places))

    def _rows(self, places: dict[Name, int]) -> TransactionOffsets:
        return TransactionOffsets(self.group, self.name, self.generation, self._offsets(places))

    @staticmethod
    def _offsets(places: dict[Name, int]) -> list[Any]:
        return [GroupOffset(topic, inc, number, place) for (topic, inc, number), place in sorted(places.items())]

    def let_go(self) -> None:
        """What it is to leave and has nothing unsaved of, as far as it knows."""
        for name in sorted(self.leaving):
            if self.position.get(name) == self.saved.get(name) and self.saving is None:
                self.leaving.discard(name)
                self.held.pop(name, None)
                self.drop(name)

    def look_for_places(self) -> None:
        fresh = {
            name: grant for name, grant in self.held.items() if name not in self.position and name not in self.leaving
        }
        if fresh and self.reading is None:
            names = [PartitionName(topic, number) for topic, _, number in sorted(fresh)]
            self.reading = (self.ask(ReadOffsets(self.group, names), turn=self.world.ends_turn()), fresh)

    def beat_if_idle(self) -> None:
        if self.beating is None:
            self.send_beat(self.world.chance.choice([0, 1000, 3000]))

    def send_beat(self, wait_ms: int) -> None:
        """A heartbeat; one that waits ends, and what it says is heard first."""
        if self.beating is not None and self.beating.done:
            self.apply_heartbeat_reply()
        if self.joined:
            self.beat_at, self.asked_in = self.world.now(), self.lapses
            older, self.beating = self.beating, self.ask_beat(wait_ms)
            assert older is None or older.done, "one heartbeat of a member waits at a time"

    def drop(self, name: Name) -> None:
        self.position.pop(name, None)
        self.saved.pop(name, None)

    def lose_all(self) -> None:
        self.joined = False
        self.held.clear()
        self.leaving.clear()
        self.position.clear()
        self.saved.clear()


class World:
    """The broker, the workers, and what has to be true of them at any moment."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.strategy = chance.choice(["sticky", "sticky", "range", "consistent_hash"])
        self.broker = Broker(queued=True)
        self.broker.create("orders", partitions=chance.randint(1, 10))
        self.broker.create("bills", partitions=chance.randint(1, 3))
        self.workers: list[Worker] = []
        self.total = chance.randint(5, 40)
        self.number = 0
        self.high: dict[Name, int] = {}
        """How many of a partition were worked on by any member."""
        self.kept: dict[Name, int] = {}
        """The highest place that a save was answered for."""
        self.doubled = 0
        self.doubt: list[tuple[Any, Any]] = []

    def now(self) -> float:
        return self.broker.clock.monotonic()

    def ends_turn(self) -> bool:
        """Whether the turn ends with this request, or gathers more."""
        return self.chance.random() < 0.7

    def names(self) -> list[Name]:
        topics = self.broker.engine.broker.topics
        return [
            (topic.name, topic.incarnation, number)
            for topic in topics.values()
            for number in range(len(topic.partitions))
        ]

    # What workers do

    def has_more(self, name: Name, place: int) -> bool:
        return place < self.total

    def begins(self, name: Name, place: int) -> int:
        """A worker read this place: never one before what was saved."""
        if name in self.names():  # of a topic that is gone nothing is saved any more
            assert place >= self.kept.get(name, 0), f"{name} goes back to {place} from {self.kept[name]}"
        return place

    def worked(self, worker: Worker, name: Name, place: int) -> None:
        high = self.high.get(name, 0)
        assert place <= high, f"{name}: {high} to {place} were skipped"
        self.doubled += place < high
        self.high[name] = max(high, place + 1)
        if worker.punctual():
            self.require_alone(worker, name)

    def require_alone(self, worker: Worker, name: Name) -> None:
        """No other punctual worker holds what a punctual worker holds."""
        for other in self.workers:
            if other is not worker and other.punctual() and other.joined:
                assert name not in other.held, f"{name} is {worker.name}'s and {other.name}'s"

    def reported(self, worker: Worker) -> None:
        """A worker has received its share: no other member has any of it, and it is durable."""
        for name in worker.held if worker.punctual() else ():
            self.require_alone(worker, name)
        if self.chance.random() < 0.1:
            self.require_durable(worker)

    def require_durable(self, worker: Worker) -> None:
        """After a power cut now the catalog knows these grants, or later ones."""
        after = self.broker.crashed(self.broker.disk.crash(keep="nothing"))
        row = after.engine.broker.catalog.state.groups[worker.group]
        for (_, incarnation, number), grant in worker.held.items():
            owner = row.owners.get((incarnation, number))
            if worker.punctual() and incarnation in after.engine.broker.catalog.state.topics:
                assert owner is not None and owner.member == worker.name and owner.generation >= grant, (
                    f"{worker.name} was told of partition {number} by grant {grant}, the disk has {owner}"
                )

    def transact(self, worker: Worker, row: TransactionOffsets) -> Answer:
        """A transaction that consists of the offsets, perhaps prepared and left in doubt for a while."""
        if self.chance.random() < 0.7:
            stream = self.broker.stream()
            return self.broker.transact(stream, [], [row], session=worker.session, turn=self.ends_turn())
        began = self.broker.begin(self.broker.stream(), f"x{self.fresh()}", session=worker.session)
        prepared = self.broker.prepare(began, [row], session=worker.session)
        self.broker.work()
        if prepared.code != "ok" or prepared.state != "prepared":
            return prepared  # refused, or all of it was of topics that are gone
        answer = Answer(0, type(prepared.fields))
        self.doubt.append((began, answer))
        return answer

    def decide(self) -> None:
        """A client ends a transaction that is in doubt."""
        if self.doubt:
            began, answer = self.doubt.pop(self.chance.randrange(len(self.doubt)))
            decided = self.broker.decide(began)
            self.broker.work()
            assert decided.code == "ok", decided.code
            answer.ok("committed", 0)

    def fresh(self) -> int:
        self.number += 1
        return self.number

    # What is saved

    def look_at_offsets(self) -> None:
        """What the register has never goes back."""
        row = self.broker.engine.broker.catalog.state.groups.get("billing")
        if row is None:
            return
        for name in self.names():
            place = row.offsets.get((name[1], name[2]))
            offset = 0 if place is None else place.offset
            assert offset >= self.kept.get(name, 0), f"{name} went back to {offset} from {self.kept[name]}"

    def note_saved(self) -> None:
        """What was acknowledged is kept."""
        for worker in self.workers:
            if worker.saving is not None and worker.saving[0].code == "ok":
                answer, places = worker.saving
                fenced = {(row[0], row[1]) for row in getattr(answer.fields, "fenced", ())}
                for name, place in places.items():
                    if (name[0], name[2]) not in fenced:
                        self.kept[name] = max(self.kept.get(name, 0), place)

    # What happens

    def step(self) -> str:
        happens: list[Callable[[], None]] = [self.any_member] * 30
        happens += [self.disk] * 8 + [self.turn] * 5 + [self.wait] * 6
        happens += [self.come, self.go, self.die, self.freeze, self.thaw, self.cut, self.decide]
        if self.chance.random() < 0.05:
            happens = [self.restart, self.crash, self.grow, self.remake]
        chosen = self.chance.choice(happens)
        chosen()
        self.note_saved()
        self.look_at_offsets()
        return chosen.__name__

    def awake(self) -> list[Worker]:
        return [each for each in self.workers if not each.frozen]

    def any_member(self) -> None:
        if self.awake():
            self.chance.choice(self.awake()).step()

    def disk(self) -> None:
        if self.broker.jobs:
            self.broker.step(self.chance.randrange(len(self.broker.jobs)))

    def turn(self) -> None:
        self.broker.engine.broker.end_turn()

    def wait(self) -> None:
        self.pass_seconds(self.chance.choice([0.1, 1.0, 3.0, 7.0]))

    def pass_seconds(self, seconds: float) -> None:
        """Time advances; members that are not suspended send their heartbeats."""
        while seconds > 0:
            for worker in self.awake():
                if worker.joined and not worker.session.is_closed and self.now() - worker.beat_at >= BEAT_SECONDS / 2:
                    worker.send_beat(3000)
            self.turn()
            self.broker.advance(min(1.0, seconds))
            seconds -= 1.0

    def come(self) -> None:
        if len(self.workers) < 12:
            self.workers.append(Worker(self, f"w{self.fresh()}"))

    def go(self) -> None:
        if self.awake():
            worker = self.chance.choice(self.awake())
            if worker.joined and not worker.session.is_closed:
                worker.leave()
            self.workers.remove(worker)
            worker.disconnect()

    def die(self) -> None:
        """SIGKILL: its connection ends with it."""
        if self.workers:
            worker = self.workers.pop(self.chance.randrange(len(self.workers)))
            worker.disconnect()

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.awake():
            worker = self.chance.choice(self.awake())
            worker.frozen = True
            worker.goes_away()

    def thaw(self) -> None:
        """It goes on as if nothing had been."""
        for worker in self.workers:
            if worker.frozen and self.chance.random() < 0.5:
                worker.frozen = False
                for _ in range(5):
                    worker.work()

    def cut(self) -> None:
        """A connection is gone; its worker notices at its next step."""
        if self.workers:
            worker = self.chance.choice(self.workers)
            worker.disconnect()
            worker.goes_away()

    def grow(self) -> None:
        count = len(self.broker.engine.broker.topics.topic("orders").partitions)
        if count < 12:
            self.broker.ask(GrowTopic("orders", count + 1))
            self.broker.work()

    def remake(self) -> None:
        """The other topic is deleted, and made anew."""
        if self.chance.random() < 0.3 and not self.doubt:
            self.broker.delete("bills")
            self.broker.create("bills", partitions=self.chance.randint(1, 3))

    def restart(self) -> None:
        self.broker.work()
        self.begin_anew(self.broker.restart())

    def crash(self) -> None:
        """The machine: what was not forced may be lost."""
        self.note_saved()
        self.begin_anew(self.broker.crashed(self.broker.disk.crash(self.chance)))

    def begin_anew(self, broker: Broker) -> None:
        for worker in self.workers:
            worker.disconnect()
        self.broker = broker
        self.broker.work()
        for worker in self.awake():
            worker.step()
            if worker.joined:
                worker.send_beat(0)

    # The end

    def come_to_rest(self) -> None:
        """No member is suspended, and all work until there is nothing left; then every partition has one owner."""
        while self.doubt:
            self.decide()
        if not self.workers:
            self.come()
        for worker in self.workers:
            worker.frozen = False
        for _ in range(500):
            for worker in self.workers * 4:
                worker.step()
            self.decide()
            self.broker.work()
            self.turn()
            self.pass_seconds(1)
            self.broker.work()
            self.note_saved()
            if self.at_rest():
                return
        raise AssertionError(f"no rest: {[(each.name, each.held, each.leaving) for each in self.workers]}")

    def at_rest(self) -> bool:
        owned = [name for worker in self.workers for name in worker.held]
        offsets = self.broker.engine.broker.catalog.state.groups["billing"].offsets
        kept = {(incarnation, number): place.offset for (incarnation, number), place in offsets.items()}
        return (
            sorted(owned) == sorted(self.names())
            and not any(worker.leaving for worker in self.workers)
            and all(self.high.get(name, 0) == self.total for name in self.names())
            and all(kept.get((name[1], name[2])) == self.total for name in self.names())
        )
