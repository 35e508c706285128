"""Planted bugs: how ranges of partitions are read: over the wire, and from a data folder."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

WIRE: Final = "tests/spark/test_wire_reader.py"
FOLDER: Final = "tests/spark/test_file_reader.py"
TOPICS: Final = "tests/spark/test_file_reader.py"
ONLOOKER: Final = "tests/journal/log/test_readonly.py"
RUNS: Final = "tests/journal/log/test_on_disk_index.py"

SPARK_LOGS: Final = (
    Mutant(
        "offsets-without-fsync-returned-to-readers",
        "nothing after the durable offset is ever given to Spark",
        "tfmq/spark/wire_reader.py",
        "        return min(found.offset, found.forced_offset)\n",
        "        return found.offset\n",
        [WIRE],
    ),
    Mutant(
        "written-records-fetched",
        "nothing after the durable offset is ever given to Spark",
        "tfmq/spark/wire_reader.py",
        "    return wire.Fetch(log.topic, log.incarnation, log.partition, offset, epoch, max_bytes)\n",
        "    return wire.Fetch(log.topic, log.incarnation, log.partition, offset, epoch, max_bytes, 0, 1)\n",
        [WIRE],
    ),
    Mutant(
        "next-chunk-asked-for-too-late",
        "the broker sends the next fetch response while the current one is processed",
        "tfmq/spark/wire_reader.py",
        (
            "        if self._offset < self._end:\n"
            "            self._send_fetch()\n"
            "        return BlockRun(reply.start, call.reply_body)\n"
        ),
        "        return BlockRun(reply.start, call.reply_body)\n",
        [WIRE],
    ),
    Mutant(
        "time-counts-while-not-waiting",
        "a slow query does not lose its broker",
        "tfmq/spark/wire_reader.py",
        "        self._call = self._link.send_request(fetch, seconds=None)\n",
        "        self._call = self._link.send_request(fetch, seconds=self._timeout)\n",
        [WIRE],
    ),
    Mutant(
        "epoch-not-sent",
        "a cut of the log below what was read is detected",
        "tfmq/spark/wire_reader.py",
        "        self._offset, self._epoch = reply.next, reply.epoch\n",
        "        self._offset = reply.next\n",
        [WIRE],
    ),
    Mutant(
        "busy-broker-not-asked-again",
        "a broker that stops or is busy is asked again until the timeout",
        "tfmq/spark/wire_reader.py",
        "            due = {number: requests[number] for number in due if isinstance(calls[number].error, Busy)}\n",
        "            due = {}\n",
        [WIRE],
    ),
    Mutant(
        "broker-that-is-away-not-waited-for",
        "a task waits for its broker up to the timeout",
        "tfmq/spark/wire_reader.py",
        "        self._link.first_connect_timeout = max(self._link.first_connect_timeout, self._timeout)\n",
        "",
        [WIRE],
    ),
    Mutant(
        "call-left-under-way",
        "a reader that ends early leaves no call open",
        "tfmq/spark/wire_reader.py",
        "        finally:\n            reading.close()\n",
        "        finally:\n            pass\n",
        [WIRE],
    ),
    Mutant(
        "split-at-any-byte",
        "every record is in exactly one piece",
        "tfmq/spark/wire_reader.py",
        "split_range(range, [reply.offset for reply in found if not isinstance(reply, Damaged)])",
        "split_range(range, ranges.split_targets(range, size))",
        [WIRE],
    ),
    Mutant(
        "place-of-a-block-trailer",
        "an offset is resolved to the next message",
        "tfmq/spark/ranges.py",
        "    no_message = FLAG_TRAILER | FLAG_FILLER\n",
        "    no_message = FLAG_FILLER\n",
        [WIRE, "tests/spark/test_ranges.py"],
    ),
    Mutant(
        "fsync-not-asked-for",
        "a stream sees messages with acks=written as soon as a consumer does",
        "tfmq/spark/wire_reader.py",
        "            self._wait_for_fsync(offsets)\n",
        "",
        [WIRE],
    ),
    Mutant(
        "place-of-a-stopped-log-is-a-fault",
        "every position of a stopped partition can be resolved",
        "tfmq/broker/log_offsets.py",
        "        if not chunk.data:\n            return ORDINAL_UNKNOWN\n",
        "",
        ["tests/broker/test_log_offsets.py"],
    ),
    Mutant(
        "mark-not-looked-at-again",
        "the reader of a folder sees what its broker deletes and adds",
        "tfmq/spark/file_reader.py",
        ("            seen.refresh()\n            return query(seen)\n"),
        "            return query(seen)\n",
        [FOLDER],
    ),
    Mutant(
        "topic-made-anew-taken-for-the-old-one",
        "a topic that was deleted and created again is another topic",
        "tfmq/spark/file_reader.py",
        ("        if isinstance(error, WrongLog):\n            return replaced_topic_error(log)\n"),
        "",
        [FOLDER],
    ),
    Mutant(
        "missing-partition-passed-over",
        "a missing partition in a data folder is reported",
        "tfmq/spark/file_reader.py",
        "        if trouble:\n            raise UnknownPartition",
        "        if not found:\n            raise UnknownPartition",
        [TOPICS],
    ),
    Mutant(
        "newer-data-folder-read",
        "a data folder of a newer format is refused",
        "tfmq/spark/file_reader.py",
        ("            self.broker_id = decode_version(text, path).node\n        except Corrupt:\n"),
        ("            self.broker_id = decode_version(text, path).node\n        except (Corrupt, NewerFormat):\n"),
        [TOPICS],
    ),
    Mutant(
        "mark-of-the-files-not-updated",
        "log.mark contains the durable offset within a second, also when no more messages arrive",
        "tfmq/broker/partition.py",
        "        elif not self._checkpoint_scheduled:\n",
        "        elif self._checkpoint_scheduled:\n",
        ["tests/broker/test_partition.py", FOLDER],
    ),
    Mutant(
        "read-after-the-durable-offset",
        "nothing after the durable offset is read from a folder",
        "journal/log/readonly.py",
        "        segment_set.end, segment_set.end_ordinal = checkpoint.durable, checkpoint.durable_ordinal\n",
        "        segment_set.end, segment_set.end_ordinal = 1 << 40, 1 << 40\n",
        [ONLOOKER],
    ),
    Mutant(
        "cut-during-a-read-not-noticed",
        "a cut of the log while a chunk is read is detected",
        "journal/log/readonly.py",
        "        cut = None if epoch is None else truncated_since(self.refresh().starts, epoch)\n",
        "        cut = None\n",
        [ONLOOKER],
    ),
    Mutant(
        "vanished-segment-is-a-crash",
        "a segment that retention removes during a read is reported as below the start",
        "journal/log/readonly.py",
        "                self.refresh()\n                self._apply_checkpoint(self.checkpoint)\n",
        "",
        [ONLOOKER],
    ),
    Mutant(
        "cut-file-taken-for-whole",
        "a truncated segment file is reported, and scanned only once",
        "journal/log/segment.py",
        "                raise Incomplete(position, FILE_TOO_SHORT)\n",
        "                return\n",
        ["tests/journal/log/test_readonly.py"],
    ),
    Mutant(
        "index-of-another-time-believed",
        "an index entry is valid only where a block ends before the position that it names",
        "journal/log/index.py",
        "        if not position.position:\n            return position\n",
        "        return position\n",
        [RUNS],
    ),
    Mutant(
        "entry-taken-unchecked",
        "an index entry whose checksum fails is not used",
        "journal/log/index.py",
        "        if crc32(data[: ENTRY_SIZE - _CRC.size], self._seed) != crc or log_id != self._log_id:\n",
        "        if log_id != self._log_id:\n",
        [RUNS],
    ),
    Mutant(
        "whole-index-read-for-one-place",
        "a lookup reads a logarithmic part of an index",
        "journal/log/index.py",
        "        return bisect_right(range(count), position, key=lambda number: self.entry(number).position)\n",
        "        return sum(self.entry(number).position <= position for number in range(count))\n",
        [RUNS],
    ),
    Mutant(
        "files-of-a-log-left-open",
        "few files of a log are open at the same time",
        "journal/log/readonly.py",
        "            while len(self._pool) >= OPEN_MAX:\n",
        "            while len(self._pool) >= OPEN_MAX * 1000:\n",
        [ONLOOKER, "tests/journal/log/test_readonly.py"],
    ),
)
