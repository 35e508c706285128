"""Planted bugs: around the client's transactions: batches in flight, check-back, offsets, XA."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

CORE: Final = "tests/client/transaction/test_transaction.py"
ENDING: Final = "tests/client/transaction/test_commit.py"
BATCH: Final = "tests/client/transaction/test_pipeline.py"
CHECKS: Final = "tests/client/transaction/test_check_back.py"
GATHERING: Final = "tests/client/transaction/test_pipeline.py"
OFFSETS: Final = "tests/client/consumer/test_transaction_offsets.py"
PIPELINE: Final = "tests/client/transaction/test_transaction_pipeline.py"
STREAMS: Final = "tests/client/transaction/test_pipeline.py"
XA: Final = "tests/client/producer/test_xa.py"

_WAY: Final = (
    Mutant(
        "batches-go-out-of-order-after-a-pause",
        "batches of a partition sender are sent in order, also repeated ones",
        "tfmq/client/transaction/pipeline.py",
        "        self._queue.extendleft(batch for batch, _ in reversed(self._in_flight))\n",
        "        self._queue.extend(batch for batch, _ in self._in_flight)\n",
        [PIPELINE, CORE, ENDING],
    ),
    Mutant(
        "batch-of-no-transaction",
        "what is sent in a transaction is not visible before its commit",
        "tfmq/client/transaction/pipeline.py",
        "encoded.blocks, batch.due_field, self.epoch)",
        "encoded.blocks, batch.due_field, None)",
        [PIPELINE, CORE, ENDING],
    ),
    Mutant(
        "local-begin-repeated-over-a-new-connection",
        "a local transaction ends with the connection that it was begun on",
        "tfmq/client/transaction/pipeline.py",
        "                self._link, request, until=until, in_background=True, repeat=named\n",
        "                self._link, request, until=until, in_background=True, repeat=True\n",
        [PIPELINE, CORE, ENDING],
    ),
    Mutant(
        "transactions-of-any-size-in-memory",
        "a transaction may be larger than memory",
        "tfmq/client/transaction/pipeline.py",
        "        return self.unacked_bytes < BUFFER_BYTES\n",
        "        return True\n",
        [PIPELINE, CORE, ENDING],
    ),
    Mutant(
        "pipeline-s-stream-given-back-with-a-flight",
        "a producer id is used again only if all of its requests were acknowledged",
        "tfmq/client/transaction/pipeline.py",
        "        if producer_sequence is not None and not self._in_flight and self.failure is None:\n",
        "        if producer_sequence is not None:\n",
        [PIPELINE, CORE, ENDING],
    ),
    Mutant(
        "landed-batch-counted-as-under-way",
        "memory that is free again is given to waiting callers",
        "tfmq/client/transaction/pipeline.py",
        ("            self._in_flight_bytes -= batch.size_bytes\n            self.unacked_bytes -= batch.size_bytes\n"),
        "            self._in_flight_bytes -= batch.size_bytes\n",
        [PIPELINE, CORE, ENDING],
    ),
    Mutant(
        "stream-used-after-the-broker-forgot-it",
        "a producer id that the broker may have forgotten is not used again",
        "tfmq/client/transaction/pipeline.py",
        "            if producer_sequence.used_at > oldest:\n",
        "            if producer_sequence.used_at <= producer_sequence.used_at or oldest:\n",
        [STREAMS],
    ),
    Mutant(
        "stream-places-all-at-its-beginning",
        "the sequences of a transaction have no gap",
        "tfmq/client/transaction/pipeline.py",
        (
            "                batch.assign_sequence(producer_sequence.producer_id, producer_sequence.sequence)\n"
            "                producer_sequence.sequence += batch.count\n"
        ),
        (
            "                batch.assign_sequence(producer_sequence.producer_id, producer_sequence.sequence)\n"
            "                producer_sequence.sequence += 1\n"
        ),
        [STREAMS, PIPELINE, CORE, ENDING],
    ),
    Mutant(
        "bytes-kept-after-the-broker-has-them",
        "a transaction may be larger than memory",
        "tfmq/client/transaction/pipeline.py",
        "            self.encoded = EncodedRecords(bytearray(), [], encoded.record_size, ends)\n",
        "            self.encoded = EncodedRecords(encoded.data, [], encoded.record_size, ends)\n",
        [BATCH, CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "unknown-offset-reported",
        "an offset is reported only where the commit returned it",
        "tfmq/client/transaction/pipeline.py",
        "        return super().offset_of(index) if index < self.first_block_count else None\n",
        "        return super().offset_of(index)\n",
        [BATCH, CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "topic-made-anew-gets-the-rest",
        "no part of a transaction is stored in another topic than the rest",
        "tfmq/client/transaction/pipeline.py",
        "        self._topics[name] = entry.metadata\n",
        "",
        [GATHERING, CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "put-back-after-later-batches",
        "order is kept in each partition, also after a refusal",
        "tfmq/client/transaction/pipeline.py",
        "        self._full[:0] = batches\n",
        "        self._full += batches\n",
        [GATHERING],
    ),
    Mutant(
        "closed-batch-still-shared",
        "nothing is added to a batch that is in flight",
        "tfmq/client/transaction/pipeline.py",
        "        if shared.get(batch.topic) is batch:\n            del shared[batch.topic]\n",
        "",
        [GATHERING, CORE, ENDING, PIPELINE],
    ),
)

_BESIDE: Final = (
    Mutant(
        "check-that-says-nothing-commits",
        "a check that returns nothing decides nothing",
        "tfmq/client/transaction/check_back.py",
        "    make = DECISION_REQUESTS.get(decision)\n",
        '    make = DECISION_REQUESTS.get(decision or "commit")\n',
        [CHECKS],
    ),
    Mutant(
        "check-that-raises-rolls-back",
        "a check that raises decides nothing",
        "tfmq/client/transaction/check_back.py",
        '            log.exception("The check of transaction %s raised; it is called again later.", in_doubt.xid)\n'
        "            continue\n",
        '            log.exception("The check of transaction %s raised; it is called again later.", in_doubt.xid)\n'
        '            return "rollback"\n',
        [CHECKS],
    ),
    Mutant(
        "check-says-rollback-and-it-commits",
        "the outcome that a check returns is applied",
        "tfmq/client/transaction/check_back.py",
        '    "rollback": lambda asked: RollbackTransaction(asked.xid, asked.epoch, False),\n',
        '    "rollback": lambda asked: CommitTransaction(asked.xid, asked.epoch, False, False, []),\n',
        [CHECKS],
    ),
    Mutant(
        "check-decides-another-epoch",
        "a check decides the transaction that it was called for",
        "tfmq/client/transaction/check_back.py",
        '    "commit": lambda asked: CommitTransaction(asked.xid, asked.epoch, False, False, []),\n',
        '    "commit": lambda asked: CommitTransaction(asked.xid, 0, False, False, []),\n',
        [CHECKS],
    ),
    Mutant(
        "checks-end-with-an-outage",
        "checks continue when the broker is back",
        "tfmq/client/transaction/check_back.py",
        "            logged_code = error.code\n            yield Wait((), PAUSE_SECONDS)\n",
        "            return\n",
        [CHECKS],
    ),
    Mutant(
        "offsets-of-an-automatic-consumer",
        "a consumer that commits automatically cannot be part of a transaction",
        "tfmq/client/consumer/external_offsets.py",
        ('    membership = consuming.require_membership()\n    if consuming.options.commits != "manual":\n'),
        ('    membership = consuming.require_membership()\n    if consuming.options.commits == "never":\n'),
        [OFFSETS],
    ),
    Mutant(
        "offsets-kept-elsewhere",
        "offsets that the broker does not store cannot be part of a transaction",
        "tfmq/client/consumer/external_offsets.py",
        "    if in_broker and consuming.options.storage is not None:\n",
        "    if in_broker and consuming.options.storage is consuming:\n",
        [OFFSETS],
    ),
    Mutant(
        "offsets-of-a-failed-member",
        "a consumer whose membership has failed adds no offsets to a transaction",
        "tfmq/client/consumer/external_offsets.py",
        "    if membership.failure is not None:\n        raise membership.failure\n",
        "",
        [OFFSETS],
    ),
    Mutant(
        "consumer-continues-from-a-rolled-back-offset",
        "a consumer continues only from committed offsets",
        "tfmq/client/transaction/transaction.py",
        "                if self.state in states.SUCCEEDED:\n",
        "                if self.state in states.FINISHED:\n",
        [OFFSETS, CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "branch-prepared-while-work-goes-on",
        "work in a branch ends before it is prepared",
        "tfmq/client/producer/xa.py",
        "        if branch.state == OPEN and not branch.suspended:\n",
        "        if branch.state == PREPARED and not branch.suspended:\n",
        [XA],
    ),
    Mutant(
        "unprepared-branch-committed",
        "a branch that was not prepared is committed only in one phase",
        "tfmq/client/producer/xa.py",
        "        if branch.state == OPEN and not one_phase:\n",
        "        if branch.state != OPEN and not one_phase and branch.state != PREPARED:\n",
        [XA],
    ),
    Mutant(
        "prepared-branch-committed-in-one-phase",
        "a prepared branch is not committed in one phase",
        "tfmq/client/producer/xa.py",
        "        if branch.state == PREPARED and one_phase:\n",
        "        if branch.state == READ_ONLY and one_phase:\n",
        [XA],
    ),
    Mutant(
        "recovery-ends-with-its-first-page",
        "recovery returns all transactions in doubt",
        "tfmq/client/producer/xa.py",
        "            more = reply.more and",
        "            more = False and",
        [XA],
    ),
    Mutant(
        "suspended-branch-takes-messages",
        "nothing is sent in a branch that was ended",
        "tfmq/client/producer/xa.py",
        ("        branch.suspended = True\n        branch.shared_batches.clear()\n"),
        "        branch.shared_batches.clear()\n",
        [XA],
    ),
    Mutant(
        "suspended-branch-takes-the-short-way",
        "nothing is sent in a branch that was ended",
        "tfmq/client/producer/xa.py",
        ("        branch.suspended = True\n        branch.shared_batches.clear()\n"),
        "        branch.suspended = True\n",
        [XA],
    ),
)

_LONE: Final = (
    Mutant(
        "single-record-without-the-checksum-of-its-attribute",
        "the checksum of a record covers its attribute, also in a batch of one",
        "tfmq/client/send/record_encoder.py",
        "    checksum = crc32(payload, crc32(part))\n",
        "    checksum = crc32(payload)\n",
        ["tests/client/send/test_record_encoder.py"],
    ),
    Mutant(
        "short-way-ignores-a-full-buffer",
        "send waits while the buffer is full, also on the short way of plain messages",
        "tfmq/client/send/accumulator.py",
        "            or self.used_bytes >= self.options.buffer_bytes\n",
        "",
        ["tests/client/send/test_accumulator.py"],
    ),
    Mutant(
        "short-way-ignores-the-limit-of-a-message",
        "a message above the broker's limit is refused before it is sent",
        "tfmq/client/send/accumulator.py",
        '            or len(payload) > self.link.limits["message_bytes"]\n',
        "",
        ["tests/test_producer.py"],
    ),
    Mutant(
        "short-way-leaves-a-new-batch-empty",
        "a message that fills its batch alone is sent",
        "tfmq/client/send/accumulator.py",
        "            if batch.payloads:\n                return None\n            delivery = Delivery",
        "            if True:\n                return None\n            delivery = Delivery",
        ["tests/client/send/test_accumulator.py"],
    ),
    Mutant(
        "ended-tasks-are-remembered",
        "background tasks that have ended take no memory",
        "tfmq/client/operation.py",
        "        self._tasks = [each for each in self._tasks if not each.done]\n        self._tasks.append(task)\n",
        "        self._tasks.append(task)\n",
        ["tests/client/test_operation.py"],
    ),
    Mutant(
        "event-between-check-and-poll-is-lost",
        "an event that is set while a thread begins to poll ends its wait",
        "tfmq/client/drivers/blocking.py",
        "            seconds = 0.0 if done() else max(0.0, min(until - self.clock(), POLL_SECONDS_MAX))\n",
        "            seconds = max(0.0, min(until - self.clock(), POLL_SECONDS_MAX))\n",
        ["tests/client/drivers/test_blocking.py"],
    ),
    Mutant(
        "lone-wait-leaves-no-poller",
        "a thread whose wait is over wakes another one to poll",
        "tfmq/client/drivers/blocking.py",
        "                    if self._waiters or self.link.background_requests or self.link.output:\n",
        "                    if False:\n",
        ["tests/client/drivers", "tests/test_producer.py"],
    ),
)

CLIENT_PIPELINE: Final = _WAY + _BESIDE + _LONE
