"""Planted bugs: transactions in the broker: applying, contiguous appends, locked offsets, the start."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

EFFECT_WORK: Final = "tests/broker/test_partition.py"
PARTITION: Final = "tests/broker/test_partition.py"
WORK: Final = "tests/broker/test_partition.py"
DESTINATION: Final = "tests/broker/test_apply_target.py"
OFFSET_EFFECTS: Final = "tests/broker/groups/test_offset_effects.py"
REGISTER: Final = "tests/broker/test_catalog_state.py"
CATALOG: Final = "tests/broker/test_catalog.py"
TRANSACTIONS: Final = "tests/broker/test_transaction_commands.py"
DECIDED: Final = "tests/broker/test_committed_transactions.py"
OPENING: Final = "tests/broker/test_startup.py"

PARTITIONS: Final = (
    Mutant(
        "sources-share-an-append",
        "an append names one source, so work of several sources never shares one",
        "tfmq/broker/partition.py",
        "        return work.source is first.source or work.source[:2] == first.source[:2]\n",
        "        return True\n",
        [WORK, EFFECT_WORK],
    ),
    Mutant(
        "joined-append-names-the-first-place",
        "a joined append carries the position of its last part",
        "tfmq/broker/partition.py",
        "        return self.items[-1][0].source\n",
        "        return self.items[0][0].source\n",
        [WORK, EFFECT_WORK],
    ),
    Mutant(
        "an-effect-passes-one-that-was-refused",
        "the highest position counts, so nothing is applied ahead of a part that was not written",
        "tfmq/broker/partition.py",
        ("        if not refused.is_effect:\n            return []\n"),
        ("        if refused.is_effect or not refused.is_effect:\n            return []\n"),
        [EFFECT_WORK],
    ),
    Mutant(
        "same-effect-twice-in-an-append",
        "a part that already waits in the same append is not written again",
        "tfmq/broker/partition.py",
        "        if staged.items and position <= staged.source[2:]:\n",
        "        if staged.items and position <= (-1, -1):\n",
        [EFFECT_WORK],
    ),
    Mutant(
        "seam-between-effects-not-looked-at",
        "two adjacent batches never form a block trailer of the partition",
        "tfmq/broker/partition.py",
        (
            "            if batches and before is not None and self._forms_trailer_header(before, batches[0]):\n"
            "                raise FlushStagedFirst\n"
        ),
        "",
        [EFFECT_WORK],
    ),
    Mutant(
        "stopped-partition-calls-it-applied",
        "a batch that a stopped partition has written without fsync is not reported as applied",
        "tfmq/broker/partition.py",
        "            if partition.log.stopped is not None:\n",
        "            if partition.log.closed:\n",
        [EFFECT_WORK],
    ),
    Mutant(
        "sends-pass-a-hold",
        "the messages of one large transaction are contiguous",
        "tfmq/broker/partition.py",
        "        if self._exclusive_source is not None and not _is_effect_of(work, self._exclusive_source):\n",
        "        if self._exclusive_source is not None and work.alone:\n",
        [PARTITION, DECIDED],
    ),
    Mutant(
        "effects-of-others-pass-a-hold",
        "the messages of one large transaction are contiguous, also where delayed ones become due meanwhile",
        "tfmq/broker/partition.py",
        "    return work.is_effect and work.source[:2] == source\n",
        "    return work.is_effect\n",
        [PARTITION],
    ),
    Mutant(
        "unsure-place-called-settled",
        "nothing is deleted because of messages that a stopped partition may still lose",
        "tfmq/broker/apply_target.py",
        "        return None if partition is None else partition.log.settled(*source)\n",
        "        return None if partition is None else partition.log.applied(*source)\n",
        [DESTINATION],
    ),
    Mutant(
        "hold-outlasts-a-refusal",
        "a large transaction that cannot continue blocks no other append",
        "tfmq/broker/partition.py",
        ("        if source == self._exclusive_source:\n            self.end_exclusive()\n"),
        "",
        [PARTITION],
    ),
    Mutant(
        "deleted-partition-keeps-waiting-requests",
        "requests that wait in a topic that is deleted get the error",
        "tfmq/broker/partition.py",
        ("        self.deleted = True\n        self.end_exclusive()\n"),
        "        self.deleted = True\n",
        [PARTITION],
    ),
    Mutant(
        "effects-wait-through-a-resumption",
        "a later part is not written before those that a resumption cut away",
        "tfmq/broker/partition.py",
        ("            self._reject_effects()\n            done(result, error)\n"),
        "            done(result, error)\n",
        [PARTITION],
    ),
)

TARGETS: Final = (
    Mutant(
        "gone-topic-called-stopped",
        "messages for a deleted topic are dropped, not waited for",
        "tfmq/broker/apply_target.py",
        (
            "        if key != ARRIVALS_KEY and self._is_deleted(incarnation):\n"
            '            raise UnknownTopic(TOPIC_DELETED.format(name=f"of incarnation {incarnation}"))\n'
        ),
        (
            "        if self._is_deleted(-1 - incarnation) and incarnation < 0:\n"
            '            raise UnknownTopic(TOPIC_DELETED.format(name=f"of incarnation {incarnation}"))\n'
        ),
        [DESTINATION, DECIDED],
    ),
    Mutant(
        "unopened-partition-called-gone",
        "messages for a partition that could not be opened wait for its resumption",
        "tfmq/broker/apply_target.py",
        "        return row is None or (row.state == DELETING and self._topics.by_incarnation(incarnation) is None)\n",
        "        return row is None or self._topics.find_partition(incarnation, 0) is None\n",
        [DESTINATION, DECIDED],
    ),
    Mutant(
        "unsafe-tail-called-durable",
        "data that a full disk kept from being made durable again is not reported as durable",
        "tfmq/broker/apply_target.py",
        "    return end <= log.forced_offset and not (log.waits_for_space and end >= log.end_offset)\n",
        "    return end <= log.forced_offset\n",
        [DESTINATION],
    ),
    Mutant(
        "reserved-space-given-away",
        "a decision is refused while there is no space for it",
        "tfmq/broker/apply_target.py",
        "        if self._reserved_bytes + size_bytes > ",
        "        if size_bytes > ",
        [DESTINATION],
    ),
    Mutant(
        "transaction-of-an-older-generation",
        "offsets in a transaction must be of partitions that their member owns",
        "tfmq/broker/groups/offset_commands.py",
        (
            "        if others:\n"
            "            raise _not_owned_error(group, member_id, others)\n"
            "        places = [place for _, place in known.values()]\n"
        ),
        "        places = [place for _, place in known.values()]\n",
        [DESTINATION, TRANSACTIONS],
    ),
    Mutant(
        "topic-s-end-not-reported-to-transactions",
        "a partition that accepts writes again gets what was decided meanwhile",
        "tfmq/broker/topic_admin.py",
        "                self._resumed(now.log.log_id)\n",
        "",
        [DECIDED],
    ),
)

OFFSETS_INSIDE: Final = (
    Mutant(
        "offsets-of-a-transaction-saved-twice",
        "offsets of a transaction are committed once, in the order of decisions",
        "tfmq/broker/catalog_state.py",
        (
            "        if journal_id in self.applied_lsns and position <= self.applied_lsns[journal_id]:\n"
            "            return\n"
        ),
        "",
        [REGISTER, OFFSET_EFFECTS],
    ),
    Mutant(
        "places-left-out-of-the-snapshot",
        "positions of committed offsets survive in the snapshot with them",
        "tfmq/broker/catalog_state.py",
        (
            "        return pack((*before, self.journal_id, applied, self.delay_store, list(self.schedules), "
            "self.node, released))\n"
        ),
        (
            "        return pack(\n"
            "            (*before, self.journal_id, applied[:0], self.delay_store, list(self.schedules), self"
            ".node, released)\n"
            "        )\n"
        ),
        [REGISTER, OFFSET_EFFECTS],
    ),
    Mutant(
        "later-offsets-pass-refused-ones",
        "offsets of a later decision are not committed before those of an earlier one",
        "tfmq/broker/groups/offsets.py",
        "            queue, self._queue = [*queue, *self._queue], []\n",
        "            queue = list(queue)\n",
        [OFFSET_EFFECTS],
    ),
    Mutant(
        "offsets-in-doubt-are-read",
        "offsets in doubt are not returned to any reader",
        "tfmq/broker/groups/offsets.py",
        "        self.require_unlocked(request.group, keys)\n",
        "",
        [DESTINATION, TRANSACTIONS],
    ),
    Mutant(
        "offsets-in-doubt-are-saved",
        "offsets in doubt are changed by no other client",
        "tfmq/broker/groups/offsets.py",
        "        self.require_unlocked(group, [place[:2] for place in places])\n",
        "",
        [DESTINATION, TRANSACTIONS],
    ),
    Mutant(
        "lock-ends-with-another-transaction",
        "an offset that two transactions have in doubt is unlocked when both have ended",
        "tfmq/broker/groups/offsets.py",
        "            holders.pop(epoch, None)\n",
        "            holders.clear()\n",
        ["tests/broker/groups/test_offsets.py"],
    ),
    Mutant(
        "catalog-without-fsync-read-as-durable",
        "an offset that was read never goes back, also after a full disk",
        "tfmq/broker/catalog.py",
        "        if self.log.waits_for_space:\n",
        "        if self.log.closed:\n",
        [CATALOG],
    ),
)

COMMANDS: Final = (
    Mutant(
        "batch-not-checked-when-it-lands",
        "a damaged batch is refused before its transaction is decided",
        "tfmq/broker/transaction_commands.py",
        "        self._apply_target.check_batch(partition, batch)\n",
        "",
        [TRANSACTIONS],
    ),
    Mutant(
        "repeat-refused-for-a-topic-that-went",
        "a request that was acknowledged once is acknowledged again, also when its topics were deleted",
        "tfmq/broker/transaction_commands.py",
        "(request.producer_id, request.number, now_ms) is None:\n",
        "(request.producer_id, request.number, now_ms) is None or now_ms:\n",
        [TRANSACTIONS],
    ),
    Mutant(
        "lost-session-not-reported",
        "a local transaction ends with its session",
        "tfmq/broker/transaction_commands.py",
        "        self.coordinator.session_closed(session)\n",
        "",
        [TRANSACTIONS],
    ),
    Mutant(
        "body-freed-while-it-is-needed",
        "the bytes of a batch stay unchanged until they are in the journal",
        "tfmq/broker/transaction_commands.py",
        "    data = bytes(body)\n    reply.body_done()\n    return data\n",
        "    reply.body_done()\n    return body\n",
        [TRANSACTIONS],
    ),
    Mutant(
        "quota-kept-by-an-answer",
        "the pending bytes of a peer are released with the reply",
        "tfmq/broker/admission.py",
        "            self.release(session, size)\n",
        "",
        [TRANSACTIONS],
    ),
)

STARTS: Final = (
    Mutant(
        "missing-journal-made-anew",
        "a start without the journal of the data folder is refused",
        "tfmq/broker/startup.py",
        "    if broker.catalog.state.journal_id and not broker.disk.exists(join(broker.meta, NEW_JOURNAL_MARKER)):\n",
        "    if broker.catalog.state.journal_id < 0:\n",
        [OPENING],
    ),
    Mutant(
        "another-broker-s-journal-taken",
        "a start with the journal of another data folder is refused",
        "tfmq/broker/startup.py",
        "    if register.journal_id and register.journal_id != store.journal_id:\n",
        "    if register.journal_id < 0:\n",
        [OPENING],
    ),
    Mutant(
        "older-journal-taken",
        "a journal older than the partitions is refused: its next decisions would seem to be applied",
        "tfmq/broker/startup.py",
        "        if position is not None and position[0] >= store.end_lsn:\n",
        "        if position is not None and position[0] < 0:\n",
        [OPENING],
    ),
    Mutant(
        "journal-begun-without-the-word",
        "an interrupted first start can be repeated",
        "tfmq/broker/startup.py",
        (
            "    path = join(broker.meta, marker)\n"
            "    if not broker.disk.exists(path):\n"
            "        broker.disk.create(path).close()\n"
            "        broker.disk.force_folder(broker.meta)\n"
        ),
        (
            "    path = join(broker.meta, marker)\n"
            "    if not broker.disk.exists(path):\n"
            "        broker.disk.force_folder(broker.meta)\n"
        ),
        [OPENING],
    ),
    Mutant(
        "journal-s-ids-given-out-again",
        "no id is given out twice, also with a catalog from an older backup",
        "tfmq/broker/startup.py",
        '    _skip_ids(broker, store.producer_states.highest_id, "the journal")\n',
        "",
        [OPENING],
    ),
    Mutant(
        "listener-before-what-was-decided",
        "decided transactions are written before the first request is served",
        "tfmq/broker/startup.py",
        "    broker.end_turn()\n    if not recovered:\n",
        "    if False:\n",
        [DECIDED],
    ),
    Mutant(
        "start-waits-for-workers",
        "a start does itself what would otherwise run in a worker",
        "tfmq/broker/runtime.py",
        "        (run_immediately if self.is_starting else run)(work, ended)\n",
        "        run(work, ended)\n",
        [DECIDED],
    ),
    Mutant(
        "journal-abandoned-at-a-stop",
        "a stop makes durable what the broker knows of ended transactions",
        "tfmq/broker/broker.py",
        '        close_cleanly(self.transaction_commands.store, "the transaction journal")\n',
        '        self.transaction_commands.store.abandon("the end")\n',
        [DECIDED, TRANSACTIONS, OPENING],
    ),
)

EFFECTS: Final = PARTITIONS + TARGETS + OFFSETS_INSIDE + COMMANDS + STARTS
