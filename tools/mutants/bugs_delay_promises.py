"""Planted bugs: what is told of delayed messages, and promised of them outside of their delivery: handles, limits,
lists, the store at a start, what waits for a partition.
"""

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
        "a handle from after a copy of the data folder was made is unknown to the copy",
        "tfmq/broker/delay_commands.py",
        "        return self._issuer_in(self._epochs.epoch_of(number))\n",
        "        return self._issuer_in(None)\n",
        [TWO],
    ),
    Mutant(
        "epochs-of-numbers-not-in-the-snapshot",
        "handles stay valid over restarts",
        "tfmq/delay/arrivals/state.py",
        "        self.epochs.load(epochs)\n",
        "        self.epochs.load(epochs[:8])\n",
        [TWO],
    ),
    Mutant(
        "handles-of-earlier-releases-refused",
        "handles that earlier releases gave stay valid",
        "tfmq/broker/delay_commands.py",
        "        return handle.number < self._epochs.unmarked_end and handle.store_id == self._issuer_in(None)\n",
        "        return False\n",
        [TWO],
    ),
    Mutant(
        "numbers-that-nobody-has-wait",
        "nothing is known of a message that never came",
        "tfmq/delay/cancellation.py",
        "        if turn.number >= number_next:\n",
        "        if turn.number >= number_next << 20:\n",
        [JUDGING, DELAY],
    ),
    Mutant(
        "delivered-is-told-for-ever",
        "behind its time outcomes are forgotten as the settings say",
        "tfmq/delay/cancellation.py",
        "            return DELIVERED if turn.due > now - self._outcome_ms else UNKNOWN\n",
        "            return DELIVERED\n",
        [JUDGING],
    ),
    Mutant(
        "another-time-is-taken-for-a-repeat",
        "a new time that is asked for by an old handle is given",
        "tfmq/delay/cancellation.py",
        (
            "                0 <= moved.due - (self._broker_clock.now_rounded_up_ms() + word - RELATIVE)"
            " <= REPEAT_MS_MAX\n"
        ),
        "                0 <= moved.due - (self._broker_clock.now_rounded_up_ms() + word - RELATIVE) <= 3_600_000\n",
        [TWO],
    ),
    Mutant(
        "a-new-time-told-before-it-is-forced",
        "a new time is told once no power cut can take it back",
        "tfmq/delay/cancellation.py",
        "        self._arrival_log.when_forced(answer.end_offset, forced)\n",
        "        forced(None)\n",
        [CHANGING, "tests/crash/test_delay_enumeration.py"],
    ),
)

_LIMITS: Final = (
    Mutant(
        "as-many-wait-as-come",
        "no more wait than limits.delayed",
        "tfmq/broker/delay_commands.py",
        '        if self.queue.pending + count > self._limits["delayed"]:\n',
        '        if self.queue.pending - count > self._limits["delayed"]:\n',
        [SEND],
    ),
    Mutant(
        "as-many-bytes-wait-as-come",
        "no more bytes wait than limits.delayed_bytes",
        "tfmq/broker/delay_commands.py",
        '        if self.queue.pending_bytes + size_bytes > self._limits["delayed_bytes"]:\n',
        '        if self.queue.pending_bytes - size_bytes > self._limits["delayed_bytes"]:\n',
        [SEND],
    ),
    Mutant(
        "refused-when-it-is-due",
        "what its partition would refuse is refused when it is sent",
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
        "of many times of day, each is one of the wall clock",
        "tfmq/delay/due_time.py",
        "    elif ahead_ms:\n",
        "    elif ahead_ms > 1 << 60:\n",
        [DUES],
    ),
    Mutant(
        "behind-the-end-of-time",
        "a delay that leads beyond the end of time leads to it",
        "tfmq/delay/due_time.py",
        "    due = min(max(due, now_ms + 1), DUE_MAX)\n",
        "    due = max(due, now_ms + 1)\n",
        [DUES],
    ),
)

