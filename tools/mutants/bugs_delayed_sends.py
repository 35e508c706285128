"""Planted bugs: delayed sends in the client, their handles, and what goes on the wire."""

from typing import Final

from tools.mutants.mutant import Mutant

LINK: Final = "tests/client/test_link.py"
DELAYS: Final = "tests/client/test_delayed_stream.py"

DELAYED_SENDS: Final = (
    Mutant(
        "delay-begins-anew-when-it-is-sent-again",
        "what a delayed message waited in the client is taken off its delay, each time it goes out",
        "tfmq/client/send/partition_sender.py",
        "            return request._replace(due=dues.packed(sender.now()))\n",
        "            return request._replace(due=dues.packed_whole())\n",
        [DELAYS],
    ),
    Mutant(
        "delay-not-renewed-after-a-reconnect",
        "a request that passes with time is made anew each time it goes out",
        "tfmq/client/connection/connection.py",
        "        if call.renew is not None:\n",
        "        if call.renew is not None and not call.sends:\n",
        [LINK, DELAYS],
    ),
    Mutant(
        "delayed-batch-in-a-partition-s-stream",
        "plain and delayed sends of one producer have ids of their own",
        "tfmq/client/send/accumulator.py",
        "        if delayed:\n            return self.delayed.door(topic, partition)\n",
        "        if delayed < 0:\n            return self.delayed.door(topic, partition)\n",
        [DELAYS],
    ),
    Mutant(
        "gone-topic-ends-the-stream-of-delayed-messages",
        "a topic that is gone ends only the delayed messages that were for it",
        "tfmq/client/send/partition_sender.py",
        "    has_one_topic: ClassVar[bool] = False\n",
        "    has_one_topic: ClassVar[bool] = True\n",
        [DELAYS],
    ),
    Mutant(
        "due-lost-in-a-transaction-that-grew",
        "delayed messages of a transaction wait, however large it is",
        "tfmq/client/transaction/pipeline.py",
        "            batch.due,\n            self.epoch,\n",
        "            None,\n            self.epoch,\n",
        ["tests/client/test_transaction.py"],
    ),
    Mutant(
        "due-lost-in-a-transaction-of-one-frame",
        "delayed messages of a transaction wait, however small it is",
        "tfmq/client/transaction/commit.py",
        "                    batch.due,\n",
        "                    None,\n",
        ["tests/client/test_transaction.py"],
    ),
    Mutant(
        "delayed-and-plain-share-a-transaction-s-batch",
        "plain messages of a transaction do not wait with its delayed ones",
        "tfmq/client/transaction/pipeline.py",
        "        batch = self._target(topic, message, due is not None)\n        size",
        "        batch = self._target(topic, message, True)\n        size",
        ["tests/client/test_transaction_gathering.py"],
    ),
    Mutant(
        "one-hole-after-the-other-for-a-gone-topic",
        "batches for a topic that is gone make one hole, however many they are",
        "tfmq/client/send/partition_sender.py",
        "        strays = self._strays(self.flight)\n",
        "        strays = self._strays([])\n",
        [DELAYS],
    ),
    Mutant(
        "handles-of-other-messages",
        "each message of a delayed batch gets its own handle",
        "tfmq/client/send/batch.py",
        "delayed=self.handles[first : first + count]",
        "delayed=self.handles[:count]",
        ["tests/client/test_delayed_batch.py"],
    ),
    Mutant(
        "delay-rounded-down",
        "a delay is never shorter than what was asked for",
        "tfmq/client/send/delivery_time.py",
        "ceil(float(seconds) * 1000 - HALF_MICROSECOND)",
        "int(float(seconds) * 1000 + HALF_MICROSECOND)",
        ["tests/client/test_dues.py"],
    ),
    Mutant(
        "typo-in-a-handle-taken",
        "a typo in a handle is refused, instead of hitting another message",
        "tfmq/protocol/delayed_handle.py",
        "    if _printed(fields) != text:\n",
        "    if len(fields) != _FIELDS.size:\n",
        ["tests/protocol/test_handles.py"],
    ),
)
