"""A group on a simulated broker through one seed's troubles, and what must hold at each step and in the end.

Ten partitions; members join, leave, are killed, frozen and come back; handlers take minutes; the broker restarts, or
loses its power. Checked at each step:
- a partition is held by one living member at most;
- what is handed out of a partition follows what was handed out before, or was before: nothing is passed over;
- nothing is handed out again that was saved.
And in the end: each partition has exactly one owner, and every message was finished by a member.
"""

import random
from collections import Counter
from typing import Any, Final

import tfmq
from tfmq.testing.broker import SimulatedBroker

PARTITIONS: Final = 10
MEMBERS: Final = 12
STEPS: Final = 80
SESSION: Final = 10.0
TOPIC: Final = "orders"
GROUP: Final = "billing"
PATIENCE_SECONDS: Final = 600
ACCIDENTS: Final = (
    "joined beside others",
    "twelve members at a time",
    "a partition moved between living members",
    "left with all finished",
    "left with something in hand",
    "killed with something in hand",
    "killed with nothing in hand",
    "frozen with something in hand",
    "frozen over a restart of the broker",
    "came back and had lost what it had",
    "came back in time",
    "polled as a zombie",
    "the broker restarted",
    "the broker restarted, away for longer than a session",
    "the broker lost its power",
    "all connections cut",
    "worked on one message for minutes",
    "a commit was fenced",
    "came again",
)
"""What a course counts; over all seeds each of these is there."""


class Seat:
    """One consumer, and what it has in hand: handed out, and not finished."""

    def __init__(self, course: "Course", number: int) -> None:
        self.course, self.number = course, number
        self.manual = course.commits == "manual"
        self.reported: list[str] = []
        self.consumer: Any = course.broker.consumer(
            TOPIC,
            group=GROUP,
            session=SESSION,
            commits=course.commits,
            strategy=course.random.choice(course.strategies),
            save_every=course.random.choice([0.5, 5.0]),
            on_revoked=course.random.choice([None, self.revoked]),
        )
        self.in_hand: list[Any] = []
        self.cuts = 0
        self.had: dict[Any, int] = {}
        """What was its when it froze, by which grant."""

    def revoked(self, names: list[Any]) -> None:
        """As users do: what is done of them is saved before they go."""
        if self.manual:
            self.commit()

    @property
    def core(self) -> Any:
        return self.consumer._core

    @property
    def driver(self) -> Any:
        return self.consumer._driver

    def finished(self) -> None:
        for message in self.in_hand:
            self.course.done(message)
        self.in_hand = []

    def poll(self, count: int) -> None:
        if not self.manual:
            self.finished()
        for message in self.consumer.poll(timeout=0, max_messages=count):
            self.course.handed_out(self, message)
            self.in_hand.append(message)

    def commit(self) -> None:
        """Of what is in hand; what another has by now comes again there."""
        try:
            self.consumer.commit()
        except tfmq.Fenced as fenced:
            self.course.met["a commit was fenced"] += 1
            lost = {tuple(each) for each in fenced.details["partitions"]}
            self.in_hand = [each for each in self.in_hand if (each.topic, each.partition) not in lost]
        except tfmq.TfmqError as error:
            assert error.retriable, error
            return
        self.finished()

    def held(self) -> set[Any]:
        return set(self.core.membership.owned)

    def grants(self) -> dict[Any, int]:
        return {name: each.grant for name, each in self.core.membership.owned.items()}


