"""Model check of `tfmq.replication.terms`: all interleavings of claimants, primaries that write, and a sweeper.

A *course* begins with term 1, whose primary writes. Claimants run the real steps: claim, seal, begin; then they write
too. Each step of the model is one call on the store, with its result. A process that freezes is one that is not chosen
for some steps, or never again, so every interleaving has all freezes in it. What must hold in every state:

 1. a term that has begun contains, in its chain of parents, all terms below it that have begun, and of each of them
    all that its primary may have counted as stored;
 2. the slot after a parent has a FENCE, so the primary of that term can store nothing more that counts; no term
    between has begun or can begin;
 3. a slot that a primary counts is the first object ever stored there, and so is the BEGIN of who begins to write;
 4. no claimant believes that the store has lost objects;
 5. at the end of every course, when nobody has anything left to do, the claimant of the highest term has begun it.

A claimant's place in its steps is a number: the generators' frames tell which places are the same, and a place is
reached again by sending the results once more. So a state is some bytes and numbers, and is visited once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from types import FrameType
from typing import Any, Final, NamedTuple

from tfmq.replication import terms
from tfmq.replication.entries import (
    MANIFESTS,
    Begin,
    EntryKind,
    Position,
    Term,
    decode_entry,
    encode_entry,
    entry_key,
    manifest_key,
    parse_position,
    parse_term,
    term_key,
)
from tfmq.replication.errors import Deposed, InvalidObject, StoreUnavailable
from tfmq.replication.terms import Get, ListKeys, PutNew, Steps

SLOTS: Final = 24
"""Slots of a term in the model's store, from 0 on."""
PACES: Final = (0.001, 0.03, 1.0)
UNAVAILABLE: Final = "unavailable"
"""Result of a call whose answer is lost."""


class Broken(AssertionError):
    """Something that must hold does not; the text has the steps that lead there."""


class Ended(NamedTuple):
    """A claimant's steps are over. `term` is 0 unless it has begun one."""

    outcome: str
    term: int = 0


@dataclass(frozen=True)
class Course:
    """What takes part.

    `slots`: how many entries the primary of term 1 wants to store, at most `window` of them under way. `successors`:
    how many each later primary wants. `known`: what each claimant has applied. `faults`: how many answers to puts are
    lost; such a put has happened, or it happens at any later time or never. `sweeps`: how often a snapshot is stored
    and what is before it swept, as if a moment were longer than the history that is kept. `bases`: how often a primary
    stores a manifest for its next slot before the slot itself.
    """

    known: Sequence[Position | None]
    slots: int = 3
    window: int = 3
    successors: int = 1
    faults: int = 0
    sweeps: int = 0
    bases: int = 0
    ahead: int = 2
    keeps_fences: bool = True
    """Whether the sweeper spares the fences that ended terms, as it must."""
    reduced: bool = True
    """Leave out interleavings that differ only in who does first what nobody can notice."""


class State(NamedTuple):
    store: bytes
    """The object under each key, by its number; 0 for none."""
    first: bytes
    """The object that was the first under each key."""
    places: tuple[int | Ended, ...]
    """Of each claimant."""
    stored: tuple[int, ...]
    """By term: the slots of which the primary knows that they are stored, as bits."""
    deposed: int
    """Terms whose primaries have met a FENCE, as bits."""
    late: tuple[tuple[int, int], ...]
    """Puts (key, object) whose answers are lost and that may yet happen."""
    faults: int
    bases: tuple[int, int]
    """Manifests left that primaries may store, and the one that is about to be put: it may have been frozen before."""
    sweep: tuple[int, ...]
    """Sweeps left, and of the present one: key of its manifest, and how many keys were looked at (0: not yet put)."""


class Automaton:
    """The places of one claimant in its steps, by number."""

    def __init__(self, program: Callable[[], Steps[Ended]]) -> None:
        self._program = program
        self._numbers: dict[Hashable, int] = {}
        self._results: list[tuple[Any, ...]] = []
        """How each place was reached first."""
        self.calls: list[Get | PutNew | ListKeys] = []
        """The call at each place."""
        self._next: dict[tuple[int, Any], int | Ended] = {}
        self.start = self._reach(())

    def next(self, place: int, result: Any) -> int | Ended:
        try:
            return self._next[place, result]
        except KeyError:
            reached = self._next[place, result] = self._reach((*self._results[place], result))
            return reached

    def _reach(self, results: tuple[Any, ...]) -> int | Ended:
        steps = self._program()
        try:
            call = next(steps)
            for result in results:
                call = steps.throw(StoreUnavailable("lost")) if result is UNAVAILABLE else steps.send(result)
        except StopIteration as end:
            ended: Ended = end.value
            return ended
        number = self._numbers.setdefault(_frames(steps), len(self.calls))
        if number == len(self.calls):
            assert isinstance(call, Get | PutNew | ListKeys)
            self.calls.append(call)
            self._results.append(results)
        return number


