"""Bugs to plant in storages of offsets, and in what ZooKeeper coordinates: fences, owners, sessions, registrations."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

FILE: Final = "tests/offsets/test_file.py"
TABLE: Final = "tests/offsets/test_table.py"
DATABASE: Final = "tests/offsets/test_sql.py"
SESSIONS: Final = "tests/sql/test_offsets.py"
CONFLICTS: Final = "tests/sql/test_offset_conflicts.py"
NODES: Final = "tests/zookeeper/test_offsets.py"
MEMBER: Final = "tests/zookeeper/test_coordinator.py"
RUNNER: Final = "tests/zookeeper/test_session.py"
REQUESTS: Final = "tests/zookeeper/test_session.py"
REGISTRY: Final = "tests/zookeeper/test_registration.py"

IN_STORAGES: Final = (
    Mutant(
        "offset-file-without-its-lock",
        "members that share an offset file do not lose each other's rows",
        "tfmq/offsets/file.py",
        '                return self._disk.lock(f"{self.path}.lock")\n',
        '                return self._disk.lock(f"{self.path}.{id(self)}.lock")\n',
        [FILE],
    ),
    Mutant(
        "claim-writes-nothing-to-the-file",
        "a claim fences before anything is saved",
        "tfmq/offsets/file.py",
        "                if name not in lost and (name in new or before[name] < generation)\n",
        "                if name not in lost and name in new\n",
        [FILE],
    ),
    Mutant(
        "table-takes-an-older-generation",
        "a row is changed only by who brings the same or a higher generation",
        "tfmq/offsets/sql.py",
        "        fits = update(TABLE).where(key, TABLE.c.generation <= generation)\n",
        "        fits = update(TABLE).where(key)\n",
        [TABLE, DATABASE],
    ),
    Mutant(
        "claimed-rows-are-offsets",
        "a partition that was claimed and never saved has no offset",
        "tfmq/offsets/sql.py",
        "if name in wanted and row.offset != NO_OFFSET}",
        "if name in wanted}",
        [TABLE, DATABASE],
    ),
    Mutant(
        "offsets-of-another-database-are-committed",
        "results and offset are in one database, or refused",
        "tfmq/sql/offsets.py",
        "    if not same:\n",
        "    if same is None:\n",
        [SESSIONS],
    ),
    Mutant(
        "lost-partition-commits-its-results",
        "a member that lost a partition commits no results of it",
        "tfmq/sql/offsets.py",
        "    if lost or stood.fenced is not None:\n",
        "    if stood.fenced is not None:\n",
        [SESSIONS],
    ),
    Mutant(
        "others-of-a-refused-batch-are-passed",
        "behind Fenced the other partitions of the batch come again",
        "tfmq/client/consumer/external_offsets.py",
        "            for name in self.positions.keys() - set(lost):\n",
        "            for name in set(lost):\n",
        [SESSIONS],
    ),
    Mutant(
        "others-of-a-batch-with-a-loss-are-passed",
        "behind Fenced for what was lost before, the partitions of the batch come again",
        "tfmq/sql/offsets.py",
        "        _redeliver_others(stood, stood.storage, lost)\n",
        ("        if lost:\n            _redeliver_others(stood, stood.storage, lost)\n"),
        [SESSIONS],
    ),
    Mutant(
        "a-child-keeps-the-lock-of-the-offset-file",
        "a child that is forked in the middle of a save does not keep the lock",
        "journal/disk.py",
        "                fcntl.flock(descriptor, fcntl.LOCK_UN)\n",
        "                pass\n",
        [FILE],
    ),
    Mutant(
        "any-trouble-of-the-disk-is-final",
        "a disk that failed is tried again",
        "tfmq/offsets/file.py",
        "            hopeless = is_permanent_error(error)\n",
        "            hopeless = True\n",
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
        "what a savepoint had is saved when the transaction commits, not before",
        "tfmq/sql/offsets.py",
        "    if not session.in_nested_transaction():\n",
        "    if session is not None:\n",
        [SESSIONS],
    ),
    Mutant(
        "autocommit-is-no-transaction",
        "without a transaction results and offset are not committed together",
        "tfmq/sql/offsets.py",
        "    require_no_autocommit(connection)\n",
        "",
        [SESSIONS],
    ),
)

IN_ZOOKEEPER: Final = (
    Mutant(
        "node-set-whatever-its-version",
        "a change that comes late changes nothing that another one has claimed",
        "tfmq/zookeeper/offsets.py",
        "        transaction.set_data(path, data, version)\n",
        "        transaction.set_data(path, data, -1)\n",
        [NODES],
    ),
    Mutant(
        "offset-and-row-of-two-moments",
        "what is read of an offset is of one moment",
        "tfmq/zookeeper/offsets.py",
        "                if _change_id(before) == _change_id(behind):\n",
        "                if _change_id(before) is not NotImplemented:\n",
        [NODES],
    ),
    Mutant(
        "offset-set-by-hand-does-not-count",
        "an offset that an operator sets is where the group goes on",
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
        "hands-out-while-it-is-cut-off",
        "nothing is handed out while the connection is cut",
        "tfmq/zookeeper/group_coordinator.py",
        "        self._until = self._prove_at = NEVER\n",
        "        self._prove_at = NEVER\n",
        [MEMBER],
    ),
    Mutant(
        "keeps-partitions-over-sessions",
        "what belonged to a session is gone with it",
        "tfmq/zookeeper/group_coordinator.py",
        "        for each in (self._owned, self._revoked, self._released, self.waits_for):\n",
        "        for each in (self._revoked, self._released, self.waits_for):\n",
        [MEMBER],
    ),
    Mutant(
        "takes-what-another-one-has",
        "a partition is taken only when its owner's node is gone",
        "tfmq/zookeeper/group_coordinator.py",
        "            elif node.session != self._session:\n                self.waits_for",
        "            elif node.session < 0:\n                self.waits_for",
        [MEMBER],
    ),
    Mutant(
        "released-partitions-are-handed-out",
        "what was released is handed out no more",
        "tfmq/zookeeper/group_coordinator.py",
        "        granted = {name: number for name, number in self._owned.items() if name not in self._released}\n",
        "        granted = {name: number for name, number in self._owned.items()}\n",
        [MEMBER],
    ),
    Mutant(
        "owner-nobody-answered-for-is-forgotten",
        "a node whose making nobody answered for keeps no partition from its owner",
        "tfmq/zookeeper/group_coordinator.py",
        "        for name in sorted(self._released | (self._uncertain - target - self._owned.keys())):\n",
        "        for name in sorted(self._released):\n",
        [MEMBER],
    ),
    Mutant(
        "removes-the-node-of-another-one",
        "a member removes no node of another session",
        "tfmq/zookeeper/group_coordinator.py",
        "            is_mine = node is not None and node.session == self._session\n",
        "            is_mine = node is not None\n",
        [MEMBER],
    ),
    Mutant(
        "owner-s-node-is-never-looked-at-again",
        "a member whose owner's node was removed by hand knows it",
        "tfmq/zookeeper/group_coordinator.py",
        "        yield from self._verify()\n",
        "",
        [MEMBER],
    ),
    Mutant(
        "member-without-its-own-node-goes-on",
        "a member that somebody removed registers again",
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
        "changes without end do not keep a member from asking whether its session lives",
        "tfmq/zookeeper/group_coordinator.py",
        "        return self.prove_session() if self._registered and self._prove_at <= now else self.check_all(now)\n",
        "        return self.prove_session() if self._round_at > now else self.check_all(now)\n",
        [MEMBER],
    ),
    Mutant(
        "answers-of-reads-prove-a-session",
        "only what the leader answers proves that the session lives",
        "tfmq/zookeeper/session.py",
        "                    if isinstance(request, WRITES):\n",
        "                    if request is not None:\n",
        [RUNNER],
    ),
    Mutant(
        "session-lasts-as-long-as-it-was-asked-for",
        "a session that ZooKeeper gives less time has less",
        "tfmq/zookeeper/session.py",
        "                self._subject.session_seconds = min(self._seconds, given)\n",
        "                self._subject.session_seconds = self._seconds\n",
        [RUNNER],
    ),
    Mutant(
        "delete-without-the-member-s-own-node",
        "what was asked in one session, and is done in the next, removes nobody's node",
        "tfmq/zookeeper/session.py",
        "    transaction.check(request.beside, -1)\n",
        '    transaction.check("/", -1)\n',
        [REQUESTS],
    ),
    Mutant(
        "registers-beside-another-broker",
        "a number that another broker has is left to it",
        "tfmq/zookeeper/registration.py",
        "        if owner is not None:\n",
        "        if owner is not None and not owner:\n",
        [REGISTRY],
    ),
    Mutant(
        "topics-of-an-earlier-life-stay",
        "what is registered is what is so",
        "tfmq/zookeeper/registration.py",
        "            if node.session != self._session:\n                # The node is of an earlier",
        "            if node.session < 0:\n                # The node is of an earlier",
        [REGISTRY],
    ),
)

OFFSETS: Final = IN_STORAGES + IN_ZOOKEEPER
