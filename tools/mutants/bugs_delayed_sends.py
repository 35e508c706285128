"""Planted bugs: delayed sends in the client, their handles, and their requests."""

from typing import Final

from tools.mutants.mutant import Mutant

LINK: Final = "tests/client/connection/test_connection.py"
DELAYS: Final = "tests/client/send/test_delayed_sender.py"

DELAYED_SENDS: Final = (
    Mutant(
        "delay-begins-anew-when-it-is-sent-again",
        "the time that a delayed message waited in the client is subtracted from its delay, each time it is sent",
        "tfmq/client/send/partition_sender.py",
        "    return request._replace(due=dues.pack(now()))\n",
        "    return request._replace(due=dues.pack_original())\n",
        [DELAYS],
    ),
    Mutant(
        "delay-not-renewed-after-a-reconnect",
        "a request whose content depends on the time is encoded again each time it is sent",
        "tfmq/client/connection/connection.py",
        "        if pending.update is not None:\n",
        "        if pending.update is not None and not pending.send_count:\n",
        [LINK, DELAYS],
    ),
    Mutant(
        "delayed-batch-in-a-partition-s-stream",
        "plain and delayed sends of one producer have producer ids of their own",
        "tfmq/client/send/accumulator.py",
        ("        if delayed:\n            return self.delayed_sender.buffer_for(topic, partition)\n"),
        ("        if delayed < 0:\n            return self.delayed_sender.buffer_for(topic, partition)\n"),
        [DELAYS],
    ),
    Mutant(
        "gone-topic-ends-the-stream-of-delayed-messages",
        "a deleted topic fails only the delayed messages that were for it",
        "tfmq/client/send/partition_sender.py",
        "    ends_with_topic: ClassVar[bool] = False\n",
        "    ends_with_topic: ClassVar[bool] = True\n",
        [DELAYS],
    ),
    Mutant(
        "due-lost-in-a-transaction-that-grew",
        "delayed messages of a transaction wait for their due time, however large it is",
        "tfmq/client/transaction/pipeline.py",
        "encoded.blocks, batch.due_field, self.epoch)",
        "encoded.blocks, None, self.epoch)",
        ["tests/client/transaction/test_transaction.py"],
    ),
    Mutant(
        "due-lost-in-a-transaction-of-one-frame",
        "delayed messages of a transaction wait for their due time, however small it is",
        "tfmq/client/transaction/commit.py",
        "commands.TransactionBatch(*fields, encoded.blocks, batch.due_field)",
        "commands.TransactionBatch(*fields, encoded.blocks, None)",
        ["tests/client/transaction/test_transaction.py"],
    ),
    Mutant(
        "delayed-and-plain-share-a-transaction-s-batch",
        "plain messages of a transaction do not wait with its delayed ones",
        "tfmq/client/transaction/pipeline.py",
        (
            "        batch = self._open_batch_for(topic, message, due is not None)\n"
            '        size = length + batch.overhead_bytes + len(part or b"")\n'
        ),
        (
            "        batch = self._open_batch_for(topic, message, True)\n"
            '        size = length + batch.overhead_bytes + len(part or b"")\n'
        ),
        ["tests/client/transaction/test_pipeline.py"],
    ),
    Mutant(
        "one-hole-after-the-other-for-a-gone-topic",
        "batches for a deleted topic are replaced by one gap, however many they are",
        "tfmq/client/send/partition_sender.py",
        "        for batch in self._batches_of_deleted_topics(self.queue):\n",
        "        for batch in self._batches_of_deleted_topics([]):\n",
        [DELAYS],
    ),
    Mutant(
        "rerouted-delayed-batches-behind-later-ones",
        "delayed messages that were sent to a deleted topic are stored before later ones in the re-created topic",
        "tfmq/client/send/partition_sender.py",
        "        self.queue = deque(sorted(self.queue, key=_number))\n",
        "",
        [DELAYS],
    ),
    Mutant(
        "open-delayed-batch-of-a-deleted-topic-behind-later-ones",
        "delayed messages that wait in a deleted topic's open batch are stored before later ones",
        "tfmq/client/send/partition_sender.py",
        "            if buffer is not None and buffer.open_batch is not None:\n                open_batch",
        "            if buffer is not None and buffer.open_batch is None:\n                open_batch",
        [DELAYS],
    ),
    Mutant(
        "rerouted-batches-wait-behind-later-ones",
        "while a re-created topic is not known, the messages for it wait in the order in which they were sent",
        "tfmq/client/send/accumulator.py",
        "        while place and waiting[place - 1][0].number > batch.number:\n",
        "        while place and waiting[place - 1][0].number < 0:\n",
        ["tests/client/send/test_partition_sender.py"],
    ),
    Mutant(
        "handles-of-other-messages",
        "each message of a delayed batch gets its own handle",
        "tfmq/client/send/batch.py",
        "slice(index, index + count)",
        "slice(count)",
        ["tests/client/send/test_batch.py"],
    ),
    Mutant(
        "delay-rounded-down",
        "a delay is never shorter than requested",
        "tfmq/client/send/delivery_time.py",
        (
            "        milliseconds = int(seconds) * 1000 if whole else ceil(float(seconds) * 1000 -"
            " ROUNDING_TOLERANCE_MS)\n"
        ),
        "        milliseconds = int(seconds) * 1000 if whole else int(float(seconds) * 1000 + ROUNDING_TOLERANCE_MS)\n",
        ["tests/client/send/test_delivery_time.py"],
    ),
    Mutant(
        "typo-in-a-handle-taken",
        "a handle with a typing error is refused, instead of matching another message",
        "tfmq/protocol/delayed_handle.py",
        "    if _format_fields(fields) != text:\n",
        "    if len(fields) != _FIELDS.size:\n",
        ["tests/protocol/test_delayed_handle.py"],
    ),
)
