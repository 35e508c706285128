"""Bugs to plant in where a group's member reads and saves, and in what a consumer leaves out."""

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
GOING: Final = "tests/client/consumer/test_going_back.py"

_ASSIGNMENT = "tfmq/client/consumer/assignment.py"
_OFFSETS = "tfmq/client/consumer/offset_commit.py"
_SAVING = "tfmq/client/consumer/offset_commit.py"
_OPTIONS = "tfmq/client/consumer/options.py"
_CONSUMING = "tfmq/client/consumer/core.py"

PLACES: Final = (
    Mutant(
        "lag-without-the-partitions-of-members-that-left",
        "the lag of a group counts partitions without an offset also when its members are gone",
        "tfmq/broker/groups/offsets.py",
        "        for key in (group.owners.keys() | group.released) - group.offsets.keys():\n",
        "        for key in group.owners.keys() - group.offsets.keys():\n",
        ["tests/broker/groups/test_group.py"],
    ),
    Mutant(
        "partition-read-before-it-is-claimed",
        "a storage takes nothing of the former owner once the next one reads",
        _ASSIGNMENT,
        "            claimed, refused = yield from offsets.claim(fresh)\n",
        "            claimed = yield from offsets.read(fresh)\n            refused = set()\n",
        [ASSIGNMENT],
    ),
    Mutant(
        "one-offset-in-doubt-keeps-all-partitions-back",
        "a group reads its other partitions while a transaction has the offset of one in doubt",
        _ASSIGNMENT,
        '            if "xid" not in busy.details:\n                raise\n',
        "            if busy.details is not None:\n                raise\n",
        [ASSIGNMENT],
    ),
    Mutant(
        "who-waits-for-a-shared-transaction-is-not-told-what-ends-it",
        "a consumer that waits for a transaction of tfmq.sql logs the call that ends it",
        _ASSIGNMENT,
        'SQL_XID_PREFIX: Final = "tfmq.sql."\n',
        'SQL_XID_PREFIX: Final = "tfmq.sql@"\n',
        [ASSIGNMENT],
    ),
    Mutant(
        "refused-claim-is-read-all-the-same",
        "a partition of which the storage knows a later owner is not read",
        _ASSIGNMENT,
        "            if name in refused or name in locked or name in (self._latest_unresolved or ()):\n",
        "            if name in locked or name in (self._latest_unresolved or ()):\n",
        [ASSIGNMENT],
    ),
    Mutant(
        "late-place-of-a-lost-grant-is-used",
        "a place that was asked for under an earlier grant is not begun with",
        _ASSIGNMENT,
        "            if self._group is not None and (name not in share or share[name].grant != grants[name]):\n"
        "                continue\n",
        "",
        [ASSIGNMENT],
    ),
    Mutant(
        "new-partition-read-from-its-end",
        "a partition that appears later is read from its start",
        _ASSIGNMENT,
        (
            "            elif known.get(name.topic) == incarnation or self._is_new_partition(name, incarnation):\n"
            "                questions[name] = EARLIEST\n"
        ),
        "",
        [ASSIGNMENT, START],
    ),
    Mutant(
        "start-before-the-group-s-offset",
        "the group's offset comes before `start`",
        _ASSIGNMENT,
        "            if kept is not None and kept.incarnation == incarnation:\n",
        "            if kept is not None and kept.incarnation == incarnation and self._options.start_latest:\n",
        [ASSIGNMENT, START],
    ),
    Mutant(
        "doubtful-offsets-not-waited-for",
        "offsets in a transaction in doubt are waited for",
        _ASSIGNMENT,
        (
            "                if not trouble.retriable or not self._link.connection_count:\n"
            "                    raise\n"
        ),
        (
            "                if trouble.retriable or not self._link.connection_count:\n"
            "                    raise\n"
        ),
        [ASSIGNMENT],
    ),
    Mutant(
        "commit-raises-nothing-for-what-is-lost",
        "a commit of what another has by now says so",
        _SAVING,
        "        positions.raise_if_lost(refused, message)\n",
        "",
        [CONSUMING],
    ),
    Mutant(
        "one-refused-partition-refuses-all",
        "of a save the partitions that are not another's are saved",
        _OFFSETS,
        "                refused = {PartitionName(*each) for each in reply.fenced}\n",
        "                refused = set(offsets) if reply.fenced else set()\n",
        [OFFSETS],
    ),
    Mutant(
        "passing-failure-of-a-save-ends-it",
        "a save that fails in passing is tried again",
        _SAVING,
        "                if not error.retriable:\n                    raise\n                log.warning(\n",
        "                if error:\n                    raise\n                log.warning(\n",
        ["tests/client/consumer/test_offset_commit.py"],
    ),
    Mutant(
        "lost-partition-saved-at-close",
        "what is lost is gone from the books at once",
        "tfmq/client/consumer/positions.py",
        "        self.remove(name)\n        if open_ended:\n",
        "        if open_ended:\n",
        [POSITIONS],
    ),
    Mutant(
        "loss-told-again-and-again",
        "a loss with something in work is told once",
        "tfmq/client/consumer/positions.py",
        "        self._lost.difference_update(lost)\n",
        "",
        [POSITIONS],
    ),
    Mutant(
        "loss-not-told",
        "a loss with something in work is told",
        "tfmq/client/consumer/positions.py",
        "        if open_ended:\n            self._lost.add(name)\n",
        "",
        [POSITIONS],
    ),
)


