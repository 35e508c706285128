"""Planted bugs: the broker: when it acknowledges, and batches that are repeated or out of order."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

WRITES: Final = "tests/broker/test_produce.py"
PRODUCERS: Final = "tests/broker/test_producer_state.py"
POLLS: Final = "tests/broker/test_fetch.py"
OFFSETS: Final = "tests/broker/groups/test_offsets.py"
LEASES: Final = "tests/broker/test_catalog.py"
CHANGES: Final = "tests/broker/test_topic_admin.py"
CATALOG: Final = "tests/broker/test_catalog.py"
RESERVE: Final = "tests/broker/test_reserve.py"

ANSWERS: Final = (
    Mutant(
        "acked-before-the-fsync",
        "a send with acks=synced is acknowledged after the fsync of its batch",
        "tfmq/broker/produce.py",
        "        if self._request.acks == ACKS_SYNCED:\n            if self._request.trace is not None:\n",
        "        if self._request.acks > ACKS_SYNCED:\n            if self._request.trace is not None:\n",
        [WRITES],
    ),
    Mutant(
        "acked-before-the-write",
        "a send with acks=written is acknowledged after its batch is written to the log",
        "tfmq/broker/produce.py",
        "        return [_new(Batch, fields)]\n",
        "        if request.acks != ACKS_NONE:\n            self._reply.ok([], request.acks, False, 0, 0)\n"
        "        return [_new(Batch, fields)]\n",
        [WRITES],
    ),
    Mutant(
        "repeat-acked-before-the-fsync",
        "a repeated request waits for the durability that it asks for",
        "tfmq/broker/produce.py",
        (
            "        if repeat.first_offset_walk is None:\n"
            "            self._reply_when_durable(partition, result.end_offset, result.positions, True, result)\n"
        ),
        (
            "        if repeat.first_offset_walk is None:\n"
            "            self._reply_when_durable(partition, 0, result.positions, True, result)\n"
        ),
        [WRITES],
    ),
    Mutant(
        "failed-fsync-called-synced",
        "a failed fsync is an error to every waiting request",
        "tfmq/broker/produce.py",
        (
            "        if error is not None:\n"
            "            self.rejected(client_error(error, UNKNOWN))\n"
            "        else:\n"
            "            self._reply_ok(positions, self._session.synced_durability, *fields)\n"
        ),
        "        self._reply_ok(positions, self._session.synced_durability, *fields)\n",
        [WRITES],
    ),
    Mutant(
        "durability-overstated",
        "the reply names the durability that was reached",
        "tfmq/broker/produce.py",
        "            durable = end <= partition.log.forced_offset\n",
        "            durable = True\n",
        [WRITES],
    ),
    Mutant(
        "refused-append-acked",
        "a failed append is an error to every sender in it",
        "tfmq/broker/partition.py",
        ("            self._reject_staged(staged, _append_error(error))\n            return\n"),
        "            return\n",
        [WRITES],
    ),
    Mutant(
        "unknown-outcome-called-not-done",
        'an error with an unknown outcome is never reported as "not done"',
        "tfmq/broker/partition.py",
        "        known.outcome = UNKNOWN  # part of the append may be written\n",
        "        known.outcome = NOT_DONE\n",
        [WRITES, "tests/broker/test_reply.py", "tests/broker/test_promises.py"],
    ),
    Mutant(
        "broker-skips-the-check-of-batches",
        "a damaged batch is refused before the first byte is written",
        "tfmq/broker/partition.py",
        '            self.log.check(batch, b"" if before is None else tail_of(before))\n',
        "            len(batch.data)\n",
        [WRITES],
    ),
    Mutant(
        "flush-never-due",
        "messages are fsynced after N messages or T seconds",
        "tfmq/broker/partition.py",
        "        if due is None:\n            return\n        if due",
        "        if due is None or due:\n            return\n        if due",
        ["tests/broker/test_request_handler.py"],
    ),
    Mutant(
        "append-while-the-roll-runs",
        "while a worker changes files, nothing is appended",
        "tfmq/broker/partition.py",
        "        while self._queue and not self.file_work_running:\n",
        "        while self._queue:\n",
        ["tests/broker/test_partition.py"],
    ),
    Mutant(
        "catalog-acked-before-the-fsync",
        "a topic, a lease or a generation is acknowledged after its fsync",
        "tfmq/broker/catalog.py",
        "        if offset <= self.log.forced_offset:\n            durable(None)\n",
        "        if offset <= self.log.end_offset:\n            durable(None)\n",
        [OFFSETS, LEASES],
    ),
    Mutant(
        "catalog-error-swallowed",
        "a failed fsync of the catalog is an error to every waiting request",
        "tfmq/broker/catalog.py",
        "            known = None if error is None else reply.client_error(error, UNKNOWN)\n",
        "            known = None\n",
        [CATALOG, LEASES],
    ),
)

STREAMS: Final = (
    Mutant(
        "gap-accepted",
        "a gap in a producer's sequences is refused",
        "tfmq/broker/producer_state.py",
        (
            "            raise SequenceGap(expected=entry.next_sequence, found=sequence)\n"
            "        return _find_duplicate(entry, sequence, records)\n"
        ),
        ("            return None\n        return _find_duplicate(entry, sequence, records)\n"),
        [PRODUCERS],
    ),
    Mutant(
        "gap-within-a-turn-accepted",
        "a gap in a producer's sequences is refused, also between batches of one turn",
        "tfmq/broker/produce.py",
        "        elif request.sequence > expected and request.acks != ACKS_NONE:\n"
        "            raise SequenceGap(expected=expected, found=request.sequence)\n",
        "",
        [WRITES],
    ),
    Mutant(
        "repeat-appended-again",
        "a batch that is sent again is stored once",
        "tfmq/broker/produce.py",
        (
            "            if repeat is not None:\n"
            "                self._reply_to_duplicate(partition, repeat)\n"
            "                return None\n"
        ),
        "",
        [WRITES],
    ),
    Mutant(
        "repeat-within-a-turn-appended-again",
        "a batch that is sent twice in one turn is stored once",
        "tfmq/broker/produce.py",
        (
            "        elif request.sequence < expected:\n"
            "            raise FlushStagedFirst\n"
            "        elif request.sequence > expected and request.acks != ACKS_NONE:\n"
        ),
        "        elif request.sequence > expected and request.acks != ACKS_NONE:\n",
        [WRITES],
    ),
    Mutant(
        "partly-known-batch-accepted",
        "a batch that is stored in part is refused",
        "tfmq/broker/producer_state.py",
        ("    if sequence + records > entry.next_sequence:\n        raise BadRequest(\n"),
        ("    if sequence + records > entry.next_sequence + records:\n        raise BadRequest(\n"),
        [PRODUCERS],
    ),
    Mutant(
        "closed-id-accepted",
        "a producer id that has a successor never sends again",
        "tfmq/broker/producer_state.py",
        "        if entry.successor:\n            raise StaleProducer",
        "        if entry.successor < 0:\n            raise StaleProducer",
        [PRODUCERS],
    ),
    Mutant(
        "unknown-id-accepted",
        "a producer id that was never leased, or was leased too long ago, is refused",
        "tfmq/broker/producer_state.py",
        ("            self.require_known_new(producer_id, now_ms())\n            if sequence and not gaps:\n"),
        "            if sequence and not gaps:\n",
        [PRODUCERS],
    ),
    Mutant(
        "unknown-id-accepted-in-the-middle",
        "an unknown producer id begins at sequence 0",
        "tfmq/broker/producer_state.py",
        "            if sequence and not gaps:\n                raise UnknownProducer(producer_id=producer_id)\n",
        "",
        [PRODUCERS],
    ),
    Mutant(
        "forgotten-id-taken-for-new",
        "a forgotten producer id is never taken for a new one",
        "tfmq/broker/producer_state.py",
        "        self.floor = max(self.floor, producer_id)\n",
        "        self.floor = min(self.floor, producer_id)\n",
        [PRODUCERS],
    ),
    Mutant(
        "streams-not-in-the-snapshot",
        "repeated batches are recognised after a restart",
        "tfmq/broker/producer_state.py",
        ("            for producer_id, each in self._entries.items()\n        ]\n"),
        ("            for producer_id, each in ()\n        ]\n"),
        [PRODUCERS],
    ),
    Mutant(
        "successor-acked-before-the-fsync",
        "a successor is acknowledged after the closing of the old id is durable",
        "tfmq/broker/produce.py",
        "    partition.when_durable(partition.log.end_offset, done)\n",
        "    done(None)\n",
        [WRITES],
    ),
    Mutant(
        "successor-before-what-was-sent",
        "a successor is recorded by an append of its own, after what was sent before it",
        "tfmq/broker/partition.py",
        "        if work.alone or first.alone or self.size_bytes",
        "        if self.size_bytes",
        [WRITES, "tests/broker/test_partition.py"],
    ),
    Mutant(
        "effect-applied-twice",
        "messages of a transaction or timer are appended once",
        "tfmq/broker/partition.py",
        "        if applied is not None and position <= applied:\n",
        "        if applied is None and position < (0, 0):\n",
        ["tests/broker/test_partition.py"],
    ),
    Mutant(
        "id-is-its-own-successor",
        "a producer gets another id where an older copy of the data folder could give out the same one",
        "tfmq/broker/catalog.py",
        "            if self._next <= in_use < self._end:\n                self._next = in_use + 1\n",
        "",
        [f"{LEASES}::test_an_id_that_a_client_has_from_a_later_copy_gets_another_one_as_its_successor"],
    ),
    Mutant(
        "ranges-of-ids-longer-than-the-clock",
        "a copy that is started two seconds later gives out no id twice",
        "tfmq/broker/catalog.py",
        "        self._range_ids = min(2 * self._range_ids, ID_RANGE_MAX) if used_fast else IDS_PER_SECOND\n",
        "        self._range_ids = ID_RANGE_MAX\n",
        [f"{LEASES}::test_an_older_copy_that_is_started_later_gives_no_id_again"],
    ),
    Mutant(
        "older-copy-gives-ids-again",
        "an older copy of a data folder gives out no id that the folder gave out later",
        "tfmq/broker/catalog.py",
        "        begin = self._range_start()\n",
        "        begin = self._catalog.state.next_id\n",
        [LEASES],
    ),
    Mutant(
        "stop-waits-for-topics",
        "a stop does not wait for topics that are not created yet",
        "tfmq/broker/partition_dirs.py",
        "                if self.is_stopping:\n",
        "                if False:\n",
        [CHANGES],
    ),
    Mutant(
        "leases-not-fsynced",
        "no id is given out before its range is durable",
        "tfmq/broker/catalog.py",
        "        self._catalog.submit((LEASE, end, self._clock.wall_ms()), durable)\n",
        (
            "        self._catalog.submit((LEASE, end, self._clock.wall_ms()), lambda error: None)\n"
            "        durable(None)\n"
        ),
        [LEASES],
    ),
    Mutant(
        "lease-given-twice",
        "leased ranges never overlap",
        "tfmq/broker/catalog.py",
        "            self._next += count\n",
        "            self._next += count - 1\n",
        [LEASES],
    ),
    Mutant(
        "incarnation-ignored",
        "nothing addressed to a deleted topic is stored in a new topic of the same name",
        "tfmq/broker/topics.py",
        "        if topic.incarnation != incarnation:\n",
        "        if incarnation < 0:\n",
        [POLLS, CHANGES],
    ),
)

ROOM: Final = (
    Mutant(
        "deletion-needs-free-room",
        "a topic can be deleted on a disk without a free byte",
        "tfmq/broker/catalog.py",
        "        if urgent and self.reserve.release_piece():\n",
        "        if urgent and not self.reserve:\n",
        [RESERVE],
    ),
    Mutant(
        "reserve-for-everything",
        "space that is reserved for deletions is not used by other changes",
        "tfmq/broker/catalog.py",
        "        urgent = [change for change in queue if change.frees_space] if isinstance(error, DiskFull) else []\n",
        "        urgent = list(queue) if isinstance(error, DiskFull) else []\n",
        [RESERVE],
    ),
    Mutant(
        "start-refused-by-a-cut-short-deletion",
        "a deletion that a full disk interrupted does not prevent the next start",
        "tfmq/broker/catalog.py",
        "            if entry[0] not in FREES_SPACE or not self.reserve.release_piece():\n",
        "            if entry[0] in FREES_SPACE or not self.reserve.release_piece():\n",
        [RESERVE],
    ),
    Mutant(
        "reserve-given-away-where-it-cannot-grow",
        "space for deletions that cannot be restored in full stays as it is",
        "tfmq/broker/reserve.py",
        "            file.truncate(size)\n            return size\n",
        "            file.truncate(0)\n            return 0\n",
        [RESERVE],
    ),
    Mutant(
        "reserve-of-nothing-but-zeros",
        "space for deletions is really allocated, also where a file system compresses",
        "tfmq/broker/reserve.py",
        "[shake_256(NAME.encode()).digest(SIZE_BYTES)[size:]]",
        "[bytes(SIZE_BYTES - size)]",
        [RESERVE],
    ),
    Mutant(
        "reserve-never-made-again",
        "the space for deletions is allocated again while the broker runs",
        "tfmq/broker/catalog.py",
        "        self.reserve.refill()\n",
        "",
        [RESERVE],
    ),
)

BROKER: Final = ANSWERS + STREAMS + ROOM
