"""Planted bugs: the broker: topics, fetches, groups and their offsets."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

POLLS: Final = "tests/broker/test_fetch.py"
GROUPS: Final = "tests/broker/groups/test_assignment.py"
OFFSETS: Final = "tests/broker/groups/test_offsets.py"
CHANGES: Final = "tests/broker/test_topic_admin.py"
STARTUP: Final = "tests/broker/test_startup.py"
FOLDERS: Final = "tests/broker/test_partition_dirs.py"

TOPICS: Final = (
    Mutant(
        "topic-acked-before-its-folders-are-fsynced",
        "a topic whose creation was acknowledged exists after a power cut",
        "tfmq/broker/partition_dirs.py",
        "            self._disk.force_folder(self._data)\n            self._require_descriptors()\n",
        "            self._require_descriptors()\n",
        [CHANGES],
    ),
    Mutant(
        "deleted-without-a-fsync-of-the-folder",
        "a deleted topic stays deleted after a power cut",
        "tfmq/broker/partition_dirs.py",
        "            paths.append(aside)\n        self._disk.force_folder(self._data)\n",
        "            paths.append(aside)\n",
        [CHANGES, FOLDERS, "tests/broker/test_promises.py"],
    ),
    Mutant(
        "deleted-without-a-rename",
        "a topic that is created again finds its folder free",
        "tfmq/broker/partition_dirs.py",
        "            if self._disk.exists(path):\n                self._disk.rename(path, aside)\n",
        "",
        [CHANGES, FOLDERS],
    ),
    Mutant(
        "files-of-a-deleted-topic-stay",
        "the files of a deleted topic are removed",
        "tfmq/broker/topic_admin.py",
        (
            "            end(None)\n"
            "            self._run(partial(self._folders.delete_renamed, paths), _raise_unless_os_error)\n"
        ),
        "            end(None)\n",
        [CHANGES],
    ),
    Mutant(
        "failed-creation-not-undone",
        "a creation that fails is undone",
        "tfmq/broker/topic_admin.py",
        "                self._undo(new, undo, error, end)\n",
        "                end(client_error(error or RuntimeError(), UNKNOWN))\n",
        [CHANGES],
    ),
    Mutant(
        "decided-deletion-forgotten-at-a-start",
        "a deletion that is recorded in the catalog is completed by the next start",
        "tfmq/broker/startup.py",
        "    for topic in _in_state(broker, DELETING):\n",
        "    for topic in ():\n",
        [CHANGES],
    ),
    Mutant(
        "missing-folder-made-in-silence",
        "a partition whose folder is missing accepts no writes before an operator has resumed it",
        "tfmq/broker/partition_dirs.py",
        "            if missing:\n                opened.log.stop(",
        "            if not path:\n                opened.log.stop(",
        [STARTUP],
    ),
    Mutant(
        "second-broker-on-the-folder",
        "only one broker runs on a data folder",
        "tfmq/broker/startup.py",
        "    broker.lock = broker.disk.lock(join(broker.data, LOCK_NAME))\n",
        "    broker.lock = broker.disk.lock(join(broker.data, str(id(broker))))\n",
        [STARTUP],
    ),
    Mutant(
        "newer-data-folder-opened",
        "a data folder of a later release is refused",
        "tfmq/data_dir.py",
        "    if found > FORMAT:\n        raise NewerFormat(path, found, FORMAT)\n",
        "",
        [STARTUP],
    ),
    Mutant(
        "damaged-catalog-served",
        "the broker does not start with a damaged catalog",
        "tfmq/broker/catalog.py",
        "        if log.damage:\n",
        "        if log.damage and log.closed:\n",
        [STARTUP],
    ),
    Mutant(
        "auto-create-cannot-be-switched-off",
        "topics are created on first use only where that is allowed",
        "tfmq/broker/topic_admin.py",
        "        if not self._runtime.config.topics.auto_create:\n            raise UnknownTopic(\n",
        "        if not self._topics:\n            raise UnknownTopic(\n",
        [CHANGES],
    ),
)

READERS_AND_GROUPS: Final = (
    Mutant(
        "fetch-not-woken",
        "a waiting fetch is returned as soon as there are messages",
        "tfmq/broker/partition.py",
        ("            self.wake_parked()\n        for waiter in self._durability_waiters.pop(offset):\n"),
        "            pass\n        for waiter in self._durability_waiters.pop(offset):\n",
        [POLLS],
    ),
    Mutant(
        "fetch-does-not-ask-for-a-fsync",
        "a fetch that waits at the durable offset requests an fsync",
        "tfmq/broker/fetch.py",
        ('        if poll.upto == "forced":\n            partition.request_fsync()\n'),
        "",
        [POLLS],
    ),
    Mutant(
        "fetch-returned-before-its-time",
        "a waiting fetch returns empty when its time is up, not before",
        "tfmq/broker/fetch.py",
        "        if not poll.deadline or self._timers.now() >= poll.deadline:\n",
        "        if not poll.deadline or self._timers.now() >= poll.deadline - 1:\n",
        [POLLS],
    ),
    Mutant(
        "fetch-reads-what-is-only-written",
        "a reader gets durable messages unless it requests more",
        "tfmq/broker/fetch.py",
        '"written" if request.read == READ_WRITTEN else "forced",\n',
        '"written",\n',
        [POLLS],
    ),
    Mutant(
        "filter-does-not-advance",
        "a tag filter that rejects all messages still advances",
        "tfmq/broker/fetch.py",
        "            poll.offset = chunk.next\n            self._park(poll)\n",
        "            self._park(poll)\n",
        [POLLS],
    ),
    Mutant(
        "filter-drops-what-matches",
        "blocks with a requested tag are never left out",
        "tfmq/broker/fetch.py",
        "            elif flag >> FLAG_TAG_SHIFT in wanted:\n                matches = True\n",
        "            elif flag >> FLAG_TAG_SHIFT in wanted:\n                matches = position < size // 2\n",
        ["tests/broker/test_fetch.py"],
    ),
    Mutant(
        "filter-hides-damage",
        "a block is left out for its tags only if its checksum matches",
        "tfmq/broker/fetch.py",
        "                elif not _is_valid_block(view, start, position, offset, log_id):\n",
        "                elif position > size:\n",
        ["tests/broker/test_fetch.py"],
    ),
    Mutant(
        "last-segment-never-closed-by-age",
        "old messages are removed also from a topic without new messages",
        "journal/log/log.py",
        "            self._writer.roll_by_age(now_ms)\n",
        "            pass\n",
        ["tests/broker/test_retention.py"],
    ),
    Mutant(
        "age-of-a-segment-counted-from-its-last-append",
        "a message is not kept longer because others follow it",
        "journal/log/writer.py",
        "        oldest_ms = active.oldest_ms if seconds else None\n",
        "        oldest_ms = self._segment_set.append_time if seconds and active.size else None\n",
        ["tests/broker/test_retention.py"],
    ),
    Mutant(
        "full-disk-floods-the-log",
        "a full disk is logged once, and its end once",
        "tfmq/broker/reserve.py",
        "        if size_bytes >= self._refused_bytes or self._timers.now() >= self._refused_at + RECOVERED_SECONDS:\n",
        "        if size_bytes:\n",
        ["tests/broker/test_reserve.py"],
    ),
    Mutant(
        "waiting-fetches-unbounded",
        "too many waiting fetches are refused",
        "tfmq/broker/fetch.py",
        "            if count >= self._limits[limit]:\n",
        "            if count < 0:\n",
        [POLLS],
    ),
    Mutant(
        "pending-bytes-unbounded",
        "the bytes that wait to be written are bounded",
        "tfmq/broker/admission.py",
        (
            "        if self.pending_requests >= self.pending_requests_max or (\n"
            "            self.pending_bytes and self.pending_bytes + size_bytes > self.pending_bytes_max\n"
            "        ):\n"
        ),
        "        if self.pending_requests >= self.pending_requests_max:\n",
        ["tests/broker/test_admission.py"],
    ),
    Mutant(
        "offsets-acked-before-the-fsync",
        "a commit is acknowledged after its fsync",
        "tfmq/broker/groups/offsets.py",
        "            self._catalog.submit(entries[0], forced, *entries[1:])\n",
        "            self._catalog.submit(entries[0], lambda error: None, *entries[1:])\n            forced(None)\n",
        [OFFSETS],
    ),
    Mutant(
        "offsets-read-before-they-are-fsynced",
        "an offset that was read never goes back",
        "tfmq/broker/groups/offsets.py",
        "        self._catalog.when_durable(reply_when_done(reply, lambda: (rows,)))\n",
        "        reply_when_done(reply, lambda: (rows,))(None)\n",
        [OFFSETS],
    ),
    Mutant(
        "offsets-of-another-incarnation-saved",
        "offsets of a deleted topic do not apply to a new one of the same name",
        "tfmq/broker/groups/offsets.py",
        (
            "        if each.incarnation != topic.incarnation and not (any_incarnation and each.incarnation ="
            "= ANY_INCARNATION):\n"
        ),
        ("        if each.incarnation < 0 and not (any_incarnation and each.incarnation == ANY_INCARNATION):\n"),
        [OFFSETS],
    ),
    Mutant(
        "old-generation-accepted",
        "a commit of an earlier assignment is fenced, although the partition was assigned again",
        "tfmq/broker/groups/group.py",
        "        return owner is not None and owner.member == member_id and owner.generation <= generation\n",
        "        return owner is not None and owner.member == member_id\n",
        ["tests/broker/groups/test_offset_commands.py"],
    ),
    Mutant(
        "partition-given-away-under-its-owner",
        "a partition has one owner: the next one waits until the one before releases it",
        "tfmq/broker/groups/group.py",
        "                if key in self._pending or key in self._living_owners:\n",
        "                if key in self._pending:\n",
        [GROUPS],
    ),
    Mutant(
        "grant-reported-before-the-fsync",
        "an assignment is durable before it is sent to its member",
        "tfmq/broker/groups/coordinator.py",
        "            self.catalog.submit(first, partial(self._changes_written, group, changes, joins), *more)\n",
        (
            "            self.catalog.submit(first, partial(self._changes_written, group, changes, joins), *more,"
            " wait_durable=False)\n"
        ),
        [GROUPS, "tests/broker/test_promises.py"],
    ),
    Mutant(
        "reset-does-not-fence",
        "a reset fences all former members",
        "tfmq/broker/groups/offset_commands.py",
        '            before=[(GENERATION, request.group, generation, "")],\n',
        "            before=[],\n",
        ["tests/broker/groups/test_offset_commands.py"],
    ),
)

REPAIR: Final = "tests/broker/test_data_repair.py"

DATA_FOLDERS: Final = (
    Mutant(
        "cut-catalog-is-served-once",
        "a catalog that ends before its snapshot is refused by the first start",
        "tfmq/broker/catalog.py",
        "        _require_whole(disk, folder)\n",
        "",
        [REPAIR],
    ),
    Mutant(
        "catalog-before-its-snapshot-is-not-read",
        "a flipped bit of the catalog is found at the start, also before its newest snapshot",
        "tfmq/broker/catalog.py",
        "            if isinstance(item, DamagedRange) and base + item.first < durable_end:\n",
        "            if isinstance(item, DamagedRange) and base + item.next < base:\n",
        [REPAIR],
    ),
    Mutant(
        "rebuilt-catalog-gives-ids-again",
        "a rebuilt catalog gives out no id twice",
        "tfmq/broker/data_repair.py",
        (
            "    register.apply_entry((LEASE, known + 1 + LOST_IDS_MAX, register.leases[-1][1] if"
            " register.leases else 0))\n"
        ),
        "",
        [REPAIR],
    ),
    Mutant(
        "version-s-checksum-is-not-looked-at",
        "a flipped bit of the version file does not change the node",
        "tfmq/data_dir.py",
        "    if checked is not None and crc32(checked[1]) != int(checked[2], 16):\n",
        "    if checked is not None and not checked[2]:\n",
        [STARTUP],
    ),
    Mutant(
        "node-of-another-data-folder-is-taken",
        "a version file of another data folder is refused",
        "tfmq/broker/startup.py",
        "    if known and known != broker.node:\n",
        "    if not broker.node:\n",
        [STARTUP, REPAIR],
    ),
    Mutant(
        "folder-in-the-way-is-met-late",
        "a folder in place of a file is reported before anything is changed",
        "journal/log/recovery.py",
        "        self._require_files()\n        checkpoint, status",
        "        checkpoint, status",
        ["tests/journal/log/test_recovery_rules.py"],
    ),
    Mutant(
        "bytes-before-a-snapshot-are-not-missed",
        "missing bytes before a snapshot are reported as damage by the first start",
        "journal/log/recovery.py",
        "        if last.end < snapshot.offset:\n",
        "        if last.end < 0:\n",
        ["tests/journal/log/test_recovery_rules.py"],
    ),
)

KEEPING: Final = TOPICS + READERS_AND_GROUPS + DATA_FOLDERS
