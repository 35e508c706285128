"""The history in a store: which terms have begun, how far each counts, and the entries that count.

A term that has begun names the last entry before it that counts. Followed from the newest term downwards, these names
are the chain: what is stored beside it (entries above a fence, terms that never began, manifests of such entries) does
not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from itertools import count
from typing import Final, NamedTuple

from tfmq.replication.ahead import call_ahead
from tfmq.replication.entries import (
    IDENTITY_KEY,
    MANIFESTS,
    TERMS,
    Begin,
    Entry,
    EntryKind,
    Position,
    decode_entry,
    entries_prefix,
    entry_key,
    manifest_key,
    parse_position,
    parse_term,
)
from tfmq.replication.errors import InvalidObject, NoReplica
from tfmq.replication.manifest import Manifest, decode_manifest
from tfmq.replication.store import Store

IN_FLIGHT_MAX: Final = 64
"""Maximum entries that a primary has under way."""
READ_AHEAD: Final = 4
"""How many entries are requested before they are used."""


class Link(NamedTuple):
    """A term that has begun. `begin`: the content of its slot 0; None if that was swept.

    `end`: its last slot that counts; None in the newest term, whose entries go on up to a fence or a free slot.
    """

    term: int
    begin: Begin | None
    end: int | None


class Chain(NamedTuple):
    """The terms that have begun, the newest first, down to the oldest that is still there.

    `manifests`: positions of the manifests of entries that count, the oldest first.
    """

    links: tuple[Link, ...]
    manifests: tuple[Position, ...]

    def counts(self, position: Position) -> bool:
        """Return whether an entry at `position` counts. In the newest term this also depends on the entries."""
        return any(link.term == position.term and _is_up_to(position.slot, link.end) for link in self.links)


def _is_up_to(slot: int, end: int | None) -> bool:
    return end is None or slot <= end


def read_chain(store: Store) -> Chain:
    """Read which terms have begun. Raises InvalidObject if none has, or if the chain is broken."""
    stored = [position for each in store.list(MANIFESTS) if (position := parse_position(each.key)) is not None]
    numbers = {number for each in store.list(TERMS) if (number := parse_term(each.key)) is not None}
    with_manifest = {position.term for position in stored}
    links: list[Link] = []
    for number in sorted(numbers | with_manifest, reverse=True):
        begin = _read_begin(store, number)
        # With a manifest, the term has begun: its slot 0 was swept, and a fence may have been put there since.
        if begin is not None or number in with_manifest:
            links = list(_follow_parents(store, number, begin))
            break
    if not links:
        if store.get(IDENTITY_KEY) is None:
            raise NoReplica(f"there is no replica at {store.name}")
        raise NoReplica(f"no primary has begun the replica at {store.name} yet")
    chain = Chain(tuple(links), ())
    manifests = [position for position in sorted(stored) if chain.counts(position)]
    # The manifest of a BASE is stored before the BASE, which may never be stored.
    if manifests and manifests[-1].term == links[0].term and not _is_entry(store, manifests[-1]):
        manifests.pop()
    return chain._replace(manifests=tuple(manifests))


def _is_entry(store: Store, position: Position) -> bool:
    """Return whether something other than a fence is stored at `position`."""
    data = store.get(entry_key(position))
    try:
        return data is not None and decode_entry(data, position).kind != EntryKind.FENCE
    except InvalidObject:
        return True  # a manifest does not need what is damaged at or below its position


def _follow_parents(store: Store, term: int, begin: Begin | None) -> Iterator[Link]:
    end: int | None = None
    while True:
        yield Link(term, begin, end)
        # Sweeping removes entries in ascending order: below a slot 0 that was swept nothing is there.
        if begin is None or begin.parent is None:
            return
        term, end = begin.parent
        begin = _read_begin(store, term)


def _read_begin(store: Store, term: int) -> Begin | None:
    """Return the BEGIN in slot 0; None if there is none."""
    position = Position(term, 0)
    data = store.get(entry_key(position))
    if data is None:
        return None
    entry = decode_entry(data, position)
    return Begin.decode(entry) if entry.kind == EntryKind.BEGIN else None


def read_manifest(store: Store, position: Position) -> Manifest:
    """Raises InvalidObject, also if it is missing."""
    data = store.get(manifest_key(position))
    if data is None:
        raise InvalidObject(f"{manifest_key(position)} is missing")
    return decode_manifest(data, position)


def newest_manifest(store: Store) -> Position | None:
    """Return the highest position that has a manifest, whether it counts or not."""
    newest = None
    for each in store.list(MANIFESTS):
        newest = parse_position(each.key) or newest
    return newest


def read_entries(
    store: Store, chain: Chain, after: Position, until: Position | None, executor: Executor
) -> Iterator[Entry]:
    """Yield the entries that count after `after` up to `until`; if that is None, up to the newest.

    Raises InvalidObject for an entry that is missing or cannot be decoded.
    """

    def get(position: Position) -> bytes | None:
        return store.get(entry_key(position))

    for position, data in call_ahead(executor, get, _positions(chain, after, until), READ_AHEAD):
        # The newest term ends at a free slot or a fence, but not below a manifest, which shows that all entries up to
        # its own were stored.
        is_open = until is None and position.term == chain.links[0].term and position > chain.manifests[-1]
        if data is None:
            if is_open:
                return
            raise InvalidObject(f"{entry_key(position)} is missing")
        entry = decode_entry(data, position)
        if entry.kind == EntryKind.FENCE:
            if is_open:
                return
            raise InvalidObject(f"{entry_key(position)} is a fence, although later entries count")
        yield entry


def find_newest_entry(store: Store, chain: Chain) -> Entry | None:
    """Return the newest entry that counts, of those after the newest manifest; None if there is none."""
    newest, term = chain.manifests[-1], chain.links[0].term
    first = newest.slot + 1 if newest.term == term else 0
    slots: list[int] = []
    for each in store.list(entries_prefix(term), after=entry_key(Position(term, first - 1)) if first else ""):
        position = parse_position(each.key)
        if position is not None:
            if position.slot != first + len(slots):
                break
            slots.append(position.slot)
    found = None
    # Above a fence are at most the entries that its owner had under way.
    for slot in slots[-IN_FLIGHT_MAX:]:
        data = store.get(entry_key(Position(term, slot)))
        entry = None if data is None else decode_entry(data, Position(term, slot))
        if entry is None or entry.kind == EntryKind.FENCE:
            break
        found = entry
    return found


def _positions(chain: Chain, after: Position, until: Position | None) -> Iterator[Position]:
    """Yield the positions that follow `after`, up to `until`; without an end if that is None."""
    for link in reversed(chain.links):
        if link.term < after.term or (until is not None and link.term > until.term):
            continue
        first = after.slot + 1 if link.term == after.term else 0
        last = until.slot if until is not None and link.term == until.term else link.end
        for slot in count(first) if last is None else range(first, last + 1):
            yield Position(link.term, slot)
