"""Verify what a store has, all that counts and what servers need, and what the damage costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from tfmq.replication.ahead import call_ahead
from tfmq.replication.chain import IN_FLIGHT_MAX, READ_AHEAD, Chain, read_chain, read_manifest
from tfmq.replication.entries import (
    CHUNKS,
    ENTRIES,
    HANDOVERS,
    IDENTITY_KEY,
    MANIFESTS,
    SWEEPS,
    TERMS,
    Begin,
    Entry,
    EntryKind,
    HandOver,
    Identity,
    Position,
    Term,
    decode_entry,
    entries_prefix,
    entry_key,
    handover_key,
    manifest_key,
    parse_handover,
    parse_position,
    parse_term,
    term_key,
)
from tfmq.replication.errors import InvalidObject, NewerObject, NoReplica
from tfmq.replication.manifest import Chunk, Manifest
from tfmq.replication.materialize import DOWNLOADS
from tfmq.replication.operations import decode_operations
from tfmq.replication.snapshot import Progress, ignore_progress
from tfmq.replication.store import Store

FINDINGS_MAX: Final = 10_000
"""Further findings are only counted."""


class Range(NamedTuple):
    """Times (ms since 1970) that cannot be restored. `to_ms` None: all from `from_ms` on, and the newest state."""

    from_ms: int
    to_ms: int | None


class Finding(NamedTuple):
    """A damaged or missing object. `lost`: the times that cannot be restored because of it."""

    key: str
    what: str
    lost: tuple[Range, ...]


@dataclass
class Verification:
    """What was verified, and what is damaged. `first_ms` and `last_ms`: the history, by the times of its entries."""

    manifests: int = 0
    chunks: int = 0
    entries: int = 0
    bytes: int = 0
    first_ms: int = 0
    last_ms: int = 0
    findings: list[Finding] = field(default_factory=list)
    findings_left_out: int = 0

    @property
    def is_damaged(self) -> bool:
        return bool(self.findings)


def count_bytes(store: Store) -> int:
    """Return about how many bytes `verify` reads."""
    return sum(each.size_bytes for each in store.list(""))


def verify(store: Store, executor: Executor, progress: Progress = ignore_progress) -> Verification:
    """Read everything that counts. Raises NoReplica, NewerObject, StoreUnavailable, StoreRefused."""
    while True:
        before = _oldest_manifest_key(store)
        result = _Verifier(store, executor, progress).verify()
        # What a sweep has deleted meanwhile is not damage.
        if not result.is_damaged or _oldest_manifest_key(store) == before:
            return result


def _oldest_manifest_key(store: Store) -> str:
    """Return the key of the oldest manifest: it changes with each sweep that deletes any."""
    return next((each.key for each in store.list(MANIFESTS)), "")


class _StoredEntry(NamedTuple):
    """An entry of the history. `fault`: what is wrong with it; "" for a sound one."""

    position: Position
    time_ms: int
    is_base: bool
    fault: str


class _Verifier:
    def __init__(self, store: Store, executor: Executor, progress: Progress) -> None:
        self._store = store
        self._executor = executor
        self._progress = progress
        self._result = Verification()
        self._faults: dict[str, str] = {}
        """What is wrong, by the key of the object."""
        self._manifest_times: dict[Position, int] = {}
        """Of the manifests that can be read."""
        self._manifest_faults: dict[Position, set[str]] = {}
        """Keys of the objects because of which a manifest cannot be used."""
        self._lost: defaultdict[str, list[Range]] = defaultdict(list)

    def verify(self) -> Verification:
        try:
            chain = read_chain(self._store)
        except (NoReplica, NewerObject):
            raise
        except InvalidObject as error:
            self._result.findings.append(Finding("", str(error), (Range(0, None),)))
            return self._result
        self._verify_names(chain)
        self._verify_fences(chain)
        if not chain.manifests:
            base = self._first_base(chain)
            if base is None:
                raise NoReplica(f"the replica at {self._store.name} has no snapshot yet")
            self._faults[manifest_key(base)] = "is missing"
            self._note_lost({manifest_key(base)}, Range(0, None))
            self._report()
            return self._result
        self._verify_manifests(chain)
        self._verify_history(chain)
        self._report()
        return self._result

    def _report(self) -> None:
        for key, what in self._faults.items():
            if len(self._result.findings) < FINDINGS_MAX:
                self._result.findings.append(Finding(key, what, tuple(self._lost[key])))
            else:
                self._result.findings_left_out += 1

    def _verify_names(self, chain: Chain) -> None:
        """Read the objects that only servers need: they say whose replica it is, and who is primary."""
        self._try_decode(IDENTITY_KEY, self._store.get(IDENTITY_KEY), Identity.decode)
        # What is below the oldest snapshot, sweeps delete. Of the others each number was claimed.
        oldest = expected = chain.manifests[0].term if chain.manifests else chain.links[-1].term
        beyond = list(self._terms_beyond(chain.links[0].term))
        claimed = {number for each in self._store.list(TERMS) if (number := parse_term(each.key)) is not None}
        for number in sorted(claimed.union(link.term for link in chain.links)):
            if number >= oldest:
                if number > expected:
                    self._faults[term_key(expected)] = _sentence_of_missing(number - expected)
                expected = number + 1
                data = self._store.get(term_key(number))
                self._try_decode(term_key(number), data, partial(Term.decode, number=number))
        for begin in beyond:
            key = term_key(begin.position.term)
            if begin.position.term not in claimed:
                self._faults[key] = "is missing, although the term has entries"
                self._note_lost({key}, Range(begin.time_ms, None))
        asked = [number for each in self._store.list(HANDOVERS) if (number := parse_handover(each.key)) is not None]
        for number in asked:
            # One that a sweep has just deleted is no damage.
            if number >= oldest and (data := self._store.get(handover_key(number))) is not None:
                self._try_decode(handover_key(number), data, partial(HandOver.decode, term=number))

    def _verify_fences(self, chain: Chain) -> None:
        """Look for the fence of each term that has ended. Nothing can be lost by its damage, as it keeps its slot."""
        for link in chain.links:
            if link.end is None:
                continue
            position = Position(link.term, link.end + 1)
            key, data = entry_key(position), self._get_entry(position)
            if data is None:
                self._faults[key] = (
                    "is missing: a server that was primary in this term could store an entry there and acknowledge it,"
                    " although no other server reads it"
                )
                continue
            entry = self._try_entry(position)
            if entry is not None and entry.kind != EntryKind.FENCE:
                self._faults[key] = "is an entry where a fence has ended the term: no server reads it"
            else:
                self._try_decode(key, data, partial(decode_entry, position=position))

    def _try_decode(self, key: str, data: bytes | None, decode: Callable[[bytes], object]) -> None:
        if data is None:
            self._faults[key] = "is missing"
            return
        self._progress(len(data))
        self._result.bytes += len(data)
        try:
            decode(data)
        except NewerObject:
            raise
        except InvalidObject as error:
            self._faults[key] = str(error).removeprefix(f"{key} ")

    def _terms_beyond(self, newest: int) -> Iterator[_StoredEntry]:
        """Yield the first entry of each term above the newest that has begun: they must have been claimed."""
        while True:
            after = entries_prefix(newest + 1).rstrip("/")
            keys = (each.key for each in self._store.list(ENTRIES, after))
            position = next((found for key in keys if (found := parse_position(key)) is not None), None)
            if position is None:
                return
            entry = self._try_entry(position)
            yield _StoredEntry(position, 0 if entry is None else entry.time_ms, False, "")
            newest = position.term

    def _first_base(self, chain: Chain) -> Position | None:
        """Return the first BASE, if the chain has one. Its manifest was stored before it."""
        for link in reversed(chain.links):
            for each in self._store.list(entries_prefix(link.term)):
                entry = self._try_entry(parse_position(each.key))
                if entry is not None and entry.kind == EntryKind.BASE and chain.counts(entry.position):
                    return entry.position
        return None

    def _try_entry(self, position: Position | None) -> Entry | None:
        data = None if position is None else self._get_entry(position)
        try:
            return None if data is None or position is None else decode_entry(data, position)
        except NewerObject:
            raise
        except InvalidObject:
            return None

    def _lost_begin(self, chain: Chain) -> Entry | None:
        """Return the entry with which the history begins, if the manifest of that is missing.

        A sweep deletes the manifests first, then all entries before the oldest one that it keeps. So if no sweep is
        under way or was interrupted, and there are entries right before the oldest manifest, then one is missing;
        except in the first term, whose first manifest is that of its first BASE.
        """
        if any(True for _ in self._store.list(SWEEPS)):
            return None
        first = chain.manifests[0]
        positions = self._positions_before(chain, first)
        for index, position in enumerate(positions):
            entry = self._try_entry(position)
            is_first_of_all = entry is not None and entry.kind == EntryKind.BEGIN and Begin.decode(entry).parent is None
            if entry is not None and (entry.kind == EntryKind.BASE or (index == 0 and not is_first_of_all)):
                return entry
        return None

    def _positions_before(self, chain: Chain, first: Position) -> list[Position]:
        """Return the positions without a gap that end before `first` and have entries, the lowest first.

        What is below a gap was stored by a server that slept, in the place of what a sweep had deleted.
        """
        found: list[Position] = []
        below = first.slot
        for link in chain.links:
            if link.term > first.term:
                continue
            if link.term < first.term:
                assert link.end is not None  # only the newest has none
                below = link.end + 1
            stored = (parse_position(each.key) for each in self._store.list(entries_prefix(link.term)))
            slots = {each.slot for each in stored if each is not None and each.slot < below}
            while below > 0 and below - 1 in slots:
                below -= 1
                found.append(Position(link.term, below))
            if below > 0:
                break
        return found[::-1]

    def _verify_manifests(self, chain: Chain) -> None:
        needed: set[Chunk] = set()
        for position in chain.manifests:
            needed.update(chunk for manifest in self._read_manifest(position) for chunk in manifest.chunks())
        self._result.manifests, self._result.chunks = len(chain.manifests), len(needed)
        bad = set(self._bad_chunks(needed))
        for position in list(self._manifest_times) if bad else ():
            for manifest in self._read_manifest(position):
                if keys := {chunk.key for chunk in bad.intersection(manifest.chunks())}:
                    self._manifest_faults[position] = keys

    def _read_manifest(self, position: Position) -> Iterator[Manifest]:
        """Yield the manifest, unless it is damaged."""
        try:
            manifest = read_manifest(self._store, position)
        except NewerObject:
            raise
        except InvalidObject as error:
            key = manifest_key(position)
            self._faults[key] = str(error).removeprefix(f"{key} ")
            self._manifest_faults[position] = {key}
            return
        self._manifest_times[position] = manifest.time_ms
        yield manifest

    def _bad_chunks(self, needed: set[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks that are missing or damaged. Each is read once."""
        sizes = {each.key: each.size_bytes for each in self._store.list(CHUNKS)}
        there: list[Chunk] = []
        for chunk in sorted(needed):
            size = sizes.get(chunk.key)
            if size == chunk.size:
                there.append(chunk)
            else:
                self._faults[chunk.key] = (
                    "is missing" if size is None else f"has {size:,} bytes instead of {chunk.size:,}"
                )
                yield chunk
        for chunk, fault in call_ahead(self._executor, self._chunk_fault, there, DOWNLOADS):
            self._progress(chunk.size)
            self._result.bytes += chunk.size
            if fault:
                self._faults[chunk.key] = fault
                yield chunk

    def _chunk_fault(self, chunk: Chunk) -> str:
        data = self._store.get(chunk.key)
        if data is None:
            return "is missing"
        try:
            chunk.check(data)
        except InvalidObject as error:
            return str(error).removeprefix(f"{chunk.key} ")
        return ""

    def _verify_history(self, chain: Chain) -> None:
        """Read the entries in order, and note from where to where the state cannot be restored, and because of what."""
        first = chain.manifests[0]
        causes = set(self._manifest_faults.get(first, ()))
        since_ms = last_ms = self._manifest_times.get(first, 0)
        lost = self._lost_begin(chain)
        if lost is not None:
            self._faults[manifest_key(lost.position)] = "is missing, although entries from it on are kept"
            causes.add(manifest_key(lost.position))
            since_ms = last_ms = lost.time_ms
            first = lost.position
        self._result.first_ms = last_ms
        for entry in self._entries(chain, first):
            key = entry_key(entry.position)
            is_sound = entry.position in self._manifest_times and entry.position not in self._manifest_faults
            if entry.fault:
                self._faults[key] = entry.fault
            added = {key} if entry.fault else set()
            if entry.is_base and not is_sound:
                added |= self._manifest_faults.get(entry.position, {key})
                if entry.position not in self._manifest_times and entry.position not in self._manifest_faults:
                    self._faults[key] = f"continues from {manifest_key(entry.position)}, which is missing"
            if added and not causes:
                since_ms = last_ms
            causes |= added
            last_ms = max(last_ms, entry.time_ms)
            self._result.first_ms = self._result.first_ms or last_ms
            if is_sound and causes:
                self._note_lost(causes, Range(since_ms, last_ms))
                causes = set()
        self._note_lost(causes, Range(since_ms, None))
        self._result.last_ms = last_ms

    def _note_lost(self, causes: set[str], lost: Range) -> None:
        for key in causes:
            self._lost[key].append(lost)

    def _entries(self, chain: Chain, after: Position) -> Iterator[_StoredEntry]:
        for link in reversed(chain.links):
            if link.term < after.term:
                continue
            expected = after.slot + 1 if link.term == after.term else 0
            stored = (parse_position(each.key) for each in self._store.list(entries_prefix(link.term)))
            slots = [each.slot for each in stored if each is not None and each.slot >= expected]
            slots = [slot for slot in slots if link.end is None or slot <= link.end]
            # A claimant may have put a fence far ahead of the slots that are under way.
            while link.end is None and slots and self._is_fence(Position(link.term, slots[-1])):
                slots.pop()
            last = link.end if link.end is not None else max(slots, default=expected - 1)
            positions = [Position(link.term, slot) for slot in slots]
            for position, data in call_ahead(self._executor, self._get_entry, positions, READ_AHEAD):
                if position.slot > expected:
                    is_above_manifests = Position(link.term, expected) > chain.manifests[-1]
                    # Entries that are under way at once may be stored in any order.
                    if link.end is None and is_above_manifests and last - expected < IN_FLIGHT_MAX:
                        return
                    yield _missing(link.term, expected, position.slot)
                expected = position.slot + 1
                entry = self._check_entry(position, data)
                if entry is None and link.end is None and position > chain.manifests[-1]:
                    return
                yield entry or _StoredEntry(position, 0, False, "is a fence, although later entries count")
            if expected <= last:
                yield _missing(link.term, expected, last + 1)

    def _is_fence(self, position: Position) -> bool:
        data = self._get_entry(position)
        try:
            return data is not None and decode_entry(data, position).kind == EntryKind.FENCE
        except InvalidObject:
            return False

    def _get_entry(self, position: Position) -> bytes | None:
        return self._store.get(entry_key(position))

    def _check_entry(self, position: Position, data: bytes | None) -> _StoredEntry | None:
        """Return None for a fence."""
        if data is None:
            return _StoredEntry(position, 0, False, "is missing")
        self._progress(len(data))
        self._result.bytes += len(data)
        self._result.entries += 1
        try:
            entry = decode_entry(data, position)
            if entry.kind == EntryKind.FENCE:
                return None
            if entry.kind == EntryKind.OPERATIONS:
                count = sum(1 for _ in decode_operations(entry.body))
                if count != entry.operation_count:
                    raise InvalidObject(f"has {count:,} operations instead of {entry.operation_count:,}")
        except NewerObject:
            raise
        except InvalidObject as error:
            return _StoredEntry(position, 0, False, str(error).removeprefix(f"{entry_key(position)} "))
        return _StoredEntry(position, entry.time_ms, entry.kind == EntryKind.BASE, "")


def _missing(term: int, first: int, end: int) -> _StoredEntry:
    return _StoredEntry(Position(term, first), 0, False, _sentence_of_missing(end - first))


def _sentence_of_missing(count: int) -> str:
    return "is missing" if count == 1 else f"and the {count - 1:,} after it are missing"