_STORE: Final = (
    Mutant(
        "a-due-time-is-not-verified",
        "a due time counts only where the checksum of its note holds",
        "tfmq/delay/arrivals/header.py",
        "    if crc32(payload) != checksum:\n",
        "    if checksum < 0:\n",
        ["tests/delay/arrivals/test_header.py"],
    ),
    Mutant(
        "notes-are-repeated-records",
        "a flipped bit in a block trailer of the arrivals loses no note",
        "journal/fsck/log_repair.py",
        "                if piece.kept and id >> SEQUENCE_BITS >= LEASED_ID_FIRST:\n",
        "                if piece.kept:\n",
        [OPENING],
    ),
    Mutant(
        "the-operator-s-word-counts-for-ever",
        "a store is begun anew once for each word of the operator",
        "tfmq/broker/startup.py",
        (
            "        _update_catalog_from_delay(broker, store)\n"
            "    except BaseException:\n"
            '        store.abandon("the start failed")\n'
            "        raise\n"
            "    if broker.disk.exists(word):\n"
            "        broker.disk.unlink(word)\n"
            "        broker.disk.force_folder(broker.meta)\n"
            "    return store\n"
            "\n"
        ),
        (
            "        _update_catalog_from_delay(broker, store)\n"
            "    except BaseException:\n"
            '        store.abandon("the start failed")\n'
            "        raise\n"
            "    if broker.disk.exists(word):\n"
            "        broker.disk.force_folder(broker.meta)\n"
            "    return store\n"
            "\n"
        ),
        [OPENING],
    ),
    Mutant(
        "a-missing-store-is-begun-anew",
        "a start without the store that its partitions know is refused",
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
        "arrivals that are older than the buckets that were filled from them are refused",
        "tfmq/broker/startup.py",
        "    if end_offset < buckets.spilled_offset:\n",
        "    if arrivals.end_offset < 0:\n",
        [OPENING],
    ),
    Mutant(
        "buckets-older-than-the-arrivals-are-taken",
        "buckets to which arrivals are missing are refused",
        "tfmq/broker/startup.py",
        "    if arrivals.first_offset > buckets.spilled_offset:\n",
        "    if arrivals.first_offset < 0:\n",
        [TWO],
    ),
)

_WAITING: Final = (
    Mutant(
        "what-a-failed-force-took-counts",
        "what a partition lost when its force failed comes once it is resumed",
        "tfmq/delay/flow_control.py",
        "        lost = sum(each.count for each in self._written if through is None or through < each.last)\n",
        "        lost = 0\n",
        [LINE, "tests/testing/test_delayed.py", DELAY],
    ),
    Mutant(
        "a-full-disk-is-never-tried-again",
        "what a full disk held up comes when there is space",
        "tfmq/apply_queue.py",
        "        self.pause(self._backoff.advance())\n",
        "        self.pause(1e9)\n",
        [DELAY],
    ),
    Mutant(
        "a-resumed-partition-waits-for-its-pause",
        "what was held up comes at once when its partition is resumed",
        "tfmq/apply_queue.py",
        "        if not self.busy:\n            self._end_pause()\n",
        "",
        [LINE, DELAY],
    ),
    Mutant(
        "a-stopped-partition-tells-what-it-has",
        "what a stopped partition has counts for nothing before it is resumed",
        "journal/log/segments.py",
        "        while unsure and unsure[0][0] <= forced:\n",
        "        while unsure:\n",
        ["tests/broker/test_apply_target.py", "tests/broker/test_scheduler.py", DELAY],
    ),
    Mutant(
        "dropped-and-not-counted",
        "what waited for a deleted topic is counted as dropped",
        "tfmq/delay/target_queue.py",
        "        self._owner.dropped += count\n",
        "",
        [LINE, "tests/delay/test_target_queue.py", DELAY],
    ),
)

