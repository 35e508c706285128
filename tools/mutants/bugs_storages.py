"""Planted bugs: storages of offsets and registrations in ZooKeeper: fsync, fences, formats, ranges, paths."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

FILE: Final = "tests/offsets/test_file.py"
TABLE: Final = "tests/offsets/test_sql_statements.py"
STORED: Final = "tests/offsets/test_storage.py"
OFFSETS: Final = "tests/client/consumer/test_offset_commit.py"
STORAGE: Final = "tests/client/consumer/test_external_offsets.py"
SESSIONS: Final = "tests/sql/test_offsets.py"
MEMBER: Final = "tests/zookeeper/test_group_coordinator.py"
RANGES: Final = "tests/zookeeper/test_range_assignment.py"
LAYOUT: Final = "tests/zookeeper/test_paths.py"
ROW: Final = "tests/zookeeper/test_offsets.py"
REGISTRY: Final = "tests/zookeeper/test_registration.py"

_FILE = "tfmq/offsets/file.py"
_COORDINATOR = "tfmq/zookeeper/group_coordinator.py"
_REGISTRY = "tfmq/zookeeper/registration.py"

FILES: Final = (
    Mutant(
        "file-read-before-its-lock",
        "members that share an offset file read it again each time they have locked it",
        _FILE,
        ("        lock = self._lock()\n        try:\n            groups = self._load()\n"),
        ("        groups = self._load()\n        lock = self._lock()\n        try:\n"),
        [FILE],
    ),
    Mutant(
        "lock-kept-for-good",
        "no lock of an offset file is held between two calls",
        _FILE,
        "        finally:\n            lock.release()\n",
        "        finally:\n            groups = {}\n",
        [FILE],
    ),
    Mutant(
        "one-fenced-row-refuses-the-others",
        "of a commit, rows that are not of another owner are stored",
        _FILE,
        "                if name not in lost and (name in new",
        "                if not lost and (name in new",
        [FILE],
    ),
    Mutant(
        "fenced-in-silence",
        "a commit that a later owner prevents raises an error",
        _FILE,
        "        if lost:\n            raise fenced(self.path, group, lost)\n",
        "",
        [FILE],
    ),
    Mutant(
        "claimed-rows-of-a-file-are-offsets",
        "a partition that was claimed and never committed has no offset, in a file, too",
        _FILE,
        "    return {name: row for name, row in found.items() if row.offset != NO_OFFSET}\n",
        "    return {name: row for name, row in found.items() if row.generation >= 0}\n",
        [FILE],
    ),
    Mutant(
        "newer-offset-file-read",
        "an offset file of a later release is refused",
        _FILE,
        "        if isinstance(version, int) and version > FILE_VERSION:\n",
        "        if isinstance(version, int) and version < 0:\n",
        [FILE],
    ),
    Mutant(
        "older-offset-file-refused",
        "an offset file of an earlier release is read",
        _FILE,
        (
            "DECODERS: Final[Mapping[Any, Callable[[Any], Rows]]] = {1: _decode_group_of_version_1, FILE_VERS"
            "ION: _decode_group}\n"
        ),
        "DECODERS: Final[Mapping[Any, Callable[[Any], Rows]]] = {FILE_VERSION: _decode_group}\n",
        [FILE],
    ),
    Mutant(
        "unsound-offset-file-read",
        "a file that no release wrote is damage",
        _FILE,
        "            if any(type(value) is not int for value in stored) or min(natural) < 0:\n",
        "            if False:\n",
        [FILE],
    ),
    Mutant(
        "rows-saved-under-the-member-s-number",
        "a row is stored under the generation of its own partition",
        "tfmq/offsets/storage.py",
        "    return row if row.generation else row._replace(generation=generation)\n",
        "    return row._replace(generation=generation)\n",
        [STORED, FILE, OFFSETS],
    ),
    Mutant(
        "unnamed-fence-is-about-nothing",
        "a storage error that names no partitions applies to all",
        "tfmq/offsets/storage.py",
        "    return frozenset(asked) if named is None else",
        "    return frozenset() if named is None else",
        [STORED, OFFSETS],
    ),
    Mutant(
        "claims-under-one-number-for-all",
        "each partition is claimed under its own generation",
        "tfmq/client/consumer/offset_commit.py",
        "            by_generation.setdefault(self._owner.generation_of(name), []).append(name)\n",
        "            by_generation.setdefault(self._owner.generation, []).append(name)\n",
        [OFFSETS],
    ),
)

DATABASES: Final = (
    Mutant(
        "rows-locked-in-any-order",
        "members that commit the same rows do not deadlock",
        "tfmq/offsets/sql.py",
        "    for name in sorted(changes):",
        "    for name in changes:",
        [TABLE],
    ),
    Mutant(
        "row-made-by-another-at-once-fails",
        "a row that another member creates at the same moment is found",
        "tfmq/offsets/sql.py",
        "    except IntegrityError:\n        return False\n",
        "    except IntegrityError:\n        raise\n",
        [TABLE],
    ),
    Mutant(
        "saving-consumer-commits-offsets-in-a-transaction",
        "offsets in a transaction need commits=manual",
        "tfmq/client/consumer/external_offsets.py",
        '    if consuming.options.commits != "manual":\n',
        '    if consuming.options.commits == "before":\n',
        [STORAGE],
    ),
    Mutant(
        "offset-of-one-message-is-that-of-all",
        "an offset in a transaction is the one after the given message",
        "tfmq/client/consumer/external_offsets.py",
        "positions.transaction_positions() if message is None else dict([positions.position_after(message)])",
        "positions.transaction_positions()",
        [STORAGE],
    ),
    Mutant(
        "offsets-of-a-transaction-saved-again",
        "offsets that a transaction committed are not committed again",
        "tfmq/client/consumer/external_offsets.py",
        (
            '        """Record the commit, so that the consumer does not commit these offsets again."""\n'
            "        with self.lock:\n"
            "            self.core.positions.mark_committed_by_transaction(self.positions)\n"
            "\n"
        ),
        (
            '        """Record the commit, so that the consumer does not commit these offsets again."""\n'
            "        with self.lock:\n"
            "            self.core.positions.names()\n"
            "\n"
        ),
        [STORAGE],
    ),
    Mutant(
        "rolled-back-offsets-count-as-saved",
        "offsets that a transaction rolled back are not committed",
        "tfmq/sql/offset_commit.py",
        "discarding all of them is safe.\n    _uncommitted[session] = []\n",
        "discarding all of them is safe.\n    _uncommitted[session] = list(_uncommitted[session])\n",
        [SESSIONS],
    ),
)

ZOOKEEPER: Final = (
    Mutant(
        "ranges-of-zookeeper-with-a-hole",
        "ranges are contiguous, and cover every partition",
        "tfmq/zookeeper/group_coordinator.py",
        "            start = index * length + min(index, longer)\n",
        "            start = index * length\n",
        [RANGES],
    ),
    Mutant(
        "ranges-of-members-of-other-topics",
        "each topic is shared by those that read it",
        "tfmq/zookeeper/group_coordinator.py",
        "sorted(each for each, topics in members.items() if topic in topics)",
        "sorted(each for each, topics in members.items() if topics)",
        [RANGES],
    ),
    Mutant(
        "address-at-another-path",
        "the nodes have the paths of MetaMorphosis",
        "tfmq/zookeeper/paths.py",
        '/brokers/ids/{self.broker}/master"',
        '/brokers/ids/{self.broker}"',
        [LAYOUT],
    ),
    Mutant(
        "offset-without-its-message-s-id",
        "an offset in ZooKeeper has the format of MetaMorphosis",
        "tfmq/zookeeper/offsets.py",
        'b"0-%d" % stored.offset',
        'b"%d" % stored.offset',
        [ROW, LAYOUT, "tests/zookeeper/test_offsets.py"],
    ),
    Mutant(
        "partition-that-is-wanted-again-is-kept",
        "a partition that is requested again after its release is claimed under another generation",
        _COORDINATOR,
        "                self._released.add(name)\n                self._revoked.discard(name)\n",
        "                self._revoked.discard(name)\n",
        [MEMBER],
    ),
    Mutant(
        "member-takes-before-it-is-one",
        "a member registers before it claims anything",
        _COORDINATOR,
        ("            self._round_at = min(self._round_at, now + ROUND_SECONDS)\n            return\n"),
        "            self._round_at = min(self._round_at, now + ROUND_SECONDS)\n",
        [MEMBER],
    ),
    Mutant(
        "new-topics-not-reported-to-members",
        "members are notified which topics another member reads",
        _COORDINATOR,
        "        if self._registered != topics:\n            if not",
        '        if self._registered == b"":\n            if not',
        [MEMBER],
    ),
    Mutant(
        "waits-in-silence",
        "a member that waits for an owner logs which",
        _COORDINATOR,
        "        if self._rounds_waiting == ROUNDS_BEFORE_LOG:\n",
        "        if self._rounds_waiting < 0:\n",
        [MEMBER],
    ),
    Mutant(
        "removed-registration-stays-removed",
        "a registration that was removed by hand is made again",
        _REGISTRY,
        "        yield from self._verify()\n",
        "",
        [REGISTRY],
    ),
    Mutant(
        "deleted-topic-stays-registered",
        "a deleted topic is no longer registered",
        _REGISTRY,
        "            if node is None or (yield DeleteNode(path, node.version, self._layout.broker_address())):\n",
        "            if node is None:\n",
        [REGISTRY],
    ),
    Mutant(
        "number-of-partitions-never-changes",
        "a topic with new partitions is registered with their number",
        _REGISTRY,
        "            if self._registered_nodes.get(path) != count:\n",
        "            if path not in self._registered_nodes:\n",
        [REGISTRY],
    ),
)

STORAGES: Final = FILES + DATABASES + ZOOKEEPER
