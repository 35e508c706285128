"""Offset storage in ZooKeeper, for `offsets="zookeeper://HOST:PORT/ROOT"`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tfmq.errors import Busy, Damaged
from tfmq.offsets.storage import NO_OFFSET, PartitionName, StoredOffset, fenced, under
from tfmq.zookeeper.connection import ZooKeeperConnection, result_or_none, wait_results
from tfmq.zookeeper.paths import BROKER_NUMBER, NodePaths, zookeeper_address

if TYPE_CHECKING:
    from kazoo.client import KazooClient


ATTEMPTS_MAX: Final = 10
"""Maximum attempts to read or write the nodes of a partition while other members change them."""


class NodeContents(NamedTuple):
    """The decoded contents of the two nodes of a partition, and the version of each node (None: no such node)."""

    stored: StoredOffset | None
    offset_version: int | None
    row_version: int | None


class ZooKeeperOffsets:
    """Offset storage below ROOT/consumers/GROUP/offsets.

    Every write requires that the nodes still have the versions that were read. So a write that arrives late, after a
    disconnect or from a process that was stopped for a while, cannot change what another member has claimed. Every call
    raises StoreFailed if ZooKeeper does not respond, Damaged if a node has unexpected content.
    """

    def __init__(self, address: str) -> None:
        """Create the storage without connecting. Raises BadRequest if `address` is invalid, NotSupported if kazoo is
        not installed."""
        self._connection = ZooKeeperConnection(zookeeper_address(address))
        self._layout = NodePaths(self._connection.address.root, BROKER_NUMBER)

    def read(self, group: str, partitions: Sequence[PartitionName]) -> dict[PartitionName, StoredOffset]:
        with self._connection.client() as client:
            found = self._read_nodes(client, group, partitions)
        return _stored_only({name: each.stored for name, each in found.items()})

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> dict[PartitionName, StoredOffset]:
        return self._update(group, dict.fromkeys(partitions, generation), {})

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        new = {name: under(generation, row) for name, row in offsets.items()}
        self._update(group, {name: row.generation for name, row in new.items()}, new)

    def close(self) -> None:
        """End the session; a later call raises Closed."""
        self._connection.close()

    def _update(
        self, group: str, generations: Mapping[PartitionName, int], new: Mapping[PartitionName, StoredOffset]
    ) -> dict[PartitionName, StoredOffset]:
        """Set the generations of the partitions, and the offsets in `new`; return the stored offsets. If a partition
        has a higher generation already, it is not changed; raise Fenced after all others are changed."""
        lost: dict[PartitionName, int] = {}
        kept: dict[PartitionName, StoredOffset] = {}
        left: Iterable[PartitionName] = generations
        with self._connection.client() as client:
            for _ in range(ATTEMPTS_MAX):
                found = self._read_nodes(client, group, left)
                writes = {}
                for name, each in found.items():
                    stored, generation = each.stored or StoredOffset(NO_OFFSET), generations[name]
                    kept[name] = new.get(name, stored)._replace(generation=generation)
                    if stored.generation > generation:
                        lost[name] = stored.generation
                    elif name in new or each.stored is None or stored.generation < generation:
                        writes[name] = (each, kept[name])
                left = self._write(client, group, writes)
                if not left:
                    break
            else:
                raise self._too_busy(group)
        if lost:
            raise fenced(str(self._connection.address), group, lost)
        return _stored_only(kept)

    def _too_busy(self, group: str) -> Busy:
        return Busy(f"{self._connection.address}: others change the offsets of group {group} all the time.")

    def _read_nodes(
        self, client: KazooClient, group: str, names: Iterable[PartitionName]
    ) -> dict[PartitionName, NodeContents]:
        # The offset node is read before and after its child node. If the offset node has not changed meanwhile, the two
        # contents belong together, because tfmq always writes both nodes in one transaction.
        found: dict[PartitionName, NodeContents] = {}
        left = list(names)
        synced = client.sync_async(self._layout.root or "/")
        for _ in range(ATTEMPTS_MAX):
            requests = []
            for name in left:
                offset, fields = self._layout.offset(group, name), self._layout.offset_fields(group, name)
                requests += [client.get_async(path) for path in (offset, fields, offset)]
            responses = wait_results(requests)
            for name, before, row, after in zip(left, *(responses[each::3] for each in range(3)), strict=True):
                if _change_id(before) == _change_id(after):
                    found[name] = _decode_nodes(self._layout.offset(group, name), before, row)
            left = [name for name in left if name not in found]
            if not left:
                break
        else:
            raise self._too_busy(group)
        wait_results([synced])
        return found

    def _write(
        self, client: KazooClient, group: str, writes: Mapping[PartitionName, tuple[NodeContents, StoredOffset]]
    ) -> list[PartitionName]:
        """Write the nodes of each partition, in one ZooKeeper transaction per partition. Return the partitions that
        were not written, because others have changed their nodes since they were read."""
        for name, (found, _) in writes.items():
            if found.offset_version is None:
                client.ensure_path(self._layout.offset(group, name).rpartition("/")[0])
        commits = []
        for name, (found, new) in writes.items():
            transaction = client.transaction()
            offset, row = self._layout.offset(group, name), self._layout.offset_fields(group, name)
            _add_write(transaction, offset, offset_data(new), found.offset_version)
            _add_write(transaction, row, row_data(new), found.row_version)
            commits.append(transaction.commit_async())
        responses = zip(writes, wait_results(commits), strict=True)
        return [name for name, response in responses if not _is_committed(response)]


def _stored_only(found: Mapping[PartitionName, StoredOffset | None]) -> dict[PartitionName, StoredOffset]:
    return {name: stored for name, stored in found.items() if stored is not None and stored.offset != NO_OFFSET}


def _add_write(transaction: Any, path: str, data: bytes, version: int | None) -> None:
    if version is None:
        transaction.create(path, data)
    else:
        transaction.set_data(path, data, version)


def _change_id(response: Any) -> int | None:
    """Return the id of the ZooKeeper transaction that last changed the node; None if the node does not exist. If the
    request failed otherwise, raise its exception."""
    node = result_or_none(response)
    return None if node is None else int(node[1].mzxid)


def _decode_nodes(path: str, offset: Any, row: Any) -> NodeContents:
    """Decode the responses for a partition's nodes. Raises Damaged for bad content or the error of a failed request."""
    shown, kept = result_or_none(offset), result_or_none(row)
    stored = stored_offset(path, None if shown is None else shown[0], None if kept is None else kept[0])
    return NodeContents(stored, *(None if node is None else node[1].version for node in (shown, kept)))


