"""Bugs to plant in the broker: when it answers, what it takes twice, what it forgets."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

WRITES: Final = "tests/broker/test_writes.py"
PRODUCERS: Final = "tests/broker/test_producers.py"
POLLS: Final = "tests/broker/test_polls.py"
GROUPS: Final = "tests/broker/test_groups.py"
OFFSETS: Final = "tests/broker/test_offsets.py"
LEASES: Final = "tests/broker/test_leases.py"
CHANGES: Final = "tests/broker/test_topic_changes.py"
CATALOG: Final = "tests/broker/test_catalog.py"
STARTUP: Final = "tests/broker/test_startup.py"
FOLDERS: Final = "tests/broker/test_folders.py"

ANSWERS: Final = (
    Mutant(
        "answered-before-the-force",
        "acks synced is answered once the batch is on the disk",
        "tfmq/broker/writes.py",
        "        if self._request.acks == ACKS_SYNCED:\n            partition.when_forced",
        "        if self._request.acks > ACKS_SYNCED:\n            partition.when_forced",
        [WRITES],
    ),
    Mutant(
        "answered-before-the-write",
        "acks written is answered once the batch is in the log",
        "tfmq/broker/writes.py",
        "        return [Batch(self._body, request.blocks,",
        "        if request.acks != ACKS_NONE:\n            self._reply.ok([], request.acks, False, 0, 0)\n"
        "        return [Batch(self._body, request.blocks,",
        [WRITES],
    ),
    Mutant(
        "repeat-answered-before-the-force",
        "a repeat waits for the durability that it asks for",
        "tfmq/broker/writes.py",
        "        if repeat.walk is None:\n"
        "            self._settle(partition, answer.end, answer.positions, True, answer)\n",
        "        if repeat.walk is None:\n            self._settle(partition, 0, answer.positions, True, answer)\n",
        [WRITES],
    ),
    Mutant(
        "failed-force-called-synced",
        "a failed force is an error to whoever waited",
        "tfmq/broker/writes.py",
        "        if error is not None:\n            self.refused(faults.client_error(error, UNKNOWN))\n"
        "        else:\n            self._ok(positions, ACKS_SYNCED, *fields)\n",
        "        self._ok(positions, ACKS_SYNCED, *fields)\n",
        [WRITES],
    ),
    Mutant(
        "durability-overstated",
        "the answer names the durability that was reached",
        "tfmq/broker/writes.py",
        "            self._ok(positions, durability(partition.log, end), *fields)\n",
        "            self._ok(positions, ACKS_SYNCED, *fields)\n",
        [WRITES],
    ),
    Mutant(
        "refused-append-answered-ok",
        "a failed append is an error to every sender in it",
        "tfmq/broker/partition.py",
        "            self._refuse(staged, _append_error(error))\n            return\n",
        "            return\n",
        [WRITES],
    ),
    Mutant(
        "unknown-outcome-called-not-done",
        "an error whose outcome is unknown never says that nothing happened",
        "tfmq/broker/partition.py",
        "        known.outcome = UNKNOWN\n",
        "        known.outcome = NOT_DONE\n",
        [WRITES, "tests/broker/test_faults.py", "tests/broker/test_promises.py"],
    ),
    Mutant(
        "broker-skips-the-check-of-batches",
        "a damaged batch is refused before the first byte is written",
        "tfmq/broker/partition.py",
        "        for batch in batches:\n            self.log.check(batch)\n        return batches\n",
        "        return batches\n",
        [WRITES],
    ),
    Mutant(
        "flush-never-due",
        "unforced messages are forced after N messages or T seconds",
        "tfmq/broker/partition.py",
        "        if due is None:\n            return\n        if due",
        "        if due is None or due:\n            return\n        if due",
        ["tests/broker/test_engine.py"],
    ),
    Mutant(
        "append-while-the-roll-runs",
        "while file work runs in a worker nothing is appended",
        "tfmq/broker/partition.py",
        "        while self._queue and not self.working:\n",
        "        while self._queue:\n",
        ["tests/broker/test_partition.py"],
    ),
    Mutant(
        "catalog-answered-before-the-force",
        "a topic, a lease, a generation is answered once it is forced",
        "tfmq/broker/catalog.py",
        "        if offset <= self.log.forced_offset:\n            forced(None)\n",
        "        if offset <= self.log.end_offset:\n            forced(None)\n",
        [OFFSETS, LEASES],
    ),
    Mutant(
        "catalog-error-swallowed",
        "a failed force of the catalog is an error to all who waited",
        "tfmq/broker/catalog.py",
        "            known = None if error is None else faults.client_error(error, UNKNOWN)\n",
        "            known = None\n",
        [CATALOG, LEASES],
    ),
)

STREAMS: Final = (
    Mutant(
        "gap-accepted",
        "a gap in a stream is refused",
        "tfmq/broker/producers.py",
        "            raise SequenceGap(expected=stream.next, found=sequence)\n        return _repeat",
        "            return None\n        return _repeat",
        [PRODUCERS],
    ),
    Mutant(
        "gap-within-a-turn-accepted",
        "a gap in a stream is refused, also between batches of one turn",
        "tfmq/broker/writes.py",
        "        elif request.sequence > expected and request.acks != ACKS_NONE:\n"
        "            raise SequenceGap(expected=expected, found=request.sequence)\n",
        "",
        [WRITES],
    ),
    Mutant(
        "repeat-appended-again",
        "a batch that is sent again is stored once",
        "tfmq/broker/writes.py",
        "            if repeat is not None:\n"
        "                self._repeat(partition, repeat)\n                return None\n",
        "",
        [WRITES],
    ),
    Mutant(
        "repeat-within-a-turn-appended-again",
        "a batch that is sent twice in one turn is stored once",
        "tfmq/broker/writes.py",
        "        elif request.sequence < expected:\n            raise NotYet\n        elif",
        "        elif",
        [WRITES],
    ),
    Mutant(
        "partly-known-batch-accepted",
        "a batch of which a part is stored is refused",
        "tfmq/broker/producers.py",
        "    if sequence + records > stream.next:\n        raise BadRequest(\n",
        "    if sequence + records > stream.next + records:\n        raise BadRequest(\n",
        [PRODUCERS],
    ),
    Mutant(
        "closed-id-accepted",
        "an id that has a successor never sends again",
        "tfmq/broker/producers.py",
        "        if stream.successor:\n            raise StaleProducer",
        "        if stream.successor < 0:\n            raise StaleProducer",
        [PRODUCERS],
    ),
    Mutant(
        "unknown-id-accepted",
        "an id that was never leased, or too long ago, is refused",
        "tfmq/broker/producers.py",
        "            self.require_new(producer_id, now_ms)\n            if sequence and not gaps:\n",
        "            if sequence and not gaps:\n",
        [PRODUCERS],
    ),
    Mutant(
        "unknown-id-accepted-in-the-middle",
        "an unknown id begins at sequence 0",
        "tfmq/broker/producers.py",
        "            if sequence and not gaps:\n                raise UnknownProducer(producer_id=producer_id)\n",
        "",
        [PRODUCERS],
    ),
    Mutant(
        "forgotten-id-taken-for-new",
        "an id that was forgotten is never taken for a new one",
        "tfmq/broker/producers.py",
        "            self.floor = max(self.floor, producer_id)\n",
        "",
        [PRODUCERS],
    ),
    Mutant(
        "streams-not-in-the-snapshot",
        "idempotence survives restarts",
        "tfmq/broker/producers.py",
        "            for producer_id, each in self._streams.items()\n        ]\n",
        "            for producer_id, each in ()\n        ]\n",
        [PRODUCERS],
    ),
    Mutant(
        "successor-answered-before-the-force",
        "a successor is answered once the closing of the old id is on the disk",
        "tfmq/broker/writes.py",
        "    partition.when_forced(partition.log.end_offset, forced)\n",
        "    forced(None)\n",
        [WRITES],
    ),
    Mutant(
        "successor-before-what-was-sent",
        "a succession is an append of its own, behind what was sent before it",
        "tfmq/broker/partition.py",
        "        return size <= self._append_bytes_max and not work.alone and not staged.items[0][0].alone\n",
        "        return size <= self._append_bytes_max\n",
        [WRITES, "tests/broker/test_partition.py"],
    ),
    Mutant(
        "effect-applied-twice",
        "a transaction's or timer's messages are appended once",
        "tfmq/broker/writes.py",
        "        if place is not None and (self.source.high, self.source.low) <= place:\n",
        "        if place is None and self.source.high < 0:\n",
        [WRITES],
    ),
    Mutant(
        "leases-not-forced",
        "no id is given out before its range is forced",
        "tfmq/broker/leases.py",
        "        self._catalog.submit((LEASE, end, self._clock.wall_ms()), forced)\n",
        "        self._catalog.submit((LEASE, end, self._clock.wall_ms()), lambda error: None)\n"
        "        forced(None)\n",
        [LEASES],
    ),
    Mutant(
        "lease-given-twice",
        "leased ranges never overlap",
        "tfmq/broker/leases.py",
        "            self._next += count\n",
        "            self._next += count - 1\n",
        [LEASES],
    ),
    Mutant(
        "incarnation-ignored",
        "nothing meant for a deleted topic reaches a new one of the same name",
        "tfmq/broker/topics.py",
        "        if topic.incarnation != incarnation:\n",
        "        if incarnation < 0:\n",
        [POLLS, CHANGES],
    ),
)

TOPICS: Final = (
    Mutant(
        "topic-answered-before-its-folders-are-forced",
        "a topic that was answered is there after a power cut",
        "tfmq/broker/folders.py",
        "                opened.append(self.open(topic, number))\n            self._disk.force_folder(self._data)\n",
        "                opened.append(self.open(topic, number))\n",
        [CHANGES],
    ),
    Mutant(
        "deleted-without-a-force-of-the-folder",
        "a deleted topic stays deleted over a power cut",
        "tfmq/broker/folders.py",
        "            paths.append(aside)\n        self._disk.force_folder(self._data)\n",
        "            paths.append(aside)\n",
        [CHANGES, FOLDERS, "tests/broker/test_promises.py"],
    ),
    Mutant(
        "deleted-without-a-rename",
        "a topic made again finds its place free",
        "tfmq/broker/folders.py",
        "            if self._disk.exists(path):\n                self._disk.rename(path, aside)\n",
        "",
        [CHANGES, FOLDERS],
    ),
    Mutant(
        "files-of-a-deleted-topic-stay",
        "the files of a deleted topic are removed",
        "tfmq/broker/topic_changes.py",
        "            end(None)\n            self._run(partial(self._folders.unlink, paths), _loud)\n",
        "            end(None)\n",
        [CHANGES],
    ),
    Mutant(
        "failed-creation-left-behind",
        "a creation that fails is taken back",
        "tfmq/broker/topic_changes.py",
        "                self._undo(topic, undo, error, end)\n                return\n",
        "                end(faults.client_error(error or RuntimeError(), UNKNOWN))\n                return\n",
        [CHANGES],
    ),
    Mutant(
        "decided-deletion-forgotten-at-a-start",
        "a deletion that was decided is finished by the next start",
        "tfmq/broker/startup.py",
        "    for topic in _in_state(house, DELETING):\n",
        "    for topic in ():\n",
        [CHANGES],
    ),
    Mutant(
        "missing-folder-made-in-silence",
        "a partition whose folder is gone takes no writes until somebody looked",
        "tfmq/broker/folders.py",
        "            if missing:\n                opened.log.stop(\n",
        "            if not path:\n                opened.log.stop(\n",
        [STARTUP],
    ),
    Mutant(
        "second-broker-on-the-folder",
        "one broker a data folder",
        "tfmq/broker/startup.py",
        "    house.lock = house.disk.lock(join(house.data, LOCK_NAME))\n",
        "    house.lock = house.disk.lock(join(house.data, str(id(house))))\n",
        [STARTUP],
    ),
    Mutant(
        "newer-data-folder-opened",
        "a data folder of a later release is refused",
        "tfmq/broker/catalog.py",
        "    if found > FORMAT:\n        raise NewerFormat(path, found, FORMAT)\n",
        "",
        [STARTUP],
    ),
    Mutant(
        "damaged-catalog-served",
        "the broker does not start on a damaged catalog",
        "tfmq/broker/catalog.py",
        "        if log.damage:\n",
        "        if log.damage and log.closed:\n",
        [STARTUP],
    ),
    Mutant(
        "auto-create-cannot-be-switched-off",
        "topics are made on first use only where that is allowed",
        "tfmq/broker/topic_changes.py",
        "        if not self._auto_create:\n            raise UnknownTopic(\n",
        "        if not self._topics:\n            raise UnknownTopic(\n",
        [CHANGES],
    ),
)

READERS_AND_GROUPS: Final = (
    Mutant(
        "fetch-not-woken",
        "a waiting fetch is answered as soon as there is something to read",
        "tfmq/broker/partition.py",
        "        for waiter in self._waiting.pop(offset):\n            waiter(error)\n        self.wake()\n",
        "        for waiter in self._waiting.pop(offset):\n            waiter(error)\n",
        [POLLS],
    ),
    Mutant(
        "fetch-does-not-ask-for-a-force",
        "a fetch that waits at the forced mark asks for a force",
        "tfmq/broker/polls.py",
        '        if poll.upto == "forced":\n            partition.ask_force()\n',
        "",
        [POLLS],
    ),
    Mutant(
        "fetch-answered-before-its-time",
        "a waiting fetch ends empty when its time is up, not before",
        "tfmq/broker/polls.py",
        "        if not poll.until or self._timers.now() >= poll.until:\n",
        "        if not poll.until or self._timers.now() >= poll.until - 1:\n",
        [POLLS],
    ),
    Mutant(
        "fetch-reads-what-is-only-written",
        "a reader gets forced messages unless it asks for more",
        "tfmq/broker/polls.py",
        '"written" if request.read == READ_WRITTEN else "forced"\n',
        '"written"\n',
        [POLLS],
    ),
    Mutant(
        "filter-does-not-advance",
        "a tag filter that rejects everything still advances",
        "tfmq/broker/polls.py",
        "            poll.offset = chunk.next\n            self._park(poll)\n",
        "            self._park(poll)\n",
        [POLLS],
    ),
    Mutant(
        "filter-drops-what-matches",
        "blocks with a wanted tag are never left out",
        "tfmq/broker/tags.py",
        "            elif flag >> FLAG_TAG_SHIFT in wanted:\n                matches = True\n",
        "            elif flag >> FLAG_TAG_SHIFT in wanted:\n                matches = position < size // 2\n",
        ["tests/broker/test_tags.py"],
    ),
    Mutant(
        "parked-fetches-unbounded",
        "too many waiting fetches are refused",
        "tfmq/broker/polls.py",
        "            if count >= self._limits[limit]:\n",
        "            if count < 0:\n",
        [POLLS],
    ),
    Mutant(
        "pending-bytes-unbounded",
        "what waits for the disk is bounded",
        "tfmq/broker/quotas.py",
        "        if self.requests >= self.requests_max or (self.bytes and self.bytes + size_bytes > self.bytes_max):\n",
        "        if self.requests >= self.requests_max:\n",
        ["tests/broker/test_quotas.py"],
    ),
    Mutant(
        "offsets-answered-before-the-force",
        "a commit is answered once it is forced",
        "tfmq/broker/offsets.py",
        "            self._catalog.submit((OFFSETS, group, generation, places), forced)\n",
        "            self._catalog.submit((OFFSETS, group, generation, places), lambda error: None)\n"
        "            forced(None)\n",
        [OFFSETS],
    ),
    Mutant(
        "offsets-read-before-they-are-forced",
        "an offset that was read never goes back",
        "tfmq/broker/offsets.py",
        "        self._catalog.when_forced(forced)\n",
        "        forced(None)\n",
        [OFFSETS],
    ),
    Mutant(
        "offsets-of-another-incarnation-saved",
        "offsets of a deleted topic do not reach a new one of the same name",
        "tfmq/broker/offsets.py",
        "        if each.incarnation != topic.incarnation and not (\n",
        "        if each.incarnation < 0 and not (\n",
        [OFFSETS],
    ),
    Mutant(
        "old-generation-accepted",
        "a member that was replaced saves nothing any more",
        "tfmq/broker/groups.py",
        "        if not member_id or current != (generation, member_id):\n",
        "        if not member_id:\n",
        [GROUPS],
    ),
    Mutant(
        "second-live-member-accepted",
        "a group has one live member",
        "tfmq/broker/groups.py",
        "        if live is not None and live.id != member_id:\n",
        '        if live is not None and live.id == "":\n',
        [GROUPS],
    ),
    Mutant(
        "generation-answered-before-the-force",
        "no generation is given twice, also over a crash",
        "tfmq/broker/groups.py",
        "        self._catalog.submit((GENERATION, request.group, generation, member_id), forced)\n",
        "        self._catalog.submit((GENERATION, request.group, generation, member_id), lambda error: None)\n"
        "        forced(None)\n",
        [GROUPS, "tests/broker/test_promises.py"],
    ),
    Mutant(
        "reset-does-not-fence",
        "a reset fences the member that was there before",
        "tfmq/broker/groups.py",
        '        self._joining[request.group] = (generation, "")\n        self._catalog.submit(\n'
        '            (GENERATION, request.group, generation, ""), partial(self._joined, request.group, generation)\n'
        "        )\n",
        "",
        [GROUPS],
    ),
)

BROKER: Final = ANSWERS + STREAMS + TOPICS + READERS_AND_GROUPS