CONSUMERS: Final = (
    Mutant(
        "broadcast-shares-a-group",
        "of a broadcast each machine has all partitions, and offsets of its own",
        _OPTIONS,
        "    if broadcast:\n        own =",
        "    if broadcast and not group:\n        own =",
        [OPTIONS],
    ),
    Mutant(
        "expression-over-tags-is-one-tag",
        '"a || b" is both',
        _OPTIONS,
        "        found.update(part.strip() for part in each.split(TAG_SEPARATOR))\n",
        "        found.add(each)\n",
        [OPTIONS],
    ),
    Mutant(
        "star-is-a-tag",
        '"*" is every message',
        _OPTIONS,
        "    if EVERY_TAG in found:\n        return None\n",
        "",
        [OPTIONS],
    ),
    Mutant(
        "zookeeper-s-members-save-at-the-broker",
        "a group that ZooKeeper coordinates has its offsets there",
        _OPTIONS,
        "given.offsets if by_broker or given.offsets != BROKER else given.coordinator",
        "given.offsets",
        [OPTIONS],
    ),
    Mutant(
        "filter-s-failure-loses-what-stands-before",
        "where a filter raises, what stands before that message comes first",
        "tfmq/client/consumer/fetcher.py",
        "            return Batch(batch.name, kept, place), place\n",
        "            return Batch(batch.name, [], place), place\n",
        ["tests/client/consumer/test_fetcher.py"],
    ),
    Mutant(
        "filter-s-failure-passes-its-message",
        "the message at which a filter raises is asked about again",
        "tfmq/client/consumer/fetcher.py",
        "            place = ReadPosition(message.offset, message.ordinal, message.origin.epoch)\n",
        "            place = ReadPosition(message.next_offset, message.ordinal + 1, message.origin.epoch)\n",
        ["tests/client/consumer/test_fetcher.py", CONSUMING],
    ),
    Mutant(
        "filter-keeps-what-it-says-no-to",
        "what a filter says no to is left out",
        "tfmq/client/consumer/fetcher.py",
        "            if wanted:\n",
        "            if wanted or message:\n",
        ["tests/client/consumer/test_fetcher.py"],
    ),
    Mutant(
        "lag-of-what-was-read-ahead",
        "lag counts what was not handed out",
        "tfmq/client/consumer/core.py",
        "    places = {name: positions.delivered_position(name) for name in fetcher.partitions}\n",
        "    places = {name: fetcher.partitions[name].position for name in fetcher.partitions}\n",
        ["tests/client/consumer/test_core.py", START],
    ),
    Mutant(
        "lag-counts-bytes",
        "lag counts messages",
        "tfmq/client/consumer/core.py",
        "max(0, end - ordinal)",
        "max(0, ends[name].result().offset - place.offset)",
        ["tests/client/consumer/test_core.py", START],
    ),
)

GOING_BACK: Final = (
    Mutant(
        "stop-drops-what-is-being-taken",
        "stop() at any moment passes over nothing",
        _CONSUMING,
        "        self.positions.stop()\n",
        ("        self.positions.stopped = True\n        self.positions.drop_ready_batch()\n"),
        ["tests/client/test_stop_anywhere.py"],
    ),
    Mutant(
        "rollback-hands-out-nothing-again",
        "what a rolled-back transaction had of a consumer is handed out again",
        "tfmq/client/transaction/transaction.py",
        "            each.mark_rolled_back()\n",
        "            pass\n",
        [GOING],
    ),
    Mutant(
        "gone-back-before-the-broker-said-where",
        "nothing is handed out before the broker has said where the group stands",
        "tfmq/client/consumer/core.py",
        "        core.suspended.add(name)\n",
        "",
        [GOING],
    ),
    Mutant(
        "commit-beside-transactions",
        "handlers save by commit() or in transactions, not by both",
        _CONSUMING,
        '        self.positions.ack_trackers.check_commit_method("commit")\n',
        "",
        [GOING],
    ),
    Mutant(
        "save-overtakes-one-that-was-broken-off",
        "an older place never comes last",
        _OFFSETS,
        "                yield from self._save_after_former(lambda: storage.save(group, generation, offsets), until)\n",
        "                yield from run_work(self._run, lambda: storage.save(group, generation, offsets))\n",
        [OFFSETS],
    ),
    Mutant(
        "another-worker-does-not-wait-for-on-assigned",
        "nothing of what came is handed out before on_assigned returned",
        _CONSUMING,
        (
            "        held = self.suspended if self.membership is None else self.suspended |"
            " self.rebalance.unannounced\n"
        ),
        "        held = self.suspended\n",
        [HANDOVER],
    ),
)

GROUP_PLACES: Final = PLACES + CONSUMERS + GOING_BACK
