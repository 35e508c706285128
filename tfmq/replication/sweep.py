"""Sweep: delete what no restore within the history needs any more.

Kept are the newest manifest that was stored before the history begins, all later ones, the entries from its own on, and
the chunks that these manifests refer to. The fence that ended a term is kept for ever: a primary that slept for longer
than the history would store an entry in its place, and count it (docs/decisions/replication-terms.md). A chunk without
a reference is deleted when it is older than the grace period, because a snapshot that is under way may refer to it
(`tfmq.replication.snapshot`). All ages are by the clock of the store. Any number of sweeps may run at the same time,
and a sweep may be interrupted anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice, takewhile
from typing import Final, NamedTuple

from tfmq.replication.chain import Chain, read_chain
from tfmq.replication.entries import (
    CHUNKS,
    ENTRIES,
    HANDOVERS,
    MANIFESTS,
    SWEEPS,
    TERMS,
    Position,
    entries_prefix,
    entry_key,
    manifest_key,
    parse_handover,
    parse_position,
    parse_term,
)
from tfmq.replication.errors import InvalidObject, NewerObject, StoreUnavailable
from tfmq.replication.manifest import decode_manifest, parse_chunk_name
from tfmq.replication.snapshot import grace_seconds
from tfmq.replication.store import DELETED_MAX, Store

LEFT_BEHIND_SECONDS: Final = 3600
"""An older object of a sweep belongs to one that was interrupted."""


class Swept(NamedTuple):
    """What a sweep has deleted. `oldest`: position of the oldest manifest that restores may use; None without one.

    `damage`: the sentence about a manifest that cannot be read. As long as it is kept, no chunks are deleted.
    """

    oldest: Position | None = None
    manifests: int = 0
    entries: int = 0
    chunks: int = 0
    chunk_bytes: int = 0
    damage: str = ""


def sweep(store: Store, *, history_seconds: float, random_bytes: Callable[[int], bytes]) -> Swept:
    """Delete what is older than the history. Raises NoReplica, InvalidObject, StoreUnavailable, StoreRefused.

    NewerObject: a newer version has stored a manifest, so that only that version knows what it needs.
    """
    # The time is read first: everything that is stored from here on counts as younger than it is.
    key, now = begin_sweep(store, random_bytes)
    try:
        found = _sweep_before(store, now, history_seconds)
    except InvalidObject:  # before anything was deleted
        store.delete(key)
        raise
    store.delete(key)
    return found


def _sweep_before(store: Store, now: float, history_seconds: float) -> Swept:
    stored = {
        position: each.modified for each in store.list(MANIFESTS) if (position := parse_position(each.key)) is not None
    }
    chain = read_chain(store)
    references: set[tuple[bytes, bytes]] = set()
    oldest: Position | None = None
    damage = ""
    for position in sorted(stored, reverse=True):
        # From the newest downwards, up to the first that is old enough: all below it are not needed.
        try:
            found = _read_references(store, position)
        except NewerObject:
            raise
        except InvalidObject as error:
            damage = damage or str(error)
            continue
        if found is None:
            continue  # another sweep has deleted it
        references |= found
        if stored[position] <= now - history_seconds and chain.counts(position):
            oldest = position
            break
    if oldest is None:
        entries = manifests = 0
    else:
        manifests = _delete_manifests(store, [position for position in stored if position < oldest])
        entries = _delete_entries(store, chain, oldest)
        _delete_terms(store, oldest.term)
    chunks, chunk_bytes = (0, 0) if damage else _delete_chunks(store, references, now - grace_seconds(history_seconds))
    return Swept(oldest, manifests, entries, chunks, chunk_bytes, damage)


def begin_sweep(store: Store, random_bytes: Callable[[int], bytes]) -> tuple[str, float]:
    """Store an object, and return its key and the time by the clock of the store, in seconds since 1970.

    The object is there until the sweep has ended: entries whose manifest is gone are no damage as long as there is one.
    """
    key = f"{SWEEPS}{random_bytes(8).hex()}"
    store.put_new(key, b"\0")
    times = {each.key: each.modified for each in store.list(SWEEPS)}
    now = times.get(key)
    if now is None:
        raise StoreUnavailable(f"{store.name} does not list {key}, which was stored")
    for each, modified in times.items():
        if modified < now - LEFT_BEHIND_SECONDS:
            store.delete(each)
    return key, now


def _delete(store: Store, keys: Iterable[str]) -> int:
    """Delete the objects, many with a call. Return how many."""
    count, left = 0, iter(keys)
    while some := list(islice(left, DELETED_MAX)):
        store.delete(*some)
        count += len(some)
    return count


def _read_references(store: Store, position: Position) -> set[tuple[bytes, bytes]] | None:
    data = store.get(manifest_key(position))
    if data is None:
        return None
    return {(chunk.digest, chunk.nonce) for chunk in decode_manifest(data, position).chunks()}


def _delete_manifests(store: Store, positions: list[Position]) -> int:
    return _delete(store, map(manifest_key, sorted(positions)))


def _delete_entries(store: Store, chain: Chain, oldest: Position) -> int:
    """Delete the entries below `oldest`, one term after the other: below a BEGIN that was swept nothing is there."""
    fences = {Position(link.term, link.end + 1) for link in chain.links if link.end is not None}
    # Before the oldest term of the chain, only fences are left.
    stored = (parse_position(each.key) for each in store.list(ENTRIES, entries_prefix(chain.links[-1].term)))
    below = takewhile(lambda position: position < oldest, (each for each in stored if each is not None))
    terms = groupby((each for each in below if each not in fences), key=lambda position: position.term)
    return sum(_delete(store, map(entry_key, positions)) for _, positions in terms)


def _delete_terms(store: Store, oldest: int) -> None:
    for prefix, parse in ((TERMS, parse_term), (HANDOVERS, parse_handover)):
        stored = ((each.key, parse(each.key)) for each in store.list(prefix))
        _delete(store, (key for key, number in stored if number is not None and number < oldest))


def _delete_chunks(store: Store, references: set[tuple[bytes, bytes]], before: float) -> tuple[int, int]:
    size = 0

    def without_reference() -> Iterator[str]:
        nonlocal size
        for each in store.list(CHUNKS):
            name = parse_chunk_name(each.key)
            if name is not None and name not in references and each.modified < before:
                size += each.size_bytes
                yield each.key

    return _delete(store, without_reference()), size
