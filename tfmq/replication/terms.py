"""Who is primary: claim a term, seal the terms below it, begin it. docs/decisions/replication-terms.md has the proof.

The steps are generators. They yield calls on a store (`Get`, `PutNew`, `ListKeys`), get the results sent in, and have
StoreUnavailable thrown in; then they yield the call again, so their caller limits the repeats. All of them can
be stopped after any call and be resumed at any later time, or never. `run_steps` drives them in the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from tfmq.replication.entries import (
    ENTRIES,
    MANIFESTS,
    NUMBER_MAX,
    TERMS,
    Begin,
    Entry,
    EntryKind,
    Fence,
    Position,
    Term,
    decode_entry,
    encode_entry,
    entry_key,
    manifests_prefix,
    parse_position,
    parse_term,
    term_key,
)
from tfmq.replication.errors import Deposed, InvalidObject, StoreUnavailable
from tfmq.replication.store import Store

FENCE_AHEAD: Final = 64
"""How many slots before a primary that still writes a claimant puts its second fence."""
REPEATS_MAX: Final = 5
"""How often `run_steps` repeats a call that raises StoreUnavailable."""

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Callable[[Store], Any], Any, _T]


@dataclass(frozen=True)
class Get:
    """A call on a store: read an object."""

    key: str

    def __call__(self, store: Store) -> bytes | None:
        return store.get(self.key)


@dataclass(frozen=True)
class PutNew:
    """A call on a store: store an object unless there is one of this key."""

    key: str
    data: bytes

    def __call__(self, store: Store) -> bool:
        return store.put_new(self.key, self.data)


@dataclass(frozen=True)
class ListKeys:
    """A call on a store: the keys with this prefix that come after `after`, in order."""

    prefix: str
    after: str = ""

    def __call__(self, store: Store) -> list[str]:
        return [each.key for each in store.list(self.prefix, self.after)]


class Sealed(NamedTuple):
    """Where the history before a claimed term ends, for good unless a later term is claimed.

    `parent`: the last entry that counts; None if nothing has ever been stored. `time_ms`: the time of the last entry
    that was read on the way, 0 if none was.
    """

    parent: Position | None
    time_ms: int


class Begun(NamedTuple):
    """A term that has begun. `begin` is None if its slot 0 was swept: then there are manifests in this term."""

    term: Term
    begin: Begin | None


def newest_term() -> Steps[Term | None]:
    """Return the highest term that was claimed; None if there is none. Raises InvalidObject, NewerObject."""
    missing = 0
    while True:
        number = yield from _highest_number(after=0)
        if not number:
            return None
        data = yield from _get(term_key(number))
        if data is not None:
            return Term.decode(data, number)
        # Terms are swept only below a higher one, so there must be one by now.
        if number == missing:
            raise InvalidObject(f"{term_key(number)} is listed, and cannot be read")
        missing = number


def newest_begun() -> Steps[Begun | None]:
    """Return the highest term that has begun; None if none has. Raises InvalidObject, NewerObject.

    Another term may begin at any time, and a term that has begun may have ended.
    """
    snapshots: list[str] = []
    while True:
        newest = yield from newest_term()
        for number in range(newest.number if newest is not None else 0, 0, -1):
            begin = yield from _begin_of(number)
            # A FENCE in slot 0 says nothing if there are manifests: it was put after the slot had been swept.
            if begin is not None or (yield from _newest_manifest(number)) >= 0:
                if newest is None or newest.number != number:
                    newest = yield from _term(number)
                return Begun(newest, begin)
        if snapshots:
            raise InvalidObject(_sentence_of_loss(snapshots))
        snapshots = yield from _repeated(ListKeys(MANIFESTS))
        if not snapshots:
            return None
        # One may have begun since, so this looks again. What the manifests were made in has begun before that.


def next_begun(number: int) -> Steps[Begun | None]:
    """Return the term that continues the term `number`, which has ended; None as long as no later term has begun.

    The caller must compare `begin.parent` with the last entry that it has applied. If they differ, or `begin` is None,
    then the history went on while the caller did not follow it, and was swept: it has to materialize the folder again.
    """
    while True:
        number += 1
        data = yield from _get(entry_key(Position(number, 0)))
        if data is None:
            break
        entry = decode_entry(data, Position(number, 0))
        if entry.kind != EntryKind.FENCE:
            return Begun((yield from _term(number)), _decode_begin(entry))
    # Nothing after this term has begun, unless slot 0 was swept.
    begun = yield from newest_begun()
    return begun if begun is not None and begun.term.number >= number else None


def has_only_begun(begun: Begun) -> Steps[bool]:
    """Return whether the term has ended, and neither it nor any before it has an entry after its BEGIN.

    Then no server has ever served, because the first entry that counts is that of the first primary's folder.
    """
    data = yield from _get(entry_key(Position(begun.term.number, 1)))
    if data is None or decode_entry(data, Position(begun.term.number, 1)).kind != EntryKind.FENCE:
        return False
    first = begun.begin
    while first is not None and first.parent is not None and first.parent.slot == 0:
        first = yield from _begin_of(first.parent.term)
    return first is not None and first.parent is None


def claim(member: str, address: str, nonce: str, known: int | None = None) -> Steps[Term | None]:
    """Claim the next term. Return it; None if another claimant has got it, who is to be given the time to begin it.

    `known`: the highest number that the caller has decided by, 0 for none. If there is a higher one, return None.
    `nonce` must be random, and new for each call: two servers with copies of one folder have the same `member`.
    Raises InvalidObject and NewerObject if the newest term cannot be read.
    """
    newest = yield from newest_term()
    number = newest.number + 1 if newest is not None else 1
    if known is not None and number > known + 1:
        return None
    if number > NUMBER_MAX:
        raise InvalidObject(f"{term_key(number - 1)} has the highest number: no term can follow")
    term = Term(number, member, address, nonce)
    data = term.encode()
    if (yield from _put(term_key(number), data)) != data:
        return None
    # If there is a later one, then this number may be one that was swept, and had another owner.
    return term if not (yield from _highest_number(after=number)) else None


def seal(term: Term, now_ms: int, known: Position | None = None, ahead: int = FENCE_AHEAD) -> Steps[Sealed]:
    """End all terms below the claimed `term`, and return where the last one that has begun ended.

    `known`: an entry that the caller knows to be stored with all before it, so that those are not read again. `now_ms`:
    the time for fences, ms since 1970. Raises Deposed if a later term is claimed; InvalidObject and NewerObject if an
    entry cannot be read or what is `known` is not in the store: then operations that count could be lost.
    """
    if known is not None and known.term >= term.number:
        raise InvalidObject(
            f"the store has no term after {term.number - 1}, this server has applied entries of term {known.term}:"
            " the store has lost objects"
        )
    time_ms = 0
    for number in range(term.number - 1, 0, -1):
        known_slot = known.slot if known is not None and known.term == number else -1
        end, time_ms = yield from _end(number, known_slot, term, max(now_ms, time_ms), ahead)
        if end:
            return Sealed(Position(number, end - 1), time_ms)
        # The term has not begun and never will. Before this goes on to one that may be old, and swept:
        yield from _check_newest(term)
    snapshots = yield from _repeated(ListKeys(MANIFESTS))
    if snapshots:
        yield from _check_newest(term)  # the manifests may be of a later one
        raise InvalidObject(_sentence_of_loss(snapshots))
    return Sealed(None, time_ms)


def begin(term: Term, sealed: Sealed, now_ms: int) -> Steps[Begin]:
    """Begin the claimed `term`, after `seal`. The caller may put entries from slot 1 on when this has returned.

    `now_ms`: the time of the entry, ms since 1970; the parent's is used if it is later. Raises Deposed if a later term
    is claimed.
    """
    body = Begin(sealed.parent, term.member, term.address)
    position = Position(term.number, 0)
    data = encode_entry(EntryKind.BEGIN, position, max(now_ms, sealed.time_ms), [body.encode()])
    there = yield from _put(entry_key(position), data)
    if there != data:
        raise Deposed(_who_ended(term.number, decode_entry(there, position)))
    # A claimant that slept until its slot 0 was swept has just stored a BEGIN there. Then there is a later term.
    yield from _check_newest(term)
    return body


def run_steps(steps: Steps[_T], store: Store, pause: Callable[[], None], repeats_max: int = REPEATS_MAX) -> _T:
    """Make the calls of `steps` and return its result. `pause` is called before a call is repeated.

    Raises what the steps and the store raise; StoreUnavailable after `repeats_max` repeats of a call.
    """
    failed = 0
    try:
        call = next(steps)
        while True:
            try:
                result = call(store)
            except StoreUnavailable as error:
                if failed == repeats_max:
                    raise
                failed += 1
                pause()
                call = steps.throw(error)
            else:
                failed = 0
                call = steps.send(result)
    except StopIteration as end:
        returned: _T = end.value
        return returned
    finally:
        steps.close()


def _end(number: int, known_slot: int, term: Term, now_ms: int, ahead: int) -> Steps[tuple[int, int]]:
    """Find or make the end of a term: the slot of its first fence. Return it, and the time of the last entry read.

    `known_slot`: a slot that is stored with all below it; -1 if none is known.
    """
    slot = max((yield from _newest_manifest(number)), known_slot, 0)
    time_ms, is_bounded = 0, False
    while True:
        position = Position(number, slot)
        data = yield from _get(entry_key(position))
        raced = data is None and slot != known_slot
        if raced:
            fence = _encode_fence(position, max(now_ms, time_ms), term.member)
            data = yield from _put(entry_key(position), fence)
        entry = None if data is None else _decode(data, position)
        if entry is not None and entry.kind != EntryKind.FENCE:
            time_ms = entry.time_ms
            if raced and not is_bounded:
                # The primary writes, and may be faster for ever. It ends at a fence that is far enough before it, or
                # before that; all slots below that fence are tried as ever, so nothing depends on this call.
                position = Position(number, slot + ahead)
                fence = _encode_fence(position, max(now_ms, time_ms), term.member)
                is_bounded = yield from _try_put(entry_key(position), fence)
                ahead *= 2
            slot += 1
            continue
        # Slots below a manifest may have been swept. A fence that is in one of these ends nothing.
        # The manifest's own slot is not swept. It is free until the BASE that belongs to the manifest is stored.
        newest = yield from _newest_manifest(number)
        if newest > slot:
            slot, is_bounded = newest, False
        elif slot == known_slot:
            yield from _check_newest(term)  # if there is a later one, then the whole term may have been swept
            raise InvalidObject(
                f"{entry_key(position)} is not the entry that this server has applied: the store has lost objects"
            )
        else:
            return slot, time_ms


def _encode_fence(position: Position, time_ms: int, member: str) -> bytes:
    return encode_entry(EntryKind.FENCE, position, time_ms, [Fence(member).encode()])


def _decode(data: bytes, position: Position) -> Entry:
    """Decode an entry on the way to the end of a term. Raises InvalidObject, NewerObject."""
    try:
        entry = decode_entry(data, position)
    except InvalidObject as error:
        raise type(error)(f"{error}; to continue before it would lose what follows") from None
    if entry.kind != EntryKind.FENCE and (entry.kind == EntryKind.BEGIN) != (position.slot == 0):
        raise InvalidObject(f"{entry_key(position)} is {'' if position.slot else 'not '}the beginning of a term")
    return entry


def _decode_begin(entry: Entry) -> Begin:
    if entry.kind != EntryKind.BEGIN:
        raise InvalidObject(f"{entry_key(entry.position)} is not the beginning of a term")
    return Begin.decode(entry)


def _begin_of(number: int) -> Steps[Begin | None]:
    """Return the BEGIN of a term; None if there is a FENCE or nothing. Raises InvalidObject, NewerObject."""
    position = Position(number, 0)
    data = yield from _get(entry_key(position))
    entry = None if data is None else decode_entry(data, position)
    return None if entry is None or entry.kind == EntryKind.FENCE else _decode_begin(entry)


def _term(number: int) -> Steps[Term]:
    data = yield from _get(term_key(number))
    if data is None:
        raise InvalidObject(f"{term_key(number)} is missing, and the term has begun")
    return Term.decode(data, number)


def _check_newest(term: Term) -> Steps[None]:
    """Raise Deposed if a term after `term` is claimed."""
    number = yield from _highest_number(after=term.number)
    if number:
        raise Deposed(f"term {number} was claimed before term {term.number} had begun")


def _sentence_of_loss(snapshots: list[str]) -> str:
    return f"no term has begun, and there is {snapshots[0]}: the store has lost objects below {ENTRIES}"


def _who_ended(number: int, entry: Entry) -> str:
    if entry.kind != EntryKind.FENCE:
        return f"term {number} was begun by another server"
    return f"term {number} was ended by member {Fence.decode(entry).member} before it had begun"


def _highest_number(after: int) -> Steps[int]:
    """Return the highest number of a claimed term, if it is higher than `after`, else 0."""
    keys = yield from _repeated(ListKeys(TERMS, term_key(after)))
    return max((number for key in keys if (number := parse_term(key)) is not None), default=0)


def _newest_manifest(number: int) -> Steps[int]:
    """Return the highest slot of the term that has a manifest, -1 if none has."""
    keys = yield from _repeated(ListKeys(manifests_prefix(number)))
    return max((position.slot for key in keys if (position := parse_position(key)) is not None), default=-1)


def _get(key: str) -> Steps[bytes | None]:
    data: bytes | None = yield from _repeated(Get(key))
    return data


def _put(key: str, data: bytes) -> Steps[bytes]:
    """Store an object unless there is one of this key. Return what is stored there then: `data`, or another's."""
    while True:
        if (yield from _try_put(key, data)):
            return data
        there = yield from _get(key)
        if there is not None:
            return there


def _try_put(key: str, data: bytes) -> Steps[bool]:
    """Make one attempt to store an object. Return whether it is known to be stored by it."""
    try:
        stored: bool = yield PutNew(key, data)
    except StoreUnavailable:
        return False  # which is not known: the object that is there says it
    return stored


def _repeated(call: Get | ListKeys) -> Steps[Any]:
    while True:
        try:
            return (yield call)
        except StoreUnavailable:
            continue