def _frames(steps: Any) -> Hashable:
    """What decides how suspended generators go on: where each of them is, and its local variables."""
    found: list[Hashable] = []
    while steps is not None:
        frame: FrameType = steps.gi_frame
        found.append((frame.f_code, frame.f_lasti, *((name, _value(v)) for name, v in frame.f_locals.items())))
        steps = steps.gi_yieldfrom
    return tuple(found)


def _value(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


class Model:
    """Explores a course. `states` is the number of different states seen."""

    def __init__(self, course: Course) -> None:
        self.course = course
        claimants = len(course.known)
        self._terms = range(1, claimants + 2)
        self.states = 0
        self.ends: set[Hashable] = set()
        """What can be at the end, without the names of claimants and objects."""
        self._keys: list[str] = [term_key(term) for term in self._terms]
        for term in self._terms:
            self._keys += [entry_key(Position(term, slot)) for slot in range(SLOTS)]
        self._manifests = len(self._keys)
        for term in self._terms:
            self._keys += [manifest_key(Position(term, slot)) for slot in range(SLOTS)]
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        self._listed: dict[ListKeys, list[tuple[str, int]]] = {}
        """Keys that a list may have, with their numbers."""
        self._entries = {
            (term, slot): self._numbers[entry_key(Position(term, slot))]
            for term in self._terms
            for slot in range(SLOTS)
        }
        self._objects: list[bytes] = [b""]
        self._object_numbers: dict[bytes, int] = {b"": 0}
        self._kinds: list[EntryKind | None] = [None]
        self._begins: dict[int, Begin] = {}
        """By number of the object."""
        self._own = {
            (term, slot): self._intern(_operations(term, slot)) for term in self._terms for slot in range(1, SLOTS)
        }
        self._automata = [Automaton(self._program(number)) for number in range(claimants)]

    def _program(self, number: int) -> Callable[[], Steps[Ended]]:
        known, ahead = self.course.known[number], self.course.ahead

        def steps() -> Steps[Ended]:
            try:
                term = yield from terms.claim(f"m{number}", "", f"n{number}")
                if term is None:
                    return Ended("lost")
                sealed = yield from terms.seal(term, 0, known, ahead)
                yield from terms.begin(term, sealed, 0)
            except Deposed:
                return Ended("deposed")
            except InvalidObject as error:
                return Ended(f"invalid: {error}")
            return Ended("begun", term.number)

        return steps

    def _intern(self, data: bytes, position: Position | None = None) -> int:
        number = self._object_numbers.get(data)
        if number is None:
            number = self._object_numbers[data] = len(self._objects)
            if number > 255:
                raise ValueError("more different objects than a byte can number")
            self._objects.append(data)
            kind = None
            if data[:4] == b"TFMR":
                header = Position(int.from_bytes(data[6:14], "big"), int.from_bytes(data[14:22], "big"))
                entry = decode_entry(data, header)
                kind = entry.kind
                if kind == EntryKind.BEGIN:
                    self._begins[number] = Begin.decode(entry)
            self._kinds.append(kind)
        return number

    def first_state(self) -> State:
        """Term 1 has begun, with the slots that claimants know."""
        store = bytes(len(self._keys))
        store = self._set(store, term_key(1), Term(1, "primary", "", "nonce").encode())
        begin = encode_entry(EntryKind.BEGIN, Position(1, 0), 0, [Begin(None, "primary", "").encode()])
        store = self._set(store, entry_key(Position(1, 0)), begin)
        known = max((position.slot for position in self.course.known if position is not None), default=0)
        mask = 0
        for slot in range(1, known + 1):
            store = self._set(store, entry_key(Position(1, slot)), _operations(1, slot))
            mask |= 1 << slot
        stored = (0, mask) + (0,) * len(self.course.known)
        places = tuple(automaton.start for automaton in self._automata)
        return State(
            store, store, places, stored, 0, (), self.course.faults, (self.course.bases, 0), (self.course.sweeps, 0, 0)
        )

    def _set(self, store: bytes, key: str, data: bytes) -> bytes:
        number = self._numbers[key]
        return store[:number] + bytes((self._intern(data),)) + store[number + 1 :]

    # Exploring

    def explore(self, limit: int | None = None) -> int:
        """Visit all states, or the first `limit`; return how many were visited. Raises Broken."""
        first = self.first_state()
        visited = {_digest(first)}
        path = [("", first, self._steps(first))]
        try:
            while path and (limit is None or len(visited) < limit):
                _, before, steps = path[-1]
                for label, state in steps:
                    digest = _digest(state)
                    if digest not in visited:
                        visited.add(digest)
                        path.append((label, state, self._steps(state)))
                        self._check(before, state)
                        break
                else:
                    path.pop()
        except Broken as error:
            raise Broken("\n".join((f"{error}, after:", *(label for label, *_ in path[1:])))) from None
        self.states = len(visited)
        return self.states

    def walk(self, choose: random.Random) -> int:
        """Make random steps to the end of a course; return their number. Raises Broken."""
        state = self.first_state()
        labels: list[str] = []
        paces: dict[str, float] = {}
        try:
            while steps := list(self._steps(state)):
                before = state
                # Each process has a pace of its own, so that some sleep while others do much, and now and then another.
                movers = [label[: label.index(" ")] for label, _ in steps]
                paces[choose.choice(movers)] = choose.choice(PACES)
                weights = [paces.setdefault(mover, choose.choice(PACES)) for mover in movers]
                label, state = choose.choices(steps, weights)[0]
                labels.append(label)
                self._check(before, state)
        except Broken as error:
            raise Broken("\n".join((f"{error}, after:", *labels))) from None
        return len(labels)

    # The steps

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what may happen next, and the state after it. Raises Broken if nothing is left, and should be."""
        is_end = True
        for label, after in self._next_states(state):
            is_end = False
            yield label, after
        if is_end:
            self._check_end(state)
            kinds = tuple(self._kinds[number] for number in state.first)
            self.ends.add((kinds, state.stored, tuple(sorted(_ended(state)))))

    def _next_states(self, state: State) -> Iterator[tuple[str, State]]:
        movable = [number for number, place in enumerate(state.places) if not isinstance(place, Ended)]
        if self.course.reduced:
            for number in movable:
                if self._is_settled(state, number):
                    yield from self._claimant_steps(state, number)
                    return
            movable = [number for number in movable if not self._is_second(state, number)]
        for number in movable:
            yield from self._claimant_steps(state, number)
        yield from self._primary_steps(state, 1, self.course.slots)
        for place in state.places:
            if isinstance(place, Ended) and place.term:
                yield from self._primary_steps(state, place.term, self.course.successors)
        for index, (key, data) in enumerate(state.late):
            rest = state.late[:index] + state.late[index + 1 :]
            yield f"late put {self._keys[key]}", self._put(state._replace(late=rest), key, data)[1]
        left, manifest = state.bases
        if manifest:
            after = self._put(state, manifest, self._intern(b"manifest"))[1]
            yield f"base puts {self._keys[manifest]}", after._replace(bases=(left - 1, 0))
        if self.course.sweeps:
            yield from self._sweeper_steps(state)

    def _call(self, state: State, number: int) -> Get | PutNew | ListKeys:
        place = state.places[number]
        assert isinstance(place, int)
        return self._automata[number].calls[place]

    def _is_settled(self, state: State, number: int) -> bool:
        """Whether the claimant's next call has a result that nothing can change, and changes nothing itself.

        Then it makes no difference when it is made. Only without a sweeper: objects never change, unless it deletes.
        """
        if self.course.sweeps:
            return False
        call = self._call(state, number)
        if isinstance(call, ListKeys):
            return call.prefix.startswith(MANIFESTS) and not self.course.bases
        key = self._numbers.get(call.key)
        return key is None or state.store[key] > 0

    def _is_second(self, state: State, number: int) -> bool:
        """Whether one of the same kind before this one has not begun. They differ in names, so one order is enough."""
        return any(
            self.course.known[before] == self.course.known[number]
            and state.places[before] == self._automata[before].start
            for before in range(number)
        )

    def _claimant_steps(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        call = self._call(state, number)
        label = f"m{number} {call.prefix if isinstance(call, ListKeys) else call.key}"
        if isinstance(call, Get):
            key = self._numbers.get(call.key)
            data = self._objects[state.store[key]] if key is not None else b""
            yield f"{label} get", self._moved(state, number, data or None)
        elif isinstance(call, ListKeys):
            keys = tuple(key for key, index in self._list(call) if state.store[index])
            yield f"{label} list", self._moved(state, number, keys)
        else:
            key, data_number = self._numbers[call.key], self._intern(call.data)
            stored, after = self._put(state, key, data_number)
            yield f"{label} put {stored}", self._moved(after, number, stored)
            if stored and state.faults:
                lost = after._replace(faults=state.faults - 1)
                yield f"{label} put, answer lost", self._moved(lost, number, UNAVAILABLE)
                late = tuple(sorted({*state.late, (key, data_number)}))
                lost = state._replace(faults=state.faults - 1, late=late)
                yield f"{label} put, delayed", self._moved(lost, number, UNAVAILABLE)

    def _list(self, call: ListKeys) -> list[tuple[str, int]]:
        if call not in self._listed:
            keys = sorted(key for key in self._keys if key.startswith(call.prefix) and key > call.after)
            self._listed[call] = [(key, self._numbers[key]) for key in keys]
        return self._listed[call]

    def _moved(self, state: State, number: int, result: Any) -> State:
        """Return the state after the claimant's call had this result."""
        place = state.places[number]
        assert isinstance(place, int)
        reached = self._automata[number].next(place, result)
        return state._replace(places=(*state.places[:number], reached, *state.places[number + 1 :]))

    def _put(self, state: State, key: int, data: int) -> tuple[bool, State]:
        if state.store[key]:
            return False, state
        store = state.store[:key] + bytes((data,)) + state.store[key + 1 :]
        first = state.first if state.first[key] else state.first[:key] + bytes((data,)) + state.first[key + 1 :]
        return True, state._replace(store=store, first=first)

    def _primary_steps(self, state: State, term: int, slots: int) -> Iterator[tuple[str, State]]:
        """Puts of the slots under way take effect in any order, and again."""
        mask = state.stored[term]
        next_slot = _stored_to(mask) + 1
        if state.bases[0] and not state.bases[1] and mask < 1 << next_slot and next_slot <= slots:
            manifest = self._numbers[manifest_key(Position(term, next_slot))]
            yield f"primary-{term} makes a base", state._replace(bases=(state.bases[0], manifest))
        for slot in range(1, min(slots, _stored_to(mask) + self.course.window) + 1):
            key, own = self._entries[term, slot], self._own[term, slot]
            there = state.store[key]
            is_new, after = self._put(state, key, own)
            if not is_new and (there != own or mask >> slot & 1):
                if there != own and not state.deposed >> term & 1:
                    yield f"primary-{term} is deposed at {slot}", after._replace(deposed=state.deposed | 1 << term)
                continue
            if not state.deposed >> term & 1:
                # What is stored by a deposed primary is under way since before; it counts nothing more.
                stored = (*state.stored[:term], mask | 1 << slot, *state.stored[term + 1 :])
                after = after._replace(stored=stored)
            if after != state:
                yield f"primary-{term} puts {slot}", after

    def _sweeper_steps(self, state: State) -> Iterator[tuple[str, State]]:
        left, manifest, looked = state.sweep
        if not manifest:
            counted = {self._numbers[manifest_key(position)]: position for position in self._counted(state)}
            newest = max((number for number in counted if state.store[number]), default=0)
            for number, position in counted.items() if left else ():
                if number > newest:
                    yield f"sweeper chooses {position}", state._replace(sweep=(left, number, 0))
            return
        if not looked:
            after = self._put(state, manifest, self._intern(b"manifest"))[1]
            yield f"sweeper puts {self._keys[manifest]}", after._replace(sweep=(left, manifest, 1))
            return
        order = self._swept(manifest)
        for index, key in enumerate(order[looked - 1 :], looked):
            if state.store[key] and not (self.course.keeps_fences and self._has_ended(state, key)):
                store = state.store[:key] + b"\0" + state.store[key + 1 :]
                yield (
                    f"sweeper deletes {self._keys[key]}",
                    state._replace(store=store, sweep=(left, manifest, index + 1)),
                )
                return
        yield "sweeper ends", state._replace(sweep=(left - 1, 0, 0))

    def _has_ended(self, state: State, key: int) -> bool:
        """Whether the key is that of the fence that has ended a term which had begun."""
        position = parse_position(self._keys[key])
        if position is None or key >= self._manifests:
            return False
        kinds = [self._kinds[state.first[self._entries[position.term, slot]]] for slot in range(position.slot + 1)]
        return kinds[0] == EntryKind.BEGIN and None not in kinds and kinds[-1] == EntryKind.FENCE not in kinds[:-1]

    def _swept(self, manifest: int) -> list[int]:
        """Keys that a manifest makes superfluous, in the order in which they are deleted."""
        position = parse_position(self._keys[manifest])
        assert position is not None
        found = list(range(self._manifests, manifest))
        for number, key in enumerate(self._keys[: self._manifests]):
            entry, term = parse_position(key), parse_term(key)
            if (entry is not None and entry < position) or (term is not None and term < position.term):
                found.append(number)
        return sorted(found, key=lambda number: (number < len(self._terms), number < self._manifests, number))

    # What must hold

    def _counted(self, state: State) -> list[Position]:
        """All entries that count, which is what a follower may have applied."""
        found, newest = [], 0
        for term in self._terms:
            if self._kinds[state.first[self._entries[term, 0]]] == EntryKind.BEGIN:
                newest = term
        end = SLOTS
        while newest:
            slot = 0
            while slot < end and self._kinds[state.first[self._entries[newest, slot]]] not in (None, EntryKind.FENCE):
                found.append(Position(newest, slot))
                slot += 1
            parent = self._begins[state.first[self._entries[newest, 0]]].parent
            newest, end = (parent.term, parent.slot + 1) if parent is not None else (0, 0)
        return found

    def _check(self, before: State, state: State) -> None:
        first = state.first
        if first == before.first and state.stored == before.stored and _ended(state) == _ended(before):
            return
        for place in state.places:
            if isinstance(place, Ended):
                require(not place.outcome.startswith("invalid"), f"a claimant says {place.outcome}")
        for index, place in enumerate(state.places):
            if isinstance(place, Ended) and place.term:
                begin = self._begins.get(first[self._entries[place.term, 0]])
                is_own = begin is not None and begin.member == f"m{index}"
                require(is_own, f"m{index} serves in term {place.term}, which another began or ended before")
        begun = [term for term in self._terms if self._kinds[first[self._entries[term, 0]]] == EntryKind.BEGIN]
        for term in self._terms:
            for slot in range(1, _stored_to(state.stored[term]) + 1):
                is_own = first[self._entries[term, slot]] == self._own[term, slot]
                require(is_own, f"primary {term} counts slot {slot}, which was fenced before")
        for below, term in pairwise(begun):
            parent = self._begins[first[self._entries[term, 0]]].parent
            require(parent is not None and parent.term == below, f"term {term} does not continue term {below}")
            assert parent is not None
            kept = _stored_to(state.stored[below])
            require(kept <= parent.slot, f"term {term} lacks slot {kept} of term {below}, which was counted")
            kinds = [self._kinds[first[self._entries[below, slot]]] for slot in range(parent.slot + 2)]
            require(None not in kinds, f"term {term} continues term {below} after a gap")
            is_first_fence = kinds.index(EntryKind.FENCE) == parent.slot + 1 if EntryKind.FENCE in kinds else False
            require(is_first_fence, f"term {term} continues {parent}, and no fence is there, or one is before")
            for skipped in range(below + 1, term):
                kind = self._kinds[first[self._entries[skipped, 0]]]
                require(kind == EntryKind.FENCE, f"term {skipped} may begin, and term {term} has begun")

    def _check_end(self, state: State) -> None:
        highest = max(term for term in self._terms if state.store[term - 1])
        outcomes = _ended(state)
        require(len(outcomes) == len(state.places), "a claimant is not at its end")
        is_begun = highest == 1 or Ended("begun", highest) in outcomes
        require(is_begun, f"nobody has begun term {highest}: {outcomes}")
        require(highest > 1, "nobody has claimed a term")


def _operations(term: int, slot: int) -> bytes:
    return encode_entry(EntryKind.OPERATIONS, Position(term, slot), 0, [])


def _stored_to(mask: int) -> int:
    """The highest slot below which all are stored, and which is stored itself; 0 if slot 1 is not."""
    slot = 0
    while mask >> slot + 1 & 1:
        slot += 1
    return slot


def _ended(state: State) -> list[Ended]:
    return [place for place in state.places if isinstance(place, Ended)]


def _digest(state: State) -> bytes:
    return blake2b(b"%b%b%r" % (state.store, state.first, tuple(state[2:])), digest_size=16).digest()


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise Broken(sentence)
