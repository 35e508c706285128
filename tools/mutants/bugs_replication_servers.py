"""Planted bugs: servers that replicate: answers ahead of the store, standbys that start with less, other folders."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

SIMULATION: Final = "tests/replication/test_simulation.py"
WRITER: Final = "tests/replication/test_entry_writer.py"
RANDOM: Final = f"{SIMULATION}::test_random_courses_lose_and_double_nothing"
ROUNDS: Final = "tests/journal/test_fsync.py"
BEHIND: Final = f"{SIMULATION}::test_a_standby_that_falls_behind_says_so_in_its_status_and_in_the_log"
_FSYNC: Final = "journal/fsync.py"
_PRIMARY: Final = "tfmq/replication/primary.py"
_WRITER: Final = "tfmq/replication/entry_writer.py"
_REPLICA: Final = "tfmq/replication/replica.py"
_FOLLOWER: Final = "tfmq/replication/follower.py"

_READS: Final = "tfmq/server/standby_reads.py"
_TEST_READS: Final = "tests/server/test_standby_reads.py"

REPLICATION_SERVERS: Final = (
    Mutant(
        "a-repaired-folder-counts-as-clean",
        "a folder that a repair has changed is not taken for a state of the replicas",
        "tfmq/cli/log.py",
        "            if changes:\n",
        "            if False:\n",
        ["tests/cli/test_log.py::test_a_repair_is_not_taken_for_a_state_of_the_replicas"],
    ),
    Mutant(
        "a-standby-serves-the-folder-while-it-is-made-again",
        "while a standby makes its folder again, readers wait",
        _READS,
        "        if version is None:\n",
        "        if version is None and False:\n",
        [_TEST_READS],
    ),
    Mutant(
        "a-standby-serves-logs-of-the-folder-that-it-had-before",
        "readers are served from the folder that was made again",
        _READS,
        "            self.topics.replace({})\n",
        "",
        [_TEST_READS],
    ),
    Mutant(
        "a-standby-knows-the-topics-of-its-start-only",
        "a topic that is made later is found",
        _READS,
        "            return self._clock.monotonic() - self._listed_at < LISTING_SECONDS\n",
        "            return True\n",
        [_TEST_READS],
    ),
    Mutant(
        "a-fetch-that-waits-at-a-standby-is-not-served",
        "a fetch waits at a standby for the next message",
        _READS,
        "            if each.log.forced_offset != offset:\n",
        "            if False:\n",
        [_TEST_READS],
    ),
    Mutant(
        "a-standby-keeps-the-files-of-all-logs-open",
        "a standby has a bounded number of open files",
        _READS,
        "        if oldest is not None:\n            oldest.close()\n",
        "",
        [_TEST_READS],
    ),
    Mutant(
        "a-standby-reads-for-everyone",
        "a user reads only what it may, at a standby, too",
        "tfmq/server/standby_handler.py",
        "            (self._reads if self._access is None else self._access).handle(request, body, reply, session)\n",
        "            self._reads.handle(request, body, reply, session)\n",
        [_TEST_READS],
    ),
    Mutant(
        "a-consumer-without-standby-stays-at-one-that-reads",
        "only a client that asks for it works with a standby",
        "tfmq/client/connection/connection.py",
        'is_accepted = self.accepts_standby or (self.reads_standby and properties.get("reads") is True)',
        'is_accepted = self.accepts_standby or properties.get("reads") is True',
        ["tests/e2e/test_replication.py::test_a_standby_serves_readers_and_goes_on_with_them_as_primary"],
    ),
    Mutant(
        "an-answer-does-not-wait-for-the-store",
        "what is answered as replicated is in the store",
        _PRIMARY,
        "        elif result[1] is None:\n",
        "        elif True:\n",
        [RANDOM],
    ),
    Mutant(
        "a-standby-without-its-store-claims-to-have-everything",
        "a standby that falls behind says so",
        _FOLLOWER,
        "        return silent if silent > SILENCE_SECONDS else 0.0\n",
        "        return 0.0\n",
        [BEHIND],
    ),
    Mutant(
        "a-standby-that-falls-behind-is-not-in-the-log",
        "a standby that falls behind says so",
        _FOLLOWER,
        "        if seconds >= LATE_SECONDS and not self._is_late:\n",
        "        if False:\n",
        [BEHIND],
    ),
    Mutant(
        "a-round-of-fsyncs-ends-before-it-is-stored",
        "messages are answered as replicated when they are in the store",
        _FSYNC,
        "        if when_stored is None:\n            self._complete(",
        "        if True:\n            self._complete(",
        [ROUNDS],
    ),
    Mutant(
        "a-round-of-fsyncs-waits-for-another-one-s-messages",
        "a round waits for what was written before it began",
        _PRIMARY,
        "        return partial(self._writer.when_stored, self._disk.cut())\n",
        "        return partial(self._writer.when_stored, self._writer.stored_number)\n",
        [RANDOM],
    ),
    Mutant(
        "a-round-of-fsyncs-waits-for-the-store-before-the-next-begins",
        "the store's latency does not keep the next round from beginning",
        _FSYNC,
        "            self.start()\n            when_stored(",
        "            when_stored(",
        [ROUNDS],
    ),
    Mutant(
        "a-repeated-request-begins-a-round-of-its-own",
        "what a round covers is not fsynced again",
        _FSYNC,
        "                if log in self._planned and self._planned[log].end >= log.end_offset:\n",
        "                if False:\n",
        [ROUNDS],
    ),
    Mutant(
        "any-number-of-rounds-waits-for-the-store",
        "a slow store gathers the messages of many requests",
        _FSYNC,
        "        while self._dirty and not self._is_fsyncing and len(self._rounds) < ROUNDS_MAX:\n",
        "        while self._dirty and not self._is_fsyncing:\n",
        [ROUNDS],
    ),
    Mutant(
        "an-entry-counts-although-one-below-is-missing",
        "an entry counts as stored when all below it are",
        _WRITER,
        "        while (next_one := self._stored_above.pop(self.stored_slot + 1, None)) is not None:\n",
        "        while (next_one := self._stored_above.pop(min(self._stored_above, default=0), None)) is not None:\n",
        [WRITER],
    ),
    Mutant(
        "the-entry-of-another-server-is-taken-for-our-own",
        "a server whose term was ended stores nothing more",
        _WRITER,
        "    return store.put_new(key, encoded) or store.get(key) == encoded\n",
        "    return store.put_new(key, encoded) or store.get(key) is not None\n",
        [WRITER],
    ),
    Mutant(
        "a-repeated-put-deposes-its-own-server",
        "a put that had an effect although it failed is recognized",
        _WRITER,
        "    return store.put_new(key, encoded) or store.get(key) == encoded\n",
        "    return store.put_new(key, encoded)\n",
        [WRITER],
    ),
    Mutant(
        "a-clock-set-back-makes-older-entries",
        "the times of entries never decrease",
        _WRITER,
        "        self.time_ms = max(self.time_ms, self._clock.wall_ms())\n        encoded",
        "        self.time_ms = self._clock.wall_ms()\n        encoded",
        [WRITER],
    ),
    Mutant(
        "a-new-primary-leaves-out-the-last-entries",
        "a standby applies all that counts before it serves",
        _REPLICA,
        "            if sealed.parent != position:\n",
        "            if False:\n",
        [RANDOM],
    ),
    Mutant(
        "a-restarted-primary-drops-what-only-its-disk-has",
        "a primary that starts again within its lease loses nothing that was written",
        _REPLICA,
        "            and (yield from self._resume_own_term(state))\n",
        "            and False\n",
        [f"{SIMULATION}::test_a_primary_that_restarts_goes_on_with_what_only_its_own_disk_has"],
    ),
    Mutant(
        "standbys-are-not-told-of-another-base",
        "a primary whose folder has more than the store says so with a BASE",
        _REPLICA,
        "needs_base=not (state.is_clean and sealed.parent == state.position))\n",
        "needs_base=False)\n",
        [f"{SIMULATION}::test_a_primary_that_restarts_goes_on_with_what_only_its_own_disk_has"],
    ),
    Mutant(
        "a-server-takes-its-term-up-again-after-a-hand-over",
        "a server that has handed over follows",
        _REPLICA,
        'self._write_state("standby" if self._successor else "primary", position, is_clean=True)\n',
        'self._write_state("primary", position, is_clean=True)\n',
        [f"{SIMULATION}::test_a_standby_that_asks_for_it_becomes_primary_without_a_pause_to_speak_of"],
    ),
    Mutant(
        "an-async-primary-forgets-what-did-not-fit",
        "after an outage of its store an async primary stores a snapshot of what it has dropped",
        _PRIMARY,
        "        self._needs_base = True\n        self.disk.drop()\n",
        "        self.disk.drop()\n        self.disk.resume()\n        self.writer._is_held = False\n",
        [f"{SIMULATION}::test_an_async_primary_serves_without_its_store_and_stores_a_snapshot_of_what_did_not_fit"],
    ),
    Mutant(
        "a-primary-without-its-store-accepts-for-ever",
        "a sync primary refuses requests after half a lease without its store",
        _PRIMARY,
        "            if not self._lease.may_serve(now):\n",
        "            if False:\n",
        [f"{SIMULATION}::test_a_primary_without_its_store_refuses_after_half_a_lease_and_serves_again"],
    ),
    Mutant(
        "a-roll-shows-what-is-not-replicated",
        "readers see nothing that a failover could take back",
        "journal/log/segments.py",
        "            if not is_replicated and offset > self.high_watermark:\n",
        "            if offset > self.high_watermark:\n",
        ["tests/journal/log/test_durability.py"],
    ),
    Mutant(
        "a-journal-roll-answers-before-the-store",
        "a transaction is not answered before it is replicated",
        "journal/wal/file.py",
        "            if not is_replicated and lsn > self.high_watermark:\n",
        "            if lsn > self.high_watermark:\n",
        ["tests/journal/wal/test_store.py"],
    ),
    Mutant(
        "an-old-copy-of-the-folder-goes-on",
        "an old copy of a primary's folder takes nothing back",
        _REPLICA,
        "            if not state.is_clean and (yield from self._is_old_copy(state, sealed.parent)):\n",
        "            if False:\n",
        [f"{SIMULATION}::test_an_old_copy_of_the_primary_s_folder_takes_nothing_back"],
    ),
    Mutant(
        "a-follower-stops-at-its-own-pace",
        "a standby goes on after a look that found nothing",
        _FOLLOWER,
        "                self._look_later(is_next)\n        else:\n",
        "        else:\n",
        [f"{SIMULATION}::test_a_standby_takes_over_when_the_primary_is_gone_for_a_lease"],
    ),
    Mutant(
        "results-of-the-store-wait-for-another-turn",
        "the broker goes on at once with what has waited for the store",
        "tfmq/server/replication.py",
        "WorkerThreads(reactor, STORE_THREADS, delivered=turn.request_end)",
        "WorkerThreads(reactor, STORE_THREADS)",
        ["tests/server/test_replication.py"],
    ),
)