def _is_committed(response: Any) -> bool:
    """Return False if the transaction failed because another member had changed the nodes; raise any other failure."""
    from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

    if isinstance(response, BaseException):
        raise response
    errors = [each for each in response if isinstance(each, BaseException)]
    raced = any(isinstance(each, BadVersionError | NodeExistsError | NoNodeError) for each in errors)
    if errors and not raced:
        raise errors[0]
    return not errors


# Content of the nodes. The offset node has `0-OFFSET`, in the layout of MetaMorphosis (an older message broker). Its
# child node `tfmq` has all fields of the stored offset. Both nodes are written in one transaction.

BYTES_MAX: Final = 4096
"""Maximum size of a node's content: more than the fields need, so a larger node was not written by tfmq."""


def offset_data(stored: StoredOffset) -> bytes:
    return b"" if stored.offset == NO_OFFSET else b"0-%d" % stored.offset


def row_data(stored: StoredOffset) -> bytes:
    return json.dumps(stored._asdict()).encode()


def stored_offset(path: str, offset: bytes | None, row: bytes | None) -> StoredOffset | None:
    """Decode the two nodes of a partition; return None if the offset node does not exist. If their offsets differ,
    another tool has changed the offset node, and the offset in this node counts. Raises Damaged, naming `path`."""
    if offset is None:
        return None
    kept = StoredOffset(NO_OFFSET) if row is None else _row(path, row)
    shown = _offset(path, offset)
    if shown == kept.offset:
        return kept
    return StoredOffset(shown, 0, kept.incarnation, -1, kept.generation)


def _offset(path: str, data: bytes) -> int:
    """Decode the offset node: MESSAGE_ID-OFFSET as MetaMorphosis writes it, or an offset alone."""
    text = data.decode("ascii", "replace").rpartition("-")[2] if len(data) <= BYTES_MAX else "?"
    if not data:
        return NO_OFFSET
    if not text.isdecimal():
        raise Damaged(f"The node {path} holds no offset but {data[:40]!r}; it looks like 0-12345.")
    return int(text)


def _row(path: str, data: bytes) -> StoredOffset:
    try:
        found = json.loads(data) if len(data) <= BYTES_MAX else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(found.get(field)) is int for field in StoredOffset._fields):
        raise Damaged(f"The node {path}/tfmq holds no offset but {data[:40]!r}; delete it to begin anew there.")
    return StoredOffset(*(found[field] for field in StoredOffset._fields))