_LISTS: Final = (
    Mutant(
        "a-page-begins-with-the-last-of-the-one-before",
        "a list has each message once, however many pages it fills",
        "tfmq/delay/queries.py",
        "Turn(after.due, after.number + 1)",
        "Turn(after.due, after.number)",
        ["tests/delay/test_queries.py", DELAY],
    ),
    Mutant(
        "lists-have-what-was-cancelled",
        "a list has what waits, and nothing that was taken back",
        "tfmq/delay/queries.py",
        "            if not _is_pending(pending, row):\n                continue\n",
        "",
        ["tests/delay/test_queries.py", DELAY],
    ),
    Mutant(
        "counts-have-what-was-cancelled",
        "counts are of what waits, without what was taken back",
        "tfmq/delay/queries.py",
        (
            "            dirty = bucket.dead_count or start < settled_below or"
            " pending.may_have_cancelled(start, end - 1)\n"
        ),
        "            dirty = start < settled_below\n",
        ["tests/delay/test_queries.py", DELAY],
    ),
)

_ORDER: Final = (
    Mutant(
        "small-slices-pass-a-large-one",
        "who waits for room in the window of deliveries goes in order",
        "tfmq/apply_queue.py",
        "        if not self._waiting and self._has_room(size_bytes):\n",
        "        if self._has_room(size_bytes):\n",
        ["tests/test_apply_queue.py"],
    ),
    Mutant(
        "a-split-keeps-what-nobody-waits-for",
        "what was cancelled leaves its bucket when that is cut",
        "tfmq/delay/buckets/writer.py",
        '            keep = b"" if pending is None else pending_rows(columns, pending)\n',
        '            keep = b""\n',
        ["tests/delay/buckets/test_writer.py", "tests/delay/buckets/test_store.py"],
    ),
    Mutant(
        "a-start-does-not-learn-what-was-told",
        "a time of day is one of the clock that its sender saw, behind a start too",
        "tfmq/delay/buckets/loader.py",
        "                ahead_steps.append((first, batch.first_number + len(batch.sizes) - first, ahead_ms))\n",
        "",
        ["tests/delay/buckets/test_loader.py", "tests/e2e/test_delay_page.py"],
    ),
    Mutant(
        "moved-again-and-again-fills-the-rest",
        "a message that is moved on and on does not keep others from being cancelled",
        "tfmq/delay/arrivals/state.py",
        "        if 2 * self.cancelled.count < CANCELLED_MAX and 2 * self._size_bytes < BYTES_MAX:\n",
        "        if self.cancelled.count < CANCELLED_MAX:\n",
        ["tests/delay/arrivals/test_state.py", "tests/delay/arrivals/test_state.py"],
    ),
    Mutant(
        "a-stopped-partition-keeps-its-window",
        "what a stopped partition has not on the disk keeps nobody else's messages waiting",
        "tfmq/delay/target_queue.py",
        "        self._owner.flow_control.release(size_bytes)\n\n",
        "        if error is None:\n            self._owner.flow_control.release(size_bytes)\n\n",
        [
            "tests/delay/test_target_queue.py",
            "tests/delay/test_target_queue.py",
            "tests/delay/test_flow_control.py",
            DELAY,
        ],
    ),
    Mutant(
        "what-cannot-be-read-ahead-holds-up-the-rest",
        "what cannot be read keeps nothing waiting that is due before it",
        "tfmq/delay/record_reader.py",
        "            self._read(part, done)\n        elif life",
        "            done(None, error)\n        elif life",
        ["tests/delay/test_record_reader.py", "tests/delay/test_target_queue.py"],
    ),
    Mutant(
        "what-was-not-sure-at-a-start-is-never-known",
        "what a start on a full disk could not make durable comes when there is space",
        "tfmq/delay/dispatcher.py",
        "                self._scheduler.load_tail(from_offset, end, done)\n",
        "                self._non_durable.append_failed(ticket)\n",
        ["tests/delay/test_dispatcher.py"],
    ),
)

DELAY_PROMISES: Final = _HANDLES + _LIMITS + _DUES + _STORE + _WAITING + _LISTS + _ORDER
