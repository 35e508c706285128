"""Planted bugs: strict order: another partition chosen, order lost, a message doubled or lost."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

FORWARDING: Final = "tests/client/producer/test_store_and_forward.py"
STORE: Final = "tests/client/producer/test_outbox.py"
SELECTOR: Final = "tests/client/send/test_partitioner.py"

_FORWARDING = "tfmq/client/producer/store_and_forward.py"
_STORE = "tfmq/client/producer/outbox.py"
_SELECTOR = "tfmq/client/send/partitioner.py"

LINES: Final = (
    Mutant(
        "new-message-overtakes-what-is-kept",
        "while messages are stored for a partition, all later ones are stored, too",
        _FORWARDING,
        ("            if self.has_stored:\n                yield from self._store_queued()\n            else:\n"),
        (
            "            if self.has_stored and not self.batches:\n"
            "                yield from self._store_queued()\n"
            "            else:\n"
        ),
        [FORWARDING],
    ),
    Mutant(
        "kept-without-its-place",
        "a batch with an unknown outcome is stored with the sequence under which it was sent",
        _FORWARDING,
        "                yield from self._store_queued(sent_as)\n",
        "                yield from self._store_queued()\n",
        [FORWARDING],
    ),
    Mutant(
        "forwarded-before-its-place-is-written-down",
        "sequences of stored batches are recorded before they are sent",
        _FORWARDING,
        "        yield from self._run_on_outbox(lambda store: store.record_sent_as(entries))\n",
        "",
        [FORWARDING],
    ),
    Mutant(
        "arrived-batches-sent-again",
        "a stored batch that the broker already has is not sent again",
        _FORWARDING,
        "        rows = yield from self._remove_arrived(rows)\n",
        "",
        [FORWARDING],
    ),
    Mutant(
        "stream-asked-and-not-closed",
        "a producer id is closed before its batches are sent again",
        _FORWARDING,
        "            return {row.id for row in rows if row.sent_as.sequence + row.count - 1 <= last}\n",
        "            return {row.id for row in rows if row.sent_as.sequence + row.count - 1 < last}\n",
        [FORWARDING],
    ),
    Mutant(
        "forgotten-stream-taken-for-empty",
        "where the broker has forgotten the producer id, the log is searched",
        _FORWARDING,
        "        except UnknownProducer:\n            pass",
        "        except UnknownProducer:\n            return set()",
        [FORWARDING],
    ),
    Mutant(
        "forwarded-batches-stay",
        "forwarded batches are deleted from the store",
        _FORWARDING,
        ("        yield from self._run_on_outbox(lambda store: store.remove(rows))\n        return True\n"),
        "        return False\n",
        [FORWARDING],
    ),
    Mutant(
        "earlier-process-s-messages-wait-for-a-send",
        "messages that an earlier process left are sent first, without a new send",
        _FORWARDING,
        ("        for topic, partition in found:\n            self._partition(topic, partition, kept=True)\n"),
        "",
        [FORWARDING],
    ),
    Mutant(
        "refusals-are-kept",
        "an error that is not the partition's fails the message",
        _FORWARDING,
        "            if error.retriable or isinstance(error, _STORE_ERRORS):\n",
        "            if error.retriable or isinstance(error, TfmqError):\n",
        [FORWARDING],
    ),
    Mutant(
        "stopped-partition-fails",
        "messages for a partition that accepts no writes are stored",
        _FORWARDING,
        "_STORE_ERRORS: Final = (StorageStopped, SequenceGap, StaleProducer, UnknownProducer)\n",
        "_STORE_ERRORS: Final = (SequenceGap, StaleProducer, UnknownProducer)\n",
        [FORWARDING],
    ),
    Mutant(
        "kept-batch-said-not-done",
        "the error of a message that could not be stored says whether the broker may have it",
        _FORWARDING,
        "        failure.outcome = UNKNOWN if batch.attempts else NOT_DONE\n",
        "        failure.outcome = NOT_DONE\n",
        [FORWARDING],
    ),
    Mutant(
        "delayed-messages-taken",
        "a delayed message is refused where strict order has a store",
        _FORWARDING,
        "        if message.delay is not None or message.deliver_at is not None:\n            raise BadRequest(",
        "        if message.delay is not None and message.deliver_at is not None:\n            raise BadRequest(",
        [FORWARDING],
    ),
)

LOCAL: Final = (
    Mutant(
        "kept-without-a-fsync",
        "a stored message is durable before that is reported",
        _STORE,
        '"pragma synchronous = full"',
        '"pragma synchronous = normal"',
        [STORE],
    ),
    Mutant(
        "two-processes-one-store",
        "only one living process uses a store",
        _STORE,
        "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        [STORE, FORWARDING],
    ),
    Mutant(
        "child-has-its-parent-s-store",
        "a forked child has no access to its parent's store",
        _STORE,
        ("        self._parent_databases.append(self._database)\n        self._database = None\n"),
        "        self._parent_databases.append(self._database)\n",
        [STORE],
    ),
    Mutant(
        "oldest-not-first",
        "stored messages are sent in the order in which they were stored",
        _STORE,
        "order by id limit ?",
        "order by id desc limit ?",
        [STORE],
    ),
    Mutant(
        "store-unbounded",
        "a full store is an error, and its messages are kept",
        _STORE,
        "            if self._bytes + size > self._bytes_max:\n",
        "            if size > self._bytes_max:\n",
        [STORE],
    ),
    Mutant(
        "bytes-of-an-earlier-process-not-counted",
        "the limit includes messages that an earlier process left",
        _STORE,
        '            self._bytes = database.execute("select coalesce(sum(length(data)), 0) from kept").fetchone()[0]\n',
        "            self._bytes = 0\n",
        [STORE],
    ),
    Mutant(
        "bytes-that-went-are-counted",
        "forwarding makes space in the store",
        _STORE,
        "            self._bytes -= sum(len(row.data) for row in removed)\n",
        "",
        [STORE],
    ),
    Mutant(
        "failed-statement-half-done",
        "batches that are stored together are stored completely or not at all",
        _STORE,
        "                except BaseException:\n                    database.rollback()\n                    raise\n",
        "                except BaseException:\n                    database.commit()\n                    raise\n",
        [STORE],
    ),
    Mutant(
        "look-without-an-end",
        "a read of the store is bounded",
        _STORE,
        "                if found and size > bytes_max:\n                    break\n",
        "",
        [STORE],
    ),
)

CHOICE: Final = (
    Mutant(
        "down-partition-passed-by",
        "a configured partition is chosen also where it accepts no writes",
        _SELECTOR,
        "        return partitions[number]\n",
        "        up = [each for each in partitions if each.writable and each.number in self.partitions[topic]]\n"
        "        return partitions[number] if partitions[number].writable or not up else up[0]\n",
        [SELECTOR],
    ),
    Mutant(
        "key-takes-turns",
        "a key is always sent to the same configured partition",
        _SELECTOR,
        "        return numbers[crc32(data) % len(numbers)]\n",
        "        self._turns[topic] = self._turns.get(topic, 0) + 1\n"
        "        return numbers[(crc32(data) + self._turns[topic]) % len(numbers)]\n",
        [SELECTOR],
    ),
    Mutant(
        "other-partition-by-hand",
        "a message for a partition that is not configured is refused",
        _SELECTOR,
        "            if message.partition not in numbers:\n",
        "            if message.partition < 0:\n",
        [SELECTOR],
    ),
    Mutant(
        "topic-that-is-not-configured-taken",
        "a topic that is not configured is refused",
        _SELECTOR,
        "        if numbers is None:\n            raise BadRequest(",
        "        numbers = numbers or (0,)\n        if not topic:\n            raise BadRequest(",
        [SELECTOR],
    ),
)

STRICT: Final = LINES + LOCAL + CHOICE
