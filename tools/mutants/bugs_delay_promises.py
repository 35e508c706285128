"""Planted bugs: delayed messages outside of their delivery: handles, limits, lists, the store at a start."""

from typing import Final

from tools.mutants.mutant import Mutant

DELAY: Final = "tests/broker/test_delay_commands.py"
SEND: Final = "tests/broker/test_delayed_send.py"
OPENING: Final = "tests/broker/test_startup.py"
CHANGING: Final = "tests/delay/test_cancellation.py"
DUES: Final = "tests/delay/test_due_time.py"
JUDGING: Final = "tests/delay/test_cancellation.py"
TWO: Final = "tests/broker/test_delay_promises.py"
LINE: Final = "tests/delay/test_target_queue.py"

_HANDLES: Final = (
    Mutant(
        "a-strange-handle-is-one-s-own",
        "the handle of another broker is unknown",
        "tfmq/broker/delay_commands.py",
        "        if handle.store_id == self.issuer_of(handle.number):\n",
        "        if handle.store_id:\n",
        [TWO],
    ),
    Mutant(
        "handles-without-the-epoch",
        "a handle that was given out after a copy of the data folder was made is unknown to the copy",
        "tfmq/broker/delay_commands.py",
        "        return self._issuer_in(self._epochs.epoch_of(number))\n",
        "        return self._issuer_in(None)\n",
        [TWO],
    ),
    Mutant(
        "epochs-of-numbers-not-in-the-snapshot",
        "handles stay valid after restarts",
        "tfmq/delay/arrivals/state.py",
        "        self.epochs.load(epochs)\n",
        "        self.epochs.load(epochs[:8])\n",
        [TWO],
    ),
    Mutant(
        "handles-of-earlier-releases-refused",
        "handles of earlier releases stay valid",
        "tfmq/broker/delay_commands.py",
        "        return handle.number < self._epochs.unmarked_end and handle.store_id == self._issuer_in(None)\n",
        "        return False\n",
        [TWO],
    ),
    Mutant(
        "unknown-numbers-wait",
        "a message that was never stored is unknown",
        "tfmq/delay/cancellation.py",
        "        if turn.number >= number_next:\n",
        "        if turn.number >= number_next << 20:\n",
        [JUDGING, DELAY],
    ),
    Mutant(
        "delivered-is-reported-without-end",
        "outcomes are forgotten after the configured time",
        "tfmq/delay/cancellation.py",
        "            return DELIVERED if turn.due > now - self.scheduler.outcome_ms else UNKNOWN\n",
        "            return DELIVERED\n",
        [JUDGING],
    ),
    Mutant(
        "another-time-is-taken-for-a-repeat",
        "a message can be rescheduled by a handle from before its last rescheduling",
        "tfmq/delay/cancellation.py",
        (
            "            return 0 <= moved.due - (self.broker_clock.now_rounded_up_ms() + word - RELATIVE)"
            " <= REPEAT_MS_MAX\n"
        ),
        "            return 0 <= moved.due - (self.broker_clock.now_rounded_up_ms() + word - RELATIVE) <= 3_600_000\n",
        [TWO],
    ),
    Mutant(
        "a-new-time-reported-before-it-is-fsynced",
        "a new due time is reported once a power cut cannot undo it",
        "tfmq/delay/cancellation.py",
        "            self.arrival_log.when_forced(answer.end_offset, partial(durable, new))\n",
        "            durable(new, None)\n",
        [CHANGING, "tests/crash/test_delay_enumeration.py"],
    ),
)

_LIMITS: Final = (
    Mutant(
        "as-many-wait-as-come",
        "no more messages wait than limits.delayed",
        "tfmq/broker/delay_commands.py",
        '        if self.queue.pending + count > self._limits["delayed"]:\n',
        '        if self.queue.pending - count > self._limits["delayed"]:\n',
        [SEND],
    ),
    Mutant(
        "as-many-bytes-wait-as-come",
        "no more bytes of messages wait than limits.delayed_bytes",
        "tfmq/broker/delay_commands.py",
        '        if self.queue.pending_bytes + size_bytes > self._limits["delayed_bytes"]:\n',
        '        if self.queue.pending_bytes - size_bytes > self._limits["delayed_bytes"]:\n',
        [SEND],
    ),
    Mutant(
        "refused-when-it-is-due",
        "a delayed message that its partition would refuse is refused when it is sent",
        "tfmq/broker/delay_commands.py",
        "        if contains_trailer_header(bytes(data), target.log.log_id):\n",
        "        if contains_trailer_header(bytes(data), self.partition.log.log_id):\n",
        [SEND],
    ),
)

