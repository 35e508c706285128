"""Offsets in ZooKeeper, in the layout of MetaMorphosis: `offsets="zookeeper://HOST:PORT/ROOT"`.

Every change names the versions of the nodes that it has looked at, so a member whose change arrives late, over a cut or
a stop of its process, changes nothing that another one has claimed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tfmq.errors import Busy, Damaged
from tfmq.offsets.storage import NO_OFFSET, PartitionName, StoredOffset, fenced, under
from tfmq.zookeeper.connection import Connection, results
from tfmq.zookeeper.paths import BROKER, Layout, zookeeper_address

if TYPE_CHECKING:
    from kazoo.client import KazooClient


LOOKS: Final = 10
"""So often a partition is looked at again whose nodes others change in the same moment."""


class Found(NamedTuple):
    """What is in the nodes of a partition now; versions None: no such node."""

    stored: StoredOffset | None
    offset_version: int | None
    row_version: int | None


class ZooKeeperOffsets:
    """Offsets below ROOT/consumers/GROUP/offsets. Every call raises StoreFailed where ZooKeeper does not answer,
    Damaged where a node holds something else.
    """

    def __init__(self, address: str) -> None:
        """Touches no network. Raises BadRequest for what is no address, NotSupported without kazoo."""
        self._connection = Connection(zookeeper_address(address))
        self._layout = Layout(self._connection.address.root, BROKER)

    def read(self, group: str, partitions: Sequence[PartitionName]) -> dict[PartitionName, StoredOffset]:
        """As `OffsetStorage.read`."""
        with self._connection.client() as client:
            found = self._find(client, group, partitions)
        return _kept({name: each.stored for name, each in found.items()})

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> dict[PartitionName, StoredOffset]:
        """As `ClaimingStorage.claim`."""

        return self._change(group, dict.fromkeys(partitions, generation), {})

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        """As `OffsetStorage.save`."""
        new = {name: under(generation, row) for name, row in offsets.items()}
        self._change(group, {name: row.generation for name, row in new.items()}, new)

    def close(self) -> None:
        """Ends the session; a further call raises Closed."""
        self._connection.close()

    def _change(
        self, group: str, generations: Mapping[PartitionName, int], new: Mapping[PartitionName, StoredOffset]
    ) -> dict[PartitionName, StoredOffset]:
        """Gives rows their generations, and the offsets that there are in `new`; what is kept then.

        Raises Fenced for the rows of a higher one, when the others are changed.
        """
        lost: dict[PartitionName, int] = {}
        kept: dict[PartitionName, StoredOffset] = {}
        left: Iterable[PartitionName] = generations
        with self._connection.client() as client:
            for _ in range(LOOKS):
                found = self._find(client, group, left)
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
        return _kept(kept)

    def _too_busy(self, group: str) -> Busy:
        return Busy(f"{self._connection.address}: others change the offsets of group {group} all the time.")

    def _find(
        self, client: KazooClient, group: str, names: Iterable[PartitionName]
    ) -> dict[PartitionName, Found]:
        """What is there. The offset is read before the row and behind it: if it is the same, they are of one moment."""
        found: dict[PartitionName, Found] = {}
        left = list(names)
        synced = client.sync_async(self._layout.root or "/")
        for _ in range(LOOKS):
            asked = [
                client.get_async(path)
                for name in left
                for path in _around(self._layout.offset(group, name), self._layout.row(group, name))
            ]
            answers = results(asked)
            for name, before, row, behind in zip(left, *(answers[each::3] for each in range(3)), strict=True):
                if _moment(before) == _moment(behind):
                    found[name] = _found(self._layout.offset(group, name), before, row)
            left = [name for name in left if name not in found]
            if not left:
                break
        else:
            raise self._too_busy(group)
        results([synced])
        return found

    def _write(
        self,
        client: KazooClient,
        group: str,
        writes: Mapping[PartitionName, tuple[Found, StoredOffset]],
    ) -> list[PartitionName]:
        """Writes the rows, each in a transaction of its own; those that others changed meanwhile are returned."""
        for name, (found, _) in writes.items():
            if found.offset_version is None:
                client.ensure_path(self._layout.offset(group, name).rpartition("/")[0])
        asked = []
        for name, (found, new) in writes.items():
            transaction = client.transaction()
            offset, row = self._layout.offset(group, name), self._layout.row(group, name)
            _put(transaction, offset, offset_data(new), found.offset_version)
            _put(transaction, row, row_data(new), found.row_version)
            asked.append(transaction.commit_async())
        left = []
        for name, answer in zip(writes, results(asked), strict=True):
            if not _done(answer):
                left.append(name)
        return left


def _kept(found: Mapping[PartitionName, StoredOffset | None]) -> dict[PartitionName, StoredOffset]:
    return {
        name: stored for name, stored in found.items() if stored is not None and stored.offset != NO_OFFSET
    }


def _put(transaction: Any, path: str, data: bytes, version: int | None) -> None:
    if version is None:
        transaction.create(path, data)
    else:
        transaction.set_data(path, data, version)


def _around(offset: str, row: str) -> tuple[str, str, str]:
    return offset, row, offset


def _moment(answer: Any) -> int | None:
    """When the node was changed last; None without one. Raises what the answer says went wrong."""
    node = _node(answer)
    return None if node is None else int(node[1].mzxid)


def _found(path: str, offset: Any, row: Any) -> Found:
    """What two answers say. Raises what they say went wrong, Damaged."""
    shown, kept = _node(offset), _node(row)
    stored = stored_offset(path, None if shown is None else shown[0], None if kept is None else kept[0])
    return Found(stored, *(None if node is None else node[1].version for node in (shown, kept)))


def _node(answer: Any) -> Any:
    """The data and the state of a node; None: there is none."""
    from kazoo.exceptions import NoNodeError

    if isinstance(answer, NoNodeError):
        return None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _done(answer: Any) -> bool:
    """Whether a transaction was done; False: others were faster. Raises what else went wrong."""
    from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

    if isinstance(answer, BaseException):
        raise answer
    errors = [each for each in answer if isinstance(each, BaseException)]
    if not errors:
        return True
    raced = [each for each in errors if isinstance(each, BadVersionError | NodeExistsError | NoNodeError)]
    if not raced:
        raise errors[0]
    return False


# What is in the nodes of one offset, to and from bytes.
#
# The node of the layout has `0-OFFSET`. Below it, `tfmq` has all of the stored offset; both are written in one
# transaction of ZooKeeper. Somebody else's tool may set the first one alone: then that is where the group goes on.

BYTES_MAX: Final = 4096
"""Far more than a row needs; larger ones are not ours."""


def offset_data(stored: StoredOffset) -> bytes:
    """The node that everybody reads; empty where nothing was saved."""
    return b"" if stored.offset == NO_OFFSET else b"0-%d" % stored.offset


def row_data(stored: StoredOffset) -> bytes:
    """The node below it."""
    return json.dumps(stored._asdict()).encode()


def stored_offset(path: str, offset: bytes | None, row: bytes | None) -> StoredOffset | None:
    """What the two nodes say; None: nothing is there. Raises Damaged, naming `path`, for what says nothing."""
    if offset is None:
        return None
    kept = StoredOffset(NO_OFFSET) if row is None else _row(path, row)
    shown = _offset(path, offset)
    if shown == kept.offset:
        return kept
    return StoredOffset(shown, 0, kept.incarnation, -1, kept.generation)


def _offset(path: str, data: bytes) -> int:
    """MetaMorphosis writes the id of a message and a dash before the offset; the offset alone is taken, too."""
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
    if not isinstance(found, dict) or not all(
        type(found.get(field)) is int for field in StoredOffset._fields
    ):
        raise Damaged(
            f"The node {path}/tfmq holds no offset but {data[:40]!r}; delete it to begin anew there."
        )
    return StoredOffset(*(_number(found, field) for field in StoredOffset._fields))


def _number(found: dict[str, Any], field: str) -> int:
    return int(found[field])
