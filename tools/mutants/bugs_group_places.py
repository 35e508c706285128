"""Planted bugs: where a member of a group reads and commits, and what a consumer leaves out."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

HANDOVER: Final = "tests/client/consumer/test_rebalance.py"
ASSIGNMENT: Final = "tests/client/consumer/test_assignment.py"
CONSUMING: Final = "tests/client/consumer/test_core.py"
OFFSETS: Final = "tests/client/consumer/test_offset_commit.py"
SCENARIOS: Final = "tests/client/test_group_scenarios.py"
START: Final = "tests/client/consumer/test_options.py"
POSITIONS: Final = "tests/client/consumer/test_positions.py"
OPTIONS: Final = "tests/client/consumer/test_options.py"
GOING: Final = "tests/client/consumer/test_redelivery_after_rollback.py"

_ASSIGNMENT = "tfmq/client/consumer/assignment.py"
_START_POSITION = "tfmq/client/consumer/start_position.py"
_OFFSETS = "tfmq/client/consumer/offset_commit.py"
_SAVING = "tfmq/client/consumer/offset_commit.py"
_OPTIONS = "tfmq/client/consumer/options.py"
_CONSUMING = "tfmq/client/consumer/core.py"

PLACES: Final = (
    Mutant(
        "lag-without-the-partitions-of-members-that-left",
        "the lag of a group includes partitions without an offset also when its members have left",
        "tfmq/broker/groups/offsets.py",
        "        for key in (group.owners.keys() | group.released) - group.offsets.keys():\n",
        "        for key in group.owners.keys() - group.offsets.keys():\n",
        ["tests/broker/groups/test_group.py"],
    ),
    Mutant(
        "partition-read-before-it-is-claimed",
        "an offset storage accepts nothing of the former owner once the next one reads",
        _START_POSITION,
        "            claimed, refused = yield from offsets.claim(fresh)\n",
        "            claimed = yield from offsets.read(fresh)\n            refused = set()\n",
        [ASSIGNMENT],
    ),
    Mutant(
        "one-offset-in-doubt-keeps-all-partitions-back",
        "a group reads its other partitions while one offset is locked by a transaction",
        _START_POSITION,
        '            if "xid" not in busy.details:\n                raise\n',
        "            if busy.details is not None:\n                raise\n",
        [ASSIGNMENT],
    ),
    Mutant(
        "wait-for-a-shared-transaction-logged-without-advice",
        "a consumer that waits for a transaction of tfmq.sql logs the call that ends it",
        _START_POSITION,
        'SQL_XID_PREFIX: Final = "tfmq.sql."\n',
        'SQL_XID_PREFIX: Final = "tfmq.sql@"\n',
        [ASSIGNMENT],
    ),
    Mutant(
        "refused-claim-is-read-all-the-same",
        "a partition that has a later owner in the offset storage is not read",
        _START_POSITION,
        "            if name in refused or name in locked or name in (self._latest_unresolved or ()):\n",
        "            if name in locked or name in (self._latest_unresolved or ()):\n",
        [ASSIGNMENT],
    ),
    Mutant(
        "late-place-of-a-lost-grant-is-used",
        "an offset that was requested under an earlier assignment is not used",
        _ASSIGNMENT,
        "name not in assigned or assigned[name].grant != starts.generations[name]",
        "False",
        [ASSIGNMENT],
    ),
    Mutant(
        "new-partition-read-from-its-end",
        "a partition that appears later is read from its start",
        _START_POSITION,
        (
            "            elif known.get(name.topic) == incarnation or self._is_new_partition(name, incarnation):\n"
            "                questions[name] = EARLIEST\n"
        ),
        "",
        [ASSIGNMENT, START],
    ),
    Mutant(
        "start-before-the-group-s-offset",
        "the group's offset has precedence over `start`",
        _START_POSITION,
        "            if kept is not None and kept.incarnation == incarnation:\n",
        "            if kept is not None and kept.incarnation == incarnation and self._options.start_latest:\n",
        [ASSIGNMENT, START],
    ),
    Mutant(
        "doubtful-offsets-not-waited-for",
        "a consumer waits for offsets in a transaction in doubt",
        _ASSIGNMENT,
        ("                if not trouble.retriable or not self._link.connection_count:\n                    raise\n"),
        ("                if trouble.retriable or not self._link.connection_count:\n                    raise\n"),
        [ASSIGNMENT],
    ),
    Mutant(
        "commit-raises-nothing-for-what-is-lost",
        "a commit for a partition that another member owns raises an error",
        _SAVING,
        "        positions.raise_if_lost(refused, message)\n",
        "",
        [CONSUMING],
    ),
    Mutant(
        "one-refused-partition-refuses-all",
        "of a commit, the partitions that still have their owner are stored",
        _OFFSETS,
        "                refused = {PartitionName(*each) for each in reply.fenced}\n",
        "                refused = set(offsets) if reply.fenced else set()\n",
        [OFFSETS],
    ),
    Mutant(
        "passing-failure-of-a-save-ends-it",
        "a commit with a temporary failure is repeated",
        _SAVING,
        "                if not error.retriable:\n                    raise\n                log.warning(",
        "                if error:\n                    raise\n                log.warning(",
        ["tests/client/consumer/test_offset_commit.py"],
    ),
    Mutant(
        "lost-partition-saved-at-close",
        "a lost partition is removed from the consumer's state at once",
        "tfmq/client/consumer/positions.py",
        "        self.remove(name)\n        if open_ended:\n",
        "        if open_ended:\n",
        [POSITIONS],
    ),
    Mutant(
        "loss-reported-again-and-again",
        "a loss with a message in work is reported once",
        "tfmq/client/consumer/positions.py",
        "        self.lost.difference_update(lost)\n",
        "",
        [POSITIONS],
    ),
    Mutant(
        "loss-not-reported",
        "a loss with a message in work is reported",
        "tfmq/client/consumer/positions.py",
        "        if open_ended:\n            self.lost.add(name)\n",
        "",
        [POSITIONS],
    ),
)


CONSUMERS: Final = (
    Mutant(
        "broadcast-shares-a-group",
        "in broadcast each machine has all partitions, and its own offsets",
        _OPTIONS,
        "    if broadcast:\n        own =",
        "    if broadcast and not group:\n        own =",
        [OPTIONS],
    ),
    Mutant(
        "expression-over-tags-is-one-tag",
        '"a || b" selects both tags',
        _OPTIONS,
        "        found.update(part.strip() for part in each.split(TAG_SEPARATOR))\n",
        "        found.add(each)\n",
        [OPTIONS],
    ),
    Mutant(
        "star-is-a-tag",
        '"*" selects every message',
        _OPTIONS,
        "    if EVERY_TAG in found:\n        return None\n",
        "",
        [OPTIONS],
    ),
    Mutant(
        "zookeeper-s-members-save-at-the-broker",
        "a group that ZooKeeper coordinates has its offsets in ZooKeeper",
        _OPTIONS,
        "given.offsets if by_broker or given.offsets != BROKER else given.coordinator",
        "given.offsets",
        [OPTIONS],
    ),
    Mutant(
        "filter-s-failure-loses-what-stands-before",
        "where a filter raises, the messages before that one are delivered first",
        "tfmq/client/consumer/fetcher.py",
        "            return Batch(batch.name, kept, position), position\n",
        "            return Batch(batch.name, [], position), position\n",
        ["tests/client/consumer/test_fetcher.py"],
    ),
    Mutant(
        "filter-s-failure-passes-its-message",
        "the filter is called again for the message at which it raised",
        "tfmq/client/consumer/fetcher.py",
        "            position = ReadPosition(message.offset, message.ordinal, message.origin.epoch)\n",
        "            position = ReadPosition(message.next_offset, message.ordinal + 1, message.origin.epoch)\n",
        ["tests/client/consumer/test_fetcher.py", CONSUMING],
    ),
    Mutant(
        "filter-keeps-what-it-says-no-to",
        "a message that the filter rejects is left out",
        "tfmq/client/consumer/fetcher.py",
        "            if accepted:\n",
        "            if accepted or message:\n",
        ["tests/client/consumer/test_fetcher.py"],
    ),
    Mutant(
        "lag-of-what-was-read-ahead",
        "lag includes messages that were not handed out",
        "tfmq/client/consumer/core.py",
        "    delivered = {name: positions.delivered_position(name) for name in fetcher.partitions}\n",
        "    delivered = {name: fetcher.partitions[name].position for name in fetcher.partitions}\n",
        ["tests/client/consumer/test_core.py", START],
    ),
    Mutant(
        "lag-counts-bytes",
        "lag counts messages",
        "tfmq/client/consumer/core.py",
        "max(0, end - ordinal)",
        "max(0, end_requests[name].result().offset - position.offset)",
        ["tests/client/consumer/test_core.py", START],
    ),
)

GOING_BACK: Final = (
    Mutant(
        "stop-drops-what-is-being-taken",
        "stop() at any moment skips no message",
        _CONSUMING,
        "        self.positions.stop()\n",
        ("        self.positions.stopped = True\n        self.positions.drop_ready_batch()\n"),
        ["tests/client/test_stop_anywhere.py"],
    ),
    Mutant(
        "rollback-hands-out-nothing-again",
        "messages of a consumer in a rolled-back transaction are handed out again",
        "tfmq/client/transaction/transaction.py",
        "            each.mark_rolled_back()\n",
        "            pass\n",
        [GOING],
    ),
    Mutant(
        "gone-back-before-the-broker-said-where",
        "nothing is handed out before the broker has returned the group's offsets",
        "tfmq/client/consumer/external_offsets.py",
        "        core.suspended.add(name)\n",
        "",
        [GOING],
    ),
    Mutant(
        "commit-beside-transactions",
        "handlers commit by commit() or in transactions, not by both",
        _CONSUMING,
        '        self.positions.ack_trackers.check_commit_method("commit")\n',
        "",
        [GOING],
    ),
    Mutant(
        "save-overtakes-one-that-was-broken-off",
        "an older offset is never committed last",
        _OFFSETS,
        "                yield from self._save_after_former(lambda: storage.save(group, generation, offsets), until)\n",
        "                yield from run_work(self._run, lambda: storage.save(group, generation, offsets))\n",
        [OFFSETS],
    ),
    Mutant(
        "another-worker-does-not-wait-for-on-assigned",
        "no message is handed out before on_assigned returned",
        _CONSUMING,
        "self.suspended if self.membership is None else self.suspended | self.rebalance.unannounced",
        "self.suspended",
        [HANDOVER],
    ),
)

GROUP_PLACES: Final = PLACES + CONSUMERS + GOING_BACK
