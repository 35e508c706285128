"""Verify what a store has: every manifest, chunk and entry that counts, and what the damage costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tfmq.replication.ahead import call_ahead
from tfmq.replication.chain import IN_FLIGHT_MAX, READ_AHEAD, Chain, read_chain, read_manifest
from tfmq.replication.entries import (
    CHUNKS,
    MANIFESTS,
    EntryKind,
    Position,
    decode_entry,
    entries_prefix,
    entry_key,
    manifest_key,
    parse_position,
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
        if not chain.manifests:
            raise NoReplica(f"the replica at {self._store.name} has no snapshot yet")
        self._verify_manifests(chain)
        self._verify_history(chain)
        for key, what in self._faults.items():
            if len(self._result.findings) < FINDINGS_MAX:
                self._result.findings.append(Finding(key, what, tuple(self._lost[key])))
            else:
                self._result.findings_left_out += 1
        return self._result

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
    count = end - first
    what = "is missing" if count == 1 else f"and the {count - 1:,} after it are missing"
    return _StoredEntry(Position(term, first), 0, False, what)