_DUES: Final = (
    Mutant(
        "one-time-of-day-by-broker-time",
        "a time of day is one of the wall clock",
        "tfmq/delay/due_time.py",
        "        due, absolute = word + ahead_ms, ABSOLUTE_FLAG\n",
        "        due, absolute = word, ABSOLUTE_FLAG\n",
        [DUES],
    ),
    Mutant(
        "times-of-day-by-broker-time",
        "each of many times of day in a batch is one of the wall clock",
        "tfmq/delay/due_time.py",
        "    elif ahead_ms:\n",
        "    elif ahead_ms > 1 << 60:\n",
        [DUES],
    ),
    Mutant(
        "after-the-end-of-time",
        "a delay beyond the last possible time is set to that time",
        "tfmq/delay/due_time.py",
        "    due = min(max(due, now_ms + 1), DUE_MAX)\n",
        "    due = max(due, now_ms + 1)\n",
        [DUES],
    ),
)

_STORE: Final = (
    Mutant(
        "a-due-time-is-not-verified",
        "a due time counts only where the checksum of its arrival header matches",
        "tfmq/delay/arrivals/header.py",
        "    if crc32(payload) != checksum:\n",
        "    if checksum < 0:\n",
        ["tests/delay/arrivals/test_header.py"],
    ),
    Mutant(
        "notes-are-repeated-records",
        "a flipped bit in a block trailer of the arrival log loses no arrival header",
        "journal/fsck/log_repair.py",
        "        return [id for id in ids if id >> SEQUENCE_BITS >= LEASED_ID_FIRST]\n",
        "        return ids\n",
        [OPENING],
    ),
    Mutant(
        "the-operator-s-request-counts-without-end",
        "a store is created anew once for each request of the operator",
        "tfmq/broker/startup.py",
        "    _remove_marker(broker, NEW_DELAY_MARKER)\n",
        "",
        [OPENING],
    ),
    Mutant(
        "a-missing-store-is-begun-anew",
        "a start is refused when the store that its partitions refer to is missing",
        "tfmq/broker/startup.py",
        "    if not broker.catalog.state.delay_store or broker.disk.exists(join(broker.meta, NEW_DELAY_MARKER)):\n",
        "    if broker.catalog.state.next_id:\n",
        [OPENING],
    ),
    Mutant(
        "another-one-s-store-is-taken",
        "a store of another data folder is refused",
        "tfmq/broker/startup.py",
        "    if known and known != buckets.store_id:\n",
        "    if known and not buckets.store_id:\n",
        [OPENING],
    ),
    Mutant(
        "arrivals-older-than-the-buckets-are-taken",
        "an arrival log that is older than the buckets that were filled from it is refused",
        "tfmq/broker/startup.py",
        "    if end_offset < buckets.spilled_offset:\n",
        "    if arrivals.end_offset < 0:\n",
        [OPENING],
    ),
    Mutant(
        "buckets-older-than-the-arrivals-are-taken",
        "buckets for which the arrival log lacks messages are refused",
        "tfmq/broker/startup.py",
        "    if arrivals.first_offset > buckets.spilled_offset:\n",
        "    if arrivals.first_offset < 0:\n",
        [TWO],
    ),
)

_WAITING: Final = (
    Mutant(
        "what-a-failed-fsync-took-counts",
        "what a partition lost in a failed fsync is delivered after it is resumed",
        "tfmq/delay/target_queue.py",
        "        lost = sum(each.count for each in self._written if through is None or through < each.last)\n",
        "        lost = 0\n",
        [LINE, "tests/testing/test_delayed.py", DELAY],
    ),
    Mutant(
        "a-full-disk-is-never-tried-again",
        "messages that a full disk delayed are delivered when there is space",
        "tfmq/apply_queue.py",
        "        self.pause(self._backoff.advance())\n",
        "        self.pause(1e9)\n",
        [DELAY],
    ),
    Mutant(
        "a-resumed-partition-waits-for-its-pause",
        "messages that were waiting are delivered at once when their partition is resumed",
        "tfmq/apply_queue.py",
        "        if not self.busy:\n            self._end_pause()\n",
        "",
        [LINE, DELAY],
    ),
    Mutant(
        "a-stopped-partition-reports-what-it-has",
        "messages in a stopped partition do not count as delivered before it is resumed",
        "journal/log/segments.py",
        "        while pending and pending[0][0] <= durable_offset:\n",
        "        while pending:\n",
        ["tests/broker/test_apply_target.py", "tests/broker/test_scheduler.py", DELAY],
    ),
    Mutant(
        "dropped-and-not-counted",
        "messages for a deleted topic are counted as dropped",
        "tfmq/delay/target_queue.py",
        "        self._owner.dropped += count\n",
        "",
        [LINE, "tests/delay/test_target_queue.py", DELAY],
    ),
)