class Course:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.broker = SimulatedBroker({"topics.partitions": PARTITIONS}, seed=seed)
        self.broker.admin().create_topic(TOPIC, partitions=PARTITIONS)
        self.producer = self.broker.producer()
        self.commits = self.random.choice(["auto", "auto", "manual"])
        self.strategies = self.random.choice([["sticky"], ["range"], ["consistent_hash"], ["sticky", "range"]])
        self.seats: list[Seat] = []
        self.frozen: list[Seat] = []
        self.joined = self.cuts = 0
        self.sent = [0] * PARTITIONS
        self.reached = [0] * PARTITIONS
        self.unfinished: set[tuple[int, int]] = set()
        self.met: Counter[str] = Counter()
        self.holders: dict[Any, Seat] = {}

    # What members report

    def handed_out(self, seat: Seat, message: Any) -> None:
        partition, number = message.partition, int(message.text)
        assert number <= self.reached[partition], (
            f"{partition}: {number} came, and {self.reached[partition]} was next: passed over"
        )
        self.met["came again"] += number < self.reached[partition]
        self.reached[partition] = max(self.reached[partition], number + 1)
        saved = self.saved(partition)
        assert saved is None or message.offset >= saved, (
            f"{partition}: {message.offset} came to {seat.number} again although {saved} was saved"
        )

    def done(self, message: Any) -> None:
        self.unfinished.discard((message.partition, int(message.text)))

    def saved(self, partition: int) -> int | None:
        engine = self.broker._server.engine
        if engine is None:
            return None
        register = engine.broker.catalog.state
        row = register.groups.get(GROUP)
        incarnation = engine.broker.topics.topic(TOPIC).incarnation
        place = None if row is None else row.offsets.get((incarnation, partition))
        return None if place is None else place.offset

    # Steps

    def send(self) -> None:
        for _ in range(self.random.randrange(1, 20)):
            partition = self.random.randrange(PARTITIONS)
            number = self.sent[partition]
            self.producer.send(TOPIC, str(number), partition=partition)
            self.sent[partition] += 1
            self.unfinished.add((partition, number))
        self.producer.flush()

    def join(self) -> None:
        if len(self.seats) + len(self.frozen) < MEMBERS:
            self.joined += 1
            self.met["joined beside others"] += bool(self.seats)
            self.seats.append(Seat(self, self.joined))
            self.met["twelve members at a time"] += len(self.seats) + len(self.frozen) == MEMBERS

    def leave(self) -> None:
        if len(self.seats) > 1:
            seat = self.taken()
            whole = self.random.random() < 0.5
            if whole and not seat.manual:
                seat.finished()
            self.met["left with something in hand" if seat.in_hand else "left with all finished"] += 1
            seat.consumer._close(processed=whole)

    def kill(self) -> None:
        if len(self.seats) > 1:
            seat = self.taken()
            self.met[f"killed with {'something' if seat.in_hand else 'nothing'} in hand"] += 1
            self.end(seat)

    def end(self, seat: Seat) -> None:
        """As SIGKILL does: it does nothing any more, and its connection is gone."""
        if seat.driver in self.broker._simulation.clients:
            self.broker._simulation.clients.remove(seat.driver)
        seat.driver.channel.close()
        seat.driver.closed = True

    def freeze(self) -> None:
        if len(self.seats) > 1:
            seat = self.taken()
            seat.cuts = self.cuts
            self.met["frozen with something in hand"] += bool(seat.in_hand)
            seat.had = seat.grants()
            if seat.driver in self.broker._simulation.clients:
                self.broker._simulation.clients.remove(seat.driver)
            self.frozen.append(seat)

    def thaw(self) -> None:
        if self.frozen:
            seat = self.frozen.pop(self.random.randrange(len(self.frozen)))
            self.broker._simulation.clients.append(seat.driver)
            self.seats.append(seat)
            if seat.cuts == self.cuts and self.random.random() < 0.5:
                seat.poll(5)  # before it was notified of anything; of a cut it would be notified first
                self.met["polled as a zombie"] += 1
            self.met["frozen over a restart of the broker"] += seat.cuts != self.cuts
            self.broker.settle()
            if seat.had:
                in_time = seat.had.items() <= seat.grants().items()
                self.met["came back in time" if in_time else "came back and had lost what it had"] += 1

    def poll(self) -> None:
        self.random.choice(self.seats).poll(self.random.choice([1, 3, 20]))

    def commit(self) -> None:
        self.random.choice(self.seats).commit()

    def handle_for_minutes(self) -> None:
        """A message is worked on for minutes: its member keeps what it has."""
        seat = self.random.choice(self.seats)
        seat.poll(1)
        mine = {(each.topic, each.partition) for each in seat.in_hand}
        if not mine or not mine <= {tuple(each) for each in seat.held()}:
            return
        self.broker.clock.advance(self.random.choice([60, 240]))
        assert mine <= {tuple(each) for each in seat.held()}, f"{seat.number} lost what it works on"
        self.met["worked on one message for minutes"] += 1

    def wait(self) -> None:
        self.broker.clock.advance(self.random.choice([0.01, 0.3, 1.0, 4.0, 12.0]))

    def restart(self) -> None:
        self.cuts += 1
        down = self.random.choice([0, 0.5, 3, 15])
        if self.random.random() < 0.5:
            self.met["the broker restarted"] += 1
            self.met["the broker restarted, away for longer than a session"] += down > SESSION
            self.broker.restart(down=down)
        else:
            self.met["the broker lost its power"] += 1
            self.broker.crash(down=down)

    def disconnect(self) -> None:
        self.cuts += 1
        self.met["all connections cut"] += 1
        self.broker.disconnect()

    def taken(self) -> Seat:
        return self.seats.pop(self.random.randrange(len(self.seats)))

    # The whole

    def run(self) -> None:
        self.join()
        self.send()
        steps = {
            self.poll: 30,
            self.wait: 12,
            self.send: 8,
            self.join: 9,
            self.commit: 4,
            self.leave: 3,
            self.kill: 3,
            self.freeze: 3,
            self.thaw: 4,
            self.handle_for_minutes: 1,
            self.restart: 1,
            self.disconnect: 1,
        }
        for _ in range(STEPS):
            step = self.random.choices(list(steps), list(steps.values()))[0]
            step()
            self.check_owners()
        self.finish()

    def check_owners(self) -> None:
        """No partition is held by two that live. A zombie that just came back is one once it has heard of it."""
        self.broker.settle()
        holders: dict[Any, Seat] = {}
        for seat in self.seats:
            if seat.core.membership.may_deliver():
                for name in seat.held():
                    assert name not in holders, f"{name} is held by {holders[name].number} and {seat.number}"
                    holders[name] = seat
                    before = self.holders.get(name, seat)
                    self.met["a partition moved between living members"] += before is not seat and before in self.seats
        self.holders = holders

    def finish(self) -> None:
        """Peace: everybody comes back, reads and commits until everything is done."""
        while self.frozen:
            self.thaw()
        until = self.broker.clock.monotonic() + PATIENCE_SECONDS
        while self.unfinished or not self.at_rest():
            assert self.broker.clock.monotonic() < until, (
                f"{len(self.unfinished)} not finished, {self.owners()}, reached {self.reached} of {self.sent}"
            )
            for seat in self.seats:
                seat.poll(20)
                seat.commit()
            self.check_owners()
            self.broker.clock.advance(0.5)
        assert self.reached == self.sent

    def owners(self) -> dict[int, list[str]]:
        return {seat.number: sorted(map(str, seat.core.membership.assigned)) for seat in self.seats}

    def at_rest(self) -> bool:
        owned = sorted(name for names in self.owners().values() for name in names)
        return owned == sorted(f"{TOPIC}-{number}" for number in range(PARTITIONS))

    def close(self) -> None:
        for seat in self.frozen:
            self.end(seat)
        self.broker.close()
