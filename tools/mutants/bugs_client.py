"""Planted bugs: the client: repeated or reordered sends, acks of messages, reported losses."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

STREAM: Final = "tests/client/send/test_partition_sender.py"
SENDER: Final = "tests/client/send/test_accumulator.py"
LINK: Final = "tests/client/connection/test_connection.py"
DECODER: Final = "tests/client/consumer/test_decoder.py"
MESSAGE: Final = "tests/client/consumer/test_message.py"
FETCHER: Final = "tests/client/consumer/test_fetcher.py"
POSITIONS: Final = "tests/client/consumer/test_positions.py"
CONSUMING: Final = "tests/client/consumer/test_core.py"
START: Final = "tests/client/consumer/test_options.py"
STORAGE: Final = "tests/offsets/test_file.py"
MEMBERSHIP: Final = "tests/client/consumer/test_membership.py"
PROMISES: Final = "tests/client/test_promises.py"

COPIED: Final = "a copy of a message is equal to it and can be handled"
KEEPS_FEW: Final = "a message that a program keeps does not keep its block in memory"

PRODUCER: Final = (
    Mutant(
        "what-is-gone-with-its-topic-is-not-logged",
        "acknowledged messages that were deleted with their topic are logged",
        "tfmq/client/send/partition_sender.py",
        "            if count := self._stored_through[durability] + 1:\n",
        "            if count := 0 * self._stored_through[durability]:\n",
        [f"{STREAM}::test_acknowledged_messages_that_are_gone_with_their_topic_are_logged_with_the_next_send"],
    ),
    Mutant(
        "resent-with-a-new-sequence",
        "a batch that is sent again keeps its sequence",
        "tfmq/client/send/partition_sender.py",
        ("            self._requeue()\n            self.expire(self._accumulator.now())\n"),
        ("            self._requeue()\n            self._clear_sequences(self.sequence)\n"),
        [STREAM],
    ),
    Mutant(
        "order-swapped-after-a-refusal",
        "batches that are sent again keep their order",
        "tfmq/client/send/partition_sender.py",
        "        self.queue.extendleft(reversed(self.in_flight))\n",
        "        self.queue.extendleft(self.in_flight)\n",
        [STREAM],
    ),
    Mutant(
        "later-sends-overtake-in-a-topic-made-anew",
        "batches that were in flight to a deleted topic are stored in the new one before later ones",
        "tfmq/client/send/accumulator.py",
        "                sender.state, former.replacement = SenderState.BLOCKED, sender\n",
        "                pass\n",
        [
            "tests/client/send/test_partition_sender.py::test_what_a_busy_broker_put_off_goes_to_the_topic_made_anew_before_what_is_sent_later"
        ],
    ),
    Mutant(
        "order-swapped-after-a-reconnect",
        "requests that are sent again keep their order",
        "tfmq/client/connection/connection.py",
        (
            "        for pending in list(self._pending.values()):\n"
            "            self._send(pending)\n"
            "        for listener in self.on_ready:\n"
        ),
        (
            "        for pending in reversed(list(self._pending.values())):\n"
            "            self._send(pending)\n"
            "        for listener in self.on_ready:\n"
        ),
        [LINK, STREAM],
    ),
    Mutant(
        "forgotten-at-a-reconnect",
        "a send survives a broken connection",
        "tfmq/client/connection/connection.py",
        (
            "        for pending in list(self._pending.values()):\n"
            "            self._send(pending)\n"
            "        for listener in self.on_ready:\n"
        ),
        "        for listener in self.on_ready:\n",
        [LINK],
    ),
    Mutant(
        "old-pause-kept",
        "a call does not wait for the back-off of earlier calls",
        "tfmq/client/connection/connection.py",
        (
            "            self._rounds = 0\n"
            "            self._retry_at = min(self._retry_at, self.now() + BACK_OFF_SECONDS)\n"
        ),
        "            pass\n",
        [LINK],
    ),
    Mutant(
        "unrepeatable-call-repeated",
        "a request that must not be repeated is not sent twice",
        "tfmq/client/connection/connection.py",
        "        for pending in [each for each in self._pending.values() if each.sent and not each.repeat]:\n",
        "        for pending in []:\n",
        [LINK],
    ),
    Mutant(
        "unknown-called-not-done",
        "a time-out of a request that was sent says that it may have happened",
        "tfmq/client/send/accumulator.py",
        "        outcome = UNKNOWN if batch.attempts else NOT_DONE\n        if self.link.state",
        "        outcome = NOT_DONE\n        if self.link.state",
        [PROMISES],
    ),
    Mutant(
        "successor-s-last-sequence-ignored",
        "a batch that was stored although its reply was lost is not sent again",
        "tfmq/client/send/partition_sender.py",
        "            if batch.last_sequence <= last_sequence:\n",
        "            if batch.last_sequence < 0:\n",
        [STREAM],
    ),
    Mutant(
        "old-id-used-after-its-successor",
        "a partition sender continues with its successor id",
        "tfmq/client/send/partition_sender.py",
        "            self._restart(pending.reply.successor_id)\n",
        "            self._restart(self.producer_id)\n",
        [STREAM],
    ),
    Mutant(
        "loss-of-written-messages-not-reported",
        "messages that were acknowledged as written and then cut away are counted and reported",
        "tfmq/client/send/partition_sender.py",
        "        if lost > 0:\n",
        "        if lost < 0:\n",
        [STREAM],
    ),
    Mutant(
        "loss-of-synced-messages-reported-as-written",
        "lost messages are reported with the durability that their acknowledgement promised",
        "tfmq/client/send/partition_sender.py",
        "        self._stored_through[durability] = max(self._stored_through[durability], ",
        "        self._stored_through[ACKS_WRITTEN] = max(self._stored_through[ACKS_WRITTEN], ",
        [STREAM],
    ),
    Mutant(
        "batch-straddles-the-last-sequence",
        "a batch never crosses the last sequence of a producer id",
        "tfmq/client/send/partition_sender.py",
        "                if self.queue[0].count > SEQUENCES - self.sequence:\n",
        "                if self.queue[0].count < 0:\n",
        [STREAM],
    ),
    Mutant(
        "more-in-flight-than-the-broker-remembers",
        "no more batches are in flight than the broker can recognise as repeated",
        "tfmq/client/send/partition_sender.py",
        (
            "        return (\n"
            "            len(self.in_flight) < min(IN_FLIGHT_BATCHES_MAX, self._accumulator.in_flight_limit)\n"
            "            and self._in_flight_bytes < IN_FLIGHT_BYTES_MAX\n"
            "        )\n"
        ),
        "        return self._in_flight_bytes < IN_FLIGHT_BYTES_MAX\n",
        [STREAM],
    ),
    Mutant(
        "rejected-batch-leaves-a-gap",
        "after a rejected batch a partition sender continues with a successor of its producer id",
        "tfmq/client/send/partition_sender.py",
        "            if not self._has_gap and batch.last_error is None:\n",
        "            if True:\n",
        [STREAM],
    ),
    Mutant(
        "failed-delivery-forgotten",
        "a failed delivery whose result was not read is raised by flush and close",
        "tfmq/client/send/accumulator.py",
        "        self.failures.append(batch)\n",
        "",
        [SENDER],
    ),
    Mutant(
        "producer-memory-unbounded",
        "the memory for unsent messages is bounded",
        "tfmq/client/send/accumulator.py",
        "        return self.used_bytes < self.options.buffer_bytes\n",
        "        return True\n",
        [PROMISES],
    ),
    Mutant(
        "child-sends-what-its-parent-sends",
        "a forked child sends nothing that its parent accepted",
        "tfmq/client/producer/core.py",
        ("        self.driver.tickers.remove(self.accumulator)\n        self.accumulator.abandon_after_fork()\n"),
        "        pass\n",
        [PROMISES],
    ),
    Mutant(
        "child-keeps-its-parent-s-calls",
        "a forked child drops the calls and connections of its parent",
        "tfmq/client/connection/connection.py",
        "        self._pending: dict[int, PendingRequest] = {}\n",
        '        self._pending: dict[int, PendingRequest] = getattr(self, "_pending", {})\n',
        [LINK],
    ),
    Mutant(
        "one-key-two-partitions",
        "messages of one key keep their order",
        "tfmq/client/send/partitioner.py",
        "        return partitions[crc32(data) % len(partitions)]\n",
        "        return self._without_key.get_partition(topic, partitions, message)\n",
        [SENDER, "tests/client/send/test_partitioner.py"],
    ),
)

READING: Final = (
    Mutant(
        "client-skips-the-block-checksum",
        "a consumer never receives a damaged message",
        "tfmq/client/consumer/decoder.py",
        "        if not reason and crc32(memoryview(body)[position:at]) != control.crc:\n",
        "        if not reason and control.crc < 0:\n",
        [DECODER],
    ),
    Mutant(
        "client-takes-a-displaced-block",
        "a consumer never receives a message from another position",
        "tfmq/client/consumer/decoder.py",
        "    if control.offset != offset and not (gaps and control.offset > offset):\n",
        "    if control.offset < 0:\n",
        [DECODER],
    ),
    Mutant(
        "client-ignores-missing-bytes",
        "a reply that is too short is damage, not the end",
        "tfmq/client/consumer/decoder.py",
        "        if not gaps and offset != next_offset:\n",
        "        if offset < 0:\n",
        [DECODER],
    ),
    Mutant(
        "filler-delivered",
        "a filler for lost messages is never delivered",
        "tfmq/client/consumer/decoder.py",
        "            ordinals[-1] += record.checksum\n            continue\n",
        "            ordinals[-1] += record.checksum - 1\n",
        [DECODER],
    ),
    Mutant(
        "block-trailer-delivered",
        "block trailers are never delivered",
        "tfmq/client/consumer/decoder.py",
        "            decoded = self._create_messages(body, position, at, control, skip_to)\n",
        "            decoded = self._create_messages(body, position, at + TRAILER_SIZE, control, skip_to)\n",
        [DECODER],
    ),
    Mutant(
        "ids-of-a-block-taken-for-contiguous",
        "every field of a message is the one that was sent",
        "tfmq/client/consumer/decoder.py",
        " and ids_are_contiguous(body, start, end, size, first_id):\n",
        " and (first_id or ids_are_contiguous(body, start, end, size, first_id)):\n",
        [DECODER],
    ),
    Mutant(
        "attribute-of-the-first-record-for-all",
        "every field of a message is the one that was sent",
        "tfmq/client/consumer/decoder.py",
        "        if column != value[n : n + 1] * number:\n",
        "        if column[:1] != value[n : n + 1]:\n",
        [DECODER],
    ),
    Mutant(
        "next-offset-before-the-block-trailer",
        "reading continues after the last message that was read",
        "tfmq/client/consumer/message.py",
        "        return origin.offsets[row] if row < len(origin.offsets) else origin.end\n",
        "        return origin.offsets[row - 1] + 1 if row <= len(origin.offsets) else origin.end\n",
        [DECODER],
    ),
    Mutant(
        "attribute-of-the-row-before",
        "every field of a message is the one that was sent",
        "tfmq/client/consumer/message.py",
        "        return (origin.attribute or ATTRIBUTES[origin.attributes[self.row]]).key\n",
        "        return (origin.attribute or ATTRIBUTES[origin.attributes[self.row - 1]]).key\n",
        [DECODER],
    ),
    Mutant(
        "decoded-messages-keep-their-handler-in-another-process",
        "a message can be sent to another process",
        "tfmq/client/consumer/message.py",
        "        origin = Origin(shared.incarnation, shared.append_ms, shared.epoch, shared.codec)\n",
        "        origin = shared\n",
        [MESSAGE],
    ),
    Mutant(
        "kept-message-keeps-its-block",
        KEEPS_FEW,
        "tfmq/client/consumer/decoder.py",
        "        return ROWS_MAX  # Not even the records are that large.\n",
        "        return number  # Not even the records are that large.\n",
        [DECODER],
    ),
    Mutant(
        "kept-message-keeps-its-response",
        KEEPS_FEW,
        "tfmq/client/consumer/decoder.py",
        "if len(ids) == ROWS_MAX or attribute_size > _LARGE_ATTRIBUTE",
        "if attribute_size > _LARGE_ATTRIBUTE",
        [DECODER],
    ),
    Mutant(
        "kept-message-keeps-the-large-attributes-of-others",
        KEEPS_FEW,
        "tfmq/client/consumer/decoder.py",
        "    return min(ROWS_MAX, number * ATTRIBUTE_BYTES_MAX // max(attributes_size, 1)) or 1\n",
        "    return ROWS_MAX\n",
        [DECODER],
    ),
    Mutant(
        "kept-message-keeps-large-attributes-of-other-blocks",
        KEEPS_FEW,
        "tfmq/client/consumer/decoder.py",
        " or attribute_size > _LARGE_ATTRIBUTE or size_before > _LARGE_ATTRIBUTE:\n",
        ":\n",
        [DECODER],
    ),
    Mutant(
        "kept-message-keeps-the-large-attribute-before-it",
        KEEPS_FEW,
        "tfmq/client/consumer/decoder.py",
        " or size_before > _LARGE_ATTRIBUTE:\n",
        ":\n",
        [DECODER],
    ),
    Mutant(
        "equal-messages-of-another-topic-of-the-name",
        "messages are equal if they are the same stored message",
        "tfmq/client/consumer/message.py",
        " and origins[0] == origins[1]\n",
        "\n",
        ["tests/client/consumer/test_message.py"],
    ),
    Mutant(
        "next-offset-after-the-whole-block",
        "reading continues after the last message that was read",
        "tfmq/client/consumer/decoder.py",
        "            end_offset = offsets[end] if end < number else control.next\n",
        "            end_offset = control.next\n",
        [DECODER],
    ),
    Mutant(
        "next-offset-before-the-end-of-the-blocks",
        "reading continues after the last message that was read",
        "tfmq/client/consumer/decoder.py",
        "                        origin.end = block_offset\n",
        "                        pass\n",
        [DECODER],
    ),
    Mutant(
        "equal-attributes-decoded-each",
        "attributes with the same bytes are decoded once",
        "tfmq/client/consumer/message.py",
        "        found = self[data] = LazyAttribute(data)\n",
        "        found = LazyAttribute(data)\n",
        [DECODER],
    ),
    Mutant(
        "decoded-attributes-fill-the-memory",
        "decoded attributes do not fill the memory",
        "tfmq/client/consumer/message.py",
        "        if len(self) >= CACHED_MAX:\n",
        "        if len(self) < 0:\n",
        [DECODER],
    ),
    Mutant(
        "large-decoded-attributes-fill-the-memory",
        "decoded attributes do not fill the memory",
        "tfmq/client/consumer/message.py",
        "        if data is not None and len(data) > CACHED_BYTES_MAX:\n",
        "        if data is not None and len(data) < 0:\n",
        [DECODER],
    ),
    Mutant(
        "copied-message-loses-its-consumer",
        COPIED,
        "tfmq/client/consumer/message.py",
        '    def __copy__(self) -> "Self":\n',
        '    def _copy(self) -> "Self":\n',
        [MESSAGE],
    ),
    Mutant(
        "deeply-copied-message-loses-its-consumer",
        COPIED,
        "tfmq/client/consumer/message.py",
        '    def __deepcopy__(self, memo: Any) -> "Self":\n',
        '    def _deepcopy(self, memo: Any) -> "Self":\n',
        [MESSAGE],
    ),
    Mutant(
        "messages-ordered-by-offset-alone",
        "messages are ordered by topic, partition and offset",
        "tfmq/client/consumer/message.py",
        "        return self.topic, self.partition, self.offset\n",
        '        return "", 0, self.offset\n',
        [MESSAGE],
    ),
    Mutant(
        "messages-before-the-offset-delivered",
        "a consumer begins exactly at the offset that it was given",
        "tfmq/client/consumer/decoder.py",
        "        if skip_to > control.offset:\n",
        "        if skip_to < 0:\n",
        [DECODER],
    ),
    Mutant(
        "damage-skipped-in-silence",
        "damage stops its partition unless on_damage=skip is set",
        "tfmq/client/consumer/fetcher.py",
        "        elif not self._skip_damage:\n            feed.stop(damaged)\n",
        "        elif not damaged.next:\n            feed.stop(damaged)\n",
        [FETCHER],
    ),
    Mutant(
        "reader-stays-before-damage",
        "a reader that skips damage at the end of a partition has reached the end",
        "tfmq/client/consumer/fetcher.py",
        '        feed.responses.append(FetchResponse(b"", offset, offset, offset, epoch, filtered=False))\n',
        "",
        ["tests/client/consumer/test_damage.py"],
    ),
    Mutant(
        "skipped-damage-not-reported",
        "what was skipped is counted and named",
        "tfmq/client/consumer/fetcher.py",
        "        self.skipped_count += 1\n",
        "",
        [FETCHER],
    ),
    Mutant(
        "lost-offsets-reset-in-silence",
        "offsets that retention removed stop the partition unless a reset is configured",
        "tfmq/client/consumer/positions.py",
        "    if reset is None:\n        return None\n",
        "",
        [FETCHER],
    ),
    Mutant(
        "other-tags-delivered",
        "with tags only messages of these tags are delivered",
        "tfmq/client/consumer/fetcher.py",
        "            messages = [message for message in messages if message.tag in self._tags]\n",
        "            messages = list(messages)\n",
        [FETCHER],
    ),
    Mutant(
        "position-stays-before-rejected-messages",
        "a filter that rejects everything still advances",
        "tfmq/client/consumer/fetcher.py",
        "        if not messages and following.offset <= feed.position.offset:\n",
        "        if not messages:\n",
        [FETCHER, CONSUMING, START],
    ),
    Mutant(
        "seek-does-not-void-what-is-under-way",
        "after a seek no message of the old position is delivered",
        "tfmq/client/consumer/fetcher.py",
        "        if feed is None or feed.fetch_version != plan.fetch_version:\n",
        "        if feed is None:\n",
        [PROMISES],
    ),
    Mutant(
        "message-in-work-counts-as-processed",
        "a message is acked when the next one is requested, not before",
        "tfmq/client/consumer/positions.py",
        "            self._advance_acked(name, ReadPosition(current.offset, current.ordinal, current.origin.epoch))\n",
        "            self._advance_acked(name, self._batch_position_after(current))\n",
        [POSITIONS],
    ),
    Mutant(
        "exception-counts-as-processed",
        "a message whose handler raised is delivered again",
        "tfmq/consumer.py",
        "            self._close(processed=False)\n        except",
        "            self._close(processed=True)\n        except",
        [PROMISES],
    ),
    Mutant(
        "saved-places-go-back",
        "a read position goes back only by seek",
        "tfmq/client/consumer/positions.py",
        "        if known is not None and position.offset > known.offset:\n",
        "        if known is not None:\n",
        [POSITIONS],
    ),
    Mutant(
        "handed-out-before-it-is-saved",
        'with commits="before" an offset is committed before its message is handed out',
        "tfmq/client/consumer/core.py",
        '            if self.options.commits != "before":\n',
        "            if self.options.commits:\n",
        [CONSUMING, START],
    ),
    Mutant(
        "uncommitted-saved-with-manual-commits",
        "with manual commits nothing is committed before commit() is called",
        "tfmq/client/consumer/positions.py",
        (
            "        if self._manual and name in self:\n"
            "            self._delivered[name] = position\n"
            "        else:\n"
            "            self._advance_acked(name, position)\n"
        ),
        "        self._advance_acked(name, position)\n",
        [POSITIONS],
    ),
    Mutant(
        "two-saves-at-once",
        "an older commit never overtakes a newer one",
        "tfmq/client/consumer/offset_commit.py",
        "        while self._commit_ended is not None:\n",
        "        while self._commit_ended is not None and until < 0:\n",
        ["tests/client/consumer/test_offset_commit.py"],
    ),
    Mutant(
        "fenced-member-goes-on",
        "a member that was declared dead drops its messages",
        "tfmq/client/consumer/membership.py",
        ("        elif isinstance(pending.error, Fenced):\n            self._rejoin_after_expiry(pending.error)\n"),
        ("        elif isinstance(pending.error, Fenced):\n            self.joined = False\n"),
        [MEMBERSHIP],
    ),
    Mutant(
        "child-is-its-parent-s-member",
        "a forked child is not a member of its parent's group",
        "tfmq/client/consumer/membership.py",
        '        self.member_id, self.generation, self.note = token_hex(8), 0, ""\n',
        '        self.note = ""\n',
        [MEMBERSHIP],
    ),
    Mutant(
        "offset-of-another-incarnation-used",
        "an offset of a deleted topic does not count for a new one of the same name",
        "tfmq/client/consumer/start_position.py",
        "            if kept is not None and kept.incarnation == incarnation:\n",
        "            if kept is not None:\n",
        ["tests/client/consumer/test_assignment.py", CONSUMING, START],
    ),
    Mutant(
        "offset-file-not-fsynced",
        "an offset file is complete after a power cut",
        "tfmq/offsets/file.py",
        "            write_all(file, [content], 0)\n            file.force()\n",
        "            write_all(file, [content], 0)\n",
        [PROMISES],
    ),
    Mutant(
        "offset-file-renamed-without-a-fsync-of-the-folder",
        "an offset that was committed to a file survives a power cut",
        "tfmq/offsets/file.py",
        "        disk.rename(new, self.path)\n        disk.force_folder(os.path.dirname(self.path))\n",
        "        disk.rename(new, self.path)\n",
        [STORAGE],
    ),
    Mutant(
        "offset-file-written-in-place",
        "a crash leaves the old offset file or the new one",
        "tfmq/offsets/file.py",
        '        disk, new = self._disk, f"{self.path}.new"\n',
        "        disk, new = self._disk, self.path\n",
        [STORAGE],
    ),
    Mutant(
        "offset-file-takes-an-older-generation",
        "a member that lost a partition changes none of its rows in an offset file",
        "tfmq/offsets/file.py",
        (
            "            lost = {name: row.generation for name, row in before.items() if row.generation > gen"
            "erations[name]}\n"
        ),
        (
            "            lost = {\n"
            "                name: row.generation for name, row in before.items() if row.generation > generat"
            "ions[name] + (1 << 63)\n"
            "            }\n"
        ),
        [STORAGE],
    ),
    Mutant(
        "done-requests-stay-below-one-that-waits",
        "a client keeps no requests that are done",
        "tfmq/client/connection/connection.py",
        "            if len(self._deadlines) > DEADLINES_KEPT + 2 * len(self._pending):\n",
        "            if False:\n",
        ["tests/client/connection/test_connection.py"],
    ),
)

CLIENT: Final = PRODUCER + READING