_LISTS: Final = (
    Mutant(
        "a-page-begins-with-the-last-of-the-one-before",
        "a list contains each message once, however many pages it has",
        "tfmq/delay/queries.py",
        "Turn(after.due, after.number + 1)",
        "Turn(after.due, after.number)",
        ["tests/delay/test_queries.py", DELAY],
    ),
    Mutant(
        "lists-have-what-was-cancelled",
        "a list contains waiting messages and no cancelled ones",
        "tfmq/delay/queries.py",
        "        if not _is_pending(pending, row):\n            continue\n",
        "",
        ["tests/delay/test_queries.py", DELAY],
    ),
    Mutant(
        "counts-have-what-was-cancelled",
        "counts are of waiting messages, without cancelled ones",
        "tfmq/delay/queries.py",
        ("        dirty = bucket.dead_count or start < fires_below or pending.may_have_cancelled(start, end - 1)\n"),
        "        dirty = start < fires_below\n",
        ["tests/delay/test_queries.py", DELAY],
    ),
)

_ORDER: Final = (
    Mutant(
        "small-slices-pass-a-large-one",
        "apply tasks that wait for memory get it in order",
        "tfmq/apply_queue.py",
        "        if not self._waiting and self._has_room(size_bytes):\n",
        "        if self._has_room(size_bytes):\n",
        ["tests/test_apply_queue.py"],
    ),
    Mutant(
        "a-split-keeps-cancelled-messages",
        "cancelled messages are left out when their bucket is split",
        "tfmq/delay/buckets/writer.py",
        '            keep = b"" if pending is None else pending_rows(columns, pending)\n',
        '            keep = b""\n',
        ["tests/delay/buckets/test_writer.py", "tests/delay/buckets/test_store.py"],
    ),
    Mutant(
        "a-start-does-not-restore-time-of-day",
        "a time of day keeps the clock of its sender, also after a restart",
        "tfmq/delay/buckets/loader.py",
        "                ahead_steps.append((first, batch.first_number + len(batch.sizes) - first, ahead_ms))\n",
        "",
        ["tests/delay/buckets/test_loader.py", "tests/e2e/test_delay_page.py"],
    ),
    Mutant(
        "moved-again-and-again-fills-the-rest",
        "a message that is rescheduled repeatedly does not keep others from being cancelled",
        "tfmq/delay/arrivals/state.py",
        "        if 2 * self.cancelled.count < CANCELLED_MAX and 2 * self._size_bytes < BYTES_MAX:\n",
        "        if self.cancelled.count < CANCELLED_MAX:\n",
        ["tests/delay/arrivals/test_state.py", "tests/delay/arrivals/test_state.py"],
    ),
    Mutant(
        "a-stopped-partition-keeps-its-window",
        "messages that are not durable in a stopped partition do not delay those of others",
        "tfmq/delay/target_queue.py",
        "        self._owner.flow_control.release(size_bytes)\n\n",
        "        if error is None:\n            self._owner.flow_control.release(size_bytes)\n\n",
        [
            "tests/delay/test_target_queue.py",
            "tests/delay/test_target_queue.py",
            "tests/delay/test_non_durable_appends.py",
            DELAY,
        ],
    ),
    Mutant(
        "unreadable-message-delays-the-rest",
        "a message that cannot be read does not delay messages that are due before it",
        "tfmq/delay/record_reader.py",
        "                self._run(read, done)\n            elif generation",
        "                done(None, error)\n            elif generation",
        ["tests/delay/test_record_reader.py", "tests/delay/test_target_queue.py"],
    ),
    Mutant(
        "what-was-not-sure-at-a-start-is-never-known",
        "what a start on a full disk could not make durable is delivered when there is space",
        "tfmq/delay/dispatcher.py",
        "                self.scheduler.load_tail(from_offset, end, done)\n",
        "                self.non_durable.append_failed(ticket)\n",
        ["tests/delay/test_dispatcher.py"],
    ),
)

DELAY_PROMISES: Final = _HANDLES + _LIMITS + _DUES + _STORE + _WAITING + _LISTS + _ORDER
