"""Planted bugs: storages of offsets, and coordination by ZooKeeper: fences, owners, sessions, registrations."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

FILE: Final = "tests/offsets/test_file.py"
TABLE: Final = "tests/offsets/test_sql_statements.py"
DATABASE: Final = "tests/offsets/test_sql.py"
SESSIONS: Final = "tests/sql/test_offsets.py"
CONFLICTS: Final = "tests/sql/test_offset_conflicts.py"
NODES: Final = "tests/zookeeper/test_offsets.py"
MEMBER: Final = "tests/zookeeper/test_group_coordinator.py"
RUNNER: Final = "tests/zookeeper/test_session.py"
REQUESTS: Final = "tests/zookeeper/test_session.py"
REGISTRY: Final = "tests/zookeeper/test_registration.py"

IN_STORAGES: Final = (
    Mutant(
        "offset-file-without-its-lock",
        "members that share an offset file do not overwrite each other's rows",
        "tfmq/offsets/file.py",
        '                return self._disk.lock(f"{self.path}.lock")\n',
        '                return self._disk.lock(f"{self.path}.{id(self)}.lock")\n',
        [FILE],
    ),
    Mutant(
        "claim-writes-nothing-to-the-file",
        "a claim fences before any offset is committed",
        "tfmq/offsets/file.py",
        "                if name not in lost and (name in new or before[name].generation < generation)\n",
        "                if name not in lost and name in new\n",
        [FILE],
    ),
    Mutant(
        "table-takes-an-older-generation",
        "a row is changed only with the same or a higher generation",
        "tfmq/offsets/sql.py",
        "        fits = update(TABLE).where(key, TABLE.c.generation <= generation)\n",
        "        fits = update(TABLE).where(key)\n",
        [TABLE, DATABASE],
    ),
    Mutant(
        "claimed-rows-are-offsets",
        "a partition that was claimed and never committed has no offset",
        "tfmq/offsets/sql.py",
        "if name in wanted and row.offset != NO_OFFSET}",
        "if name in wanted}",
        [TABLE, DATABASE],
    ),
    Mutant(
        "offsets-of-another-database-are-committed",
        "results and offset are in one database; otherwise the commit is refused",
        "tfmq/sql/offset_commit.py",
        "    if not same:\n",
        "    if same is None:\n",
        [SESSIONS],
    ),
    Mutant(
        "lost-partition-commits-its-results",
        "a member that lost a partition commits no results of it",
        "tfmq/sql/offset_commit.py",
        "    if lost or offsets.fenced is not None:\n",
        "    if offsets.fenced is not None:\n",
        [SESSIONS],
    ),
    Mutant(
        "others-of-a-refused-batch-are-passed",
        "after Fenced the other partitions of the batch are delivered again",
        "tfmq/client/consumer/external_offsets.py",
        "            for name in self.positions.keys() - set(lost):\n",
        "            for name in set(lost):\n",
        [SESSIONS],
    ),
    Mutant(
        "others-of-a-batch-with-a-loss-are-passed",
        "after Fenced for an earlier loss the partitions of the batch are delivered again",
        "tfmq/sql/offset_commit.py",
        "        _redeliver_others(offsets, offsets.storage, lost)\n",
        ("        if lost:\n            _redeliver_others(offsets, offsets.storage, lost)\n"),
        [SESSIONS],
    ),
    Mutant(
        "a-child-keeps-the-lock-of-the-offset-file",
        "a child that is forked during a commit does not keep the lock",
        "journal/disk.py",
        "                fcntl.flock(descriptor, fcntl.LOCK_UN)\n",
        "                pass\n",
        [FILE],
    ),
    Mutant(
        "any-trouble-of-the-disk-is-final",
        "a commit that failed at the disk is tried again",
        "tfmq/offsets/file.py",
        "            is_permanent = is_permanent_error(error)\n",
        "            is_permanent = True\n",
        [FILE],
    ),
    Mutant(
        "a-table-of-another-release-is-used",
        "a table that lacks columns is refused",
        "tfmq/offsets/sql.py",
        "        if missing:\n",
        "        if missing is None:\n",
        [CONFLICTS],
    ),
    Mutant(
        "savepoint-s-release-is-taken-for-the-commit",
        "changes of a savepoint are committed with the transaction, not before",
        "tfmq/sql/offset_commit.py",
        "    if not session.in_nested_transaction():\n",
        "    if session is not None:\n",
        [SESSIONS],
    ),
    Mutant(
        "autocommit-is-no-transaction",
        "without a transaction results and offset are not committed together",
        "tfmq/sql/offset_commit.py",
        "    require_no_autocommit(connection)\n",
        "",
        [SESSIONS],
    ),
)

IN_ZOOKEEPER: Final = (
    Mutant(
        "node-set-whatever-its-version",
        "a late change does not overwrite what another member has claimed",
        "tfmq/zookeeper/offsets.py",
        "        transaction.set_data(path, data, version)\n",
        "        transaction.set_data(path, data, -1)\n",
        [NODES],
    ),
    Mutant(
        "offset-and-row-of-two-moments",
        "the fields of an offset are read at one moment",
        "tfmq/zookeeper/offsets.py",
        "                if _change_id(before) == _change_id(after):\n",
        "                if _change_id(before) is not NotImplemented:\n",
        [NODES],
    ),
    Mutant(
        "offset-set-by-hand-does-not-count",
        "a group continues at an offset that an operator sets",
        "tfmq/zookeeper/offsets.py",
        "    return StoredOffset(shown, 0, kept.incarnation, -1, kept.generation)\n",
        "    return kept\n",
        [NODES],
    ),
    Mutant(
        "hands-out-longer-than-the-session",
        "a member stops before its session may end",
        "tfmq/zookeeper/group_coordinator.py",
        "DELIVERY_FRACTION: Final = 0.5\n",
        "DELIVERY_FRACTION: Final = 1.2\n",
        [MEMBER],
    ),
    Mutant(
        "hands-out-while-disconnected",
        "nothing is handed out while the connection is cut",
        "tfmq/zookeeper/group_coordinator.py",
        "        self._until = self._prove_at = NEVER\n",
        "        self._prove_at = NEVER\n",
        [MEMBER],
    ),
    Mutant(
        "keeps-partitions-over-sessions",
        "state of an ended session is dropped",
        "tfmq/zookeeper/group_coordinator.py",
        "        for each in (self._owned, self._revoked, self._released, self.waits_for):\n",
        "        for each in (self._revoked, self._released, self.waits_for):\n",
        [MEMBER],
    ),
    Mutant(
        "takes-what-another-one-has",
        "a partition is claimed only when its owner's node does not exist",
        "tfmq/zookeeper/group_coordinator.py",
        "            elif node.session != self.session:\n                self.waits_for",
        "            elif node.session < 0:\n                self.waits_for",
        [MEMBER],
    ),
    Mutant(
        "released-partitions-are-handed-out",
        "messages of released partitions are not handed out",
        "tfmq/zookeeper/group_coordinator.py",
        "        assigned = {name: number for name, number in self._owned.items() if name not in self._released}\n",
        "        assigned = {name: number for name, number in self._owned.items()}\n",
        [MEMBER],
    ),
    Mutant(
        "owner-node-without-a-reply-is-forgotten",
        "a node whose creation got no reply does not block the owner of a partition",
        "tfmq/zookeeper/group_coordinator.py",
        "        for name in sorted(self._released | (self._uncertain - target - self._owned.keys())):\n",
        "        for name in sorted(self._released):\n",
        [MEMBER],
    ),
    Mutant(
        "removes-the-node-of-another-one",
        "a member removes no node of another session",
        "tfmq/zookeeper/group_coordinator.py",
        "            is_mine = node is not None and node.session == self.session\n",
        "            is_mine = node is not None\n",
        [MEMBER],
    ),
    Mutant(
        "owner-s-node-is-never-looked-at-again",
        "a member detects that its owner node was removed by hand",
        "tfmq/zookeeper/group_coordinator.py",
        "        yield from self._verify()\n",
        "",
        [MEMBER],
    ),
    Mutant(
        "member-without-its-own-node-goes-on",
        "a member whose node was removed registers again",
        "tfmq/zookeeper/group_coordinator.py",
        (
            '                self._registered = b""\n'
            '                raise ConnectionLost(f"{path} or the member\'s own node has changed")\n'
        ),
        '                raise ConnectionLost(f"{path} or the member\'s own node has changed")\n',
        [MEMBER],
    ),
    Mutant(
        "storm-keeps-it-from-its-beats",
        "constant changes do not keep a member from checking its session",
        "tfmq/zookeeper/group_coordinator.py",
        "        return self.prove_session() if self._registered and self._prove_at <= now else self.check_all(now)\n",
        "        return self.prove_session() if self._round_at > now else self.check_all(now)\n",
        [MEMBER],
    ),
    Mutant(
        "answers-of-reads-prove-a-session",
        "only replies of the leader prove that the session is alive",
        "tfmq/zookeeper/session.py",
        "                    if isinstance(request, WRITES):\n",
        "                    if request is not None:\n",
        [RUNNER],
    ),
    Mutant(
        "session-lasts-as-long-as-it-was-asked-for",
        "the session time is the one that ZooKeeper granted",
        "tfmq/zookeeper/session.py",
        "                self._state_machine.session_seconds = min(self._seconds, permitted)\n",
        "                self._state_machine.session_seconds = self._seconds\n",
        [RUNNER],
    ),
    Mutant(
        "delete-without-the-member-s-own-node",
        "a delete that was requested in one session and executed in the next removes no node of another member",
        "tfmq/zookeeper/session.py",
        "    transaction.check(request.beside, -1)\n",
        '    transaction.check("/", -1)\n',
        [REQUESTS],
    ),
    Mutant(
        "registers-beside-another-broker",
        "a broker number that is in use by another broker is left to it",
        "tfmq/zookeeper/registration.py",
        "        if owner is not None:\n",
        "        if owner is not None and not owner:\n",
        [REGISTRY],
    ),
    Mutant(
        "topics-of-an-earlier-life-stay",
        "the registered topics are the current ones",
        "tfmq/zookeeper/registration.py",
        "        if node.session != self.session:\n            # An earlier process of this",
        "        if node.session < 0:\n            # An earlier process of this",
        [REGISTRY],
    ),
)

OFFSETS: Final = IN_STORAGES + IN_ZOOKEEPER
