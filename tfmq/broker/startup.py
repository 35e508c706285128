"""Startup of the broker: runs `STEPS` in order before the listener opens. If one fails, all opened files are closed."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from journal.disk import not_a_folder_error
from journal.errors import Corrupt, Full, JournalError, NewerFormat
from journal.filenames import (
    CHECKPOINT_NAME,
    DAMAGED_SUFFIX,
    LOCK_NAME,
    TRANSACTIONS_FOLDER,
    is_partition_file,
    join,
    parse_partition_folder,
)
from journal.fsck.log_repair import repair
from journal.fsync import Forcer
from journal.log.log import Log
from journal.record.block_trailer import SOURCE_DELAY, SOURCE_TRANSACTION
from tfmq.broker.broker import Broker
from tfmq.broker.catalog import SUFFIX, Catalog, read_version, write_version
from tfmq.broker.catalog_state import (
    CREATING,
    DELAY_STORE,
    DELETING,
    GONE,
    GROWING,
    JOURNAL,
    LEASE,
    LOST_IDS_MAX,
    NODE,
    OPEN,
    READY,
    TopicRow,
)
from tfmq.broker.delay_commands import DelayCommands
from tfmq.broker.delayed_produce import ArrivalPartition
from tfmq.broker.partition_dirs import RESERVED_NAMES, log_recovery
from tfmq.broker.topics import Topic
from tfmq.data_dir import FOLDER_NAMES, VERSION_NAME, is_partition_folder, new_delay_advice, new_journal_advice
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX, LOG_ID, SEGMENT_BYTES, arrival_options, damaged_ranges
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.buckets.fsck import ARRIVALS_NAME, rebuild_from_arrivals
from tfmq.delay.buckets.fsck import FOLDER_NAME as DELAY_FOLDER
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.delay_queue import DelayQueue
from tfmq.errors import NOT_DONE, ConfigError
from tfmq.replication.local_state import LocalStateFile
from tfmq.replication.materialize import is_incomplete
from tfmq.transaction.store import TransactionStore

log = logging.getLogger("tfmq.broker")


def require_complete(broker: Broker) -> None:
    """Raise ConfigError if the folder is being made from a replica, or if that was interrupted."""
    if is_incomplete(broker.disk, broker.data):
        raise ConfigError(
            f"The data folder {broker.data} is not complete: making it from a replica was interrupted, or has not ended"
            " yet. Repeat the command `tfmq replica restore`, or start the server with replicate.url, which goes on"
            " with it.",
            outcome=NOT_DONE,
        )


def create_data_folder(broker: Broker) -> None:
    """Create the data folder and DATA/meta, with missing parent folders."""
    for name in FOLDER_NAMES:
        path = join(broker.data, name)
        if broker.disk.exists(path) and not broker.disk.is_folder(path):
            raise not_a_folder_error(path)
    if broker.disk.exists(join(broker.meta, VERSION_NAME)):
        return
    # There is no version file. So an earlier start may have created folders, and may have ended before it fsynced their
    # parent folders. Therefore all parent folders are fsynced here.
    missing = []
    path = broker.meta
    while path not in ("", ".", "/") and not broker.disk.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        broker.disk.make_folder(path)
    for path in {*missing, broker.meta, broker.data}:
        broker.disk.force_folder(os.path.dirname(path) or ".")


def lock_data_folder(broker: Broker) -> None:
    broker.lock = broker.disk.lock(join(broker.data, LOCK_NAME))


def note_missing_replication(broker: Broker) -> None:
    """Note in the folder of a server with replicas that it is changed without them, where `replicate.url` is not set.

    Otherwise the server would go on from the last entry in its store as if nothing had happened since: no replica would
    ever have these changes, and later ones would not fit the replicas.
    """
    if broker.config.replicate.url:
        return
    role = LocalStateFile(broker.disk, broker.data).note_broker()
    if role:
        log.warning(
            "the folder %s is that of a %s, and replicate.url is not set: what is written now is in no store,"
            " and another server may serve other messages meanwhile. Set replicate.url unless that is intended",
            broker.data,
            role,
        )


def version_file(broker: Broker) -> None:
    """Read the version file, which has the data folder's format and the node's id, or create the file."""
    path = join(broker.meta, VERSION_NAME)
    if not broker.disk.exists(path):
        # If there are partitions and no version file, the folder is an incomplete copy of a data folder. A new catalog
        # would allocate the producer ids of these partitions again. The first batches of the new producers would then
        # be taken for duplicates, and be acked without being stored.
        for name in broker.disk.list(broker.data):
            if _is_partition(broker, name) and name not in RESERVED_NAMES:
                raise Corrupt(path, 0, 0, f"it is missing, and there are partitions ({name}) that it belongs to")
        write_version(broker.disk, broker.meta, broker.randomness(16).hex())
    broker.node = read_version(broker.disk, broker.meta).node


def _is_partition(broker: Broker, name: str) -> bool:
    """Return whether the folder `name` is a partition's: by the form of its name, and because it contains a log.

    An unrelated folder may have a name of this form, too.
    """
    if parse_partition_folder(name) is None:
        return False
    path = join(broker.data, name)
    return broker.disk.is_folder(path) and is_partition_folder(broker.disk.list(path))


def create_forcer(broker: Broker) -> None:
    # The forcer opens its handle for syncfs before the first write, because syncfs reports only errors of later writes.
    broker.forcer = Forcer(
        broker.disk,
        broker.run_unreplicated,
        anchor_path=broker.data,
        method=broker.config.flush.method,
        clock=broker.clock,
        begin=broker.begin_force,
        replicate=broker.replicate,
    )


def open_catalog(broker: Broker) -> None:
    """Open the catalog, and create the components that need it. Raises Corrupt (damaged, or missing beside data)."""
    children = broker.disk.list(broker.meta)
    if not any(is_partition_file(name, SUFFIX) for name in children):
        for name in broker.disk.list(broker.data):
            if _is_partition(broker, name) or name in (TRANSACTIONS_FOLDER, DELAY_FOLDER):
                raise Corrupt(broker.meta, 0, 0, f"the catalog is missing, and there is {name} that it belongs to")
    broker.catalog = Catalog(broker)
    _bind_node(broker)
    broker.create_components()


def _bind_node(broker: Broker) -> None:
    """Raise Corrupt if version file and catalog name different nodes. Enter the node's id in a catalog without one."""
    known = broker.catalog.state.node
    if known and known != broker.node:
        reason = f"it names the node {broker.node}, and the catalog beside it is of node {known}"
        raise Corrupt(join(broker.meta, VERSION_NAME), 0, 0, reason)
    try:
        if not known and broker.catalog.log.stopped is None:
            broker.catalog.append_now((NODE, broker.node))
        if not read_version(broker.disk, broker.meta).has_checksum:
            write_version(broker.disk, broker.meta, broker.node)
    except Full as error:
        log.warning("the node's id could not be entered in the catalog, the next start tries again: %s", error)


def finish_deletions(broker: Broker) -> None:
    """Finish deletions of topics that a stop or crash interrupted, and delete the files of deleted topics."""
    if broker.catalog.log.stopped is not None:
        return
    for topic in _in_state(broker, DELETING):
        broker.partition_dirs.rename_deleted(topic.name, topic.incarnation, topic.target)
        broker.catalog.append_now((GONE, topic.incarnation))
    broker.partition_dirs.delete_renamed(broker.partition_dirs.list_deleted())


def finish_creations(broker: Broker) -> None:
    """Create the missing partitions of topics whose creation or growth a stop or crash interrupted."""
    if broker.catalog.log.stopped is not None:
        return
    for topic in _in_state(broker, CREATING) + _in_state(broker, GROWING):
        try:
            for opened in broker.partition_dirs.create_missing(topic):
                opened.log.close()
        except (OSError, JournalError) as error:
            log.error("the topic %s cannot be finished now, the next start tries again: %s", topic.name, error)
        else:
            broker.catalog.append_now((READY, topic.incarnation))


def open_partitions(broker: Broker) -> None:
    """Open every partition's log. This recovers the log and rebuilds the producer state."""
    for topic in _in_state(broker, OPEN) + _in_state(broker, GROWING):
        opened = partial(broker.partition_dirs.open_or_reason, topic)
        broker.topics[topic.name] = Topic(topic, list(map(opened, range(topic.partitions))))
    broker.unknown_folders = broker.partition_dirs.unknown_folders(broker.catalog.state.topics)
    for name in broker.unknown_folders:
        log.warning("%s is no partition of a known topic and is left alone", name)


def skip_known_ids(broker: Broker) -> None:
    """If partitions have ids that the catalog has not leased (an older catalog was restored), skip these ids."""
    known = max((each.producers.highest_id for each in broker.topics.partitions()), default=0)
    _skip_ids(broker, known, "the partitions")


def _skip_ids(broker: Broker, known: int, source: str) -> None:
    """Skip the ids up to `known`, the highest id found in `source`, if the catalog's counter of ids is not above it."""
    if known >= broker.catalog.state.next_id:
        log.error("the catalog is older than %s: ids up to %d were given out before", source, known)
        broker.catalog.append_now((LEASE, known + 1 + LOST_IDS_MAX, broker.clock.wall_ms()))


def start_delay(broker: Broker) -> None:
    """Open the delay store (delayed messages on disk), and read the messages that are only in the arrival log."""
    open_delay(broker)
    recovered: list[BaseException | None] = []
    broker.delay_commands.queue.recover(recovered.append)  # complete on return
    if not recovered:
        raise RuntimeError("what delayed messages wait is not known")
    if recovered[0] is not None:
        raise recovered[0]


def start_transactions(broker: Broker) -> None:
    """Open the transaction journal, restore prepared transactions, and apply committed ones.

    Worker jobs and fsyncs run in this thread. A commit is applied later if one of its targets accepts no appends.
    """
    broker.create_transactions(open_transaction_store(broker))
    transactions = broker.transaction_commands
    recovered: list[bool] = []
    transactions.coordinator.recover(lambda: recovered.append(True))
    broker.end_turn()
    if not recovered:
        raise RuntimeError("decided transactions were neither written nor put off")
    counts = {str(state): count for state, count in transactions.store.state_counts.items() if count}
    if counts:
        log.info("transactions back from the journal: %s", counts)


def start_housekeeping(broker: Broker) -> None:
    """Start retention, verification, delayed delivery, schedules and session timeouts; then accept requests."""
    broker.retention.start()
    broker.segment_verifier.start()
    broker.delay_commands.queue.start()
    broker.schedule_commands.start()
    broker.group_coordinator.start()
    broker.is_starting = False
    broker.is_open = True


STEPS: Final[tuple[Callable[[Broker], None], ...]] = (
    require_complete,
    create_data_folder,
    lock_data_folder,
    note_missing_replication,
    version_file,
    create_forcer,
    open_catalog,
    finish_deletions,
    finish_creations,
    open_partitions,
    skip_known_ids,
    start_delay,
    start_transactions,
    start_housekeeping,
)


def start(broker: Broker) -> None:
    """Start the broker: run all STEPS. Raises ConfigError (not complete), Locked (by another
    process), NewerFormat, Corrupt, OSError, Full."""
    began = broker.clock.monotonic()
    # Garbage collection is off during the start, because the objects that a start creates stay alive. Scanning all
    # objects repeatedly took half of the time of a start with 100,000 prepared transactions.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for step in STEPS:
            step(broker)
    except BaseException:
        close_after_failure(broker)
        raise
    finally:
        if was_enabled:
            gc.enable()
    log.info(
        "%d topics, %d partitions opened in %.3f s",
        len(broker.topics),
        broker.topics.partition_count(),
        broker.clock.monotonic() - began,
    )


def close_after_failure(broker: Broker) -> None:
    """Close all files that a failed start has opened, without an fsync: no client got a reply yet."""
    for partition in broker.topics.partitions() if hasattr(broker, "topics") else ():
        partition.log.abandon("the start failed")
    if hasattr(broker, "delay_commands"):
        broker.delay_commands.abandon("the start failed")
    if hasattr(broker, "transaction_commands"):
        broker.transaction_commands.store.abandon("the start failed")
    if hasattr(broker, "catalog"):
        broker.catalog.log.abandon("the start failed")
    if hasattr(broker, "lock"):
        broker.lock.release()


def _in_state(broker: Broker, state: str) -> list[TopicRow]:
    return [topic for topic in broker.catalog.state.topics.values() if topic.state == state]


# Delayed delivery. The delay store (the arrival log and the buckets) is opened before any committed transaction is
# applied, because transactions may add delayed messages. Delivery starts with the other housekeeping.
#
# The start fails if the delay store or the transaction journal is missing, belongs to another data folder, or is older
# than the partitions: otherwise waiting messages and prepared transactions would be lost, or numbers used again. A new
# store or journal is created only in a data folder that never had one, or if the operator requests it by a file.

NEW_DELAY_MARKER: Final = "new-delay"
NEW_JOURNAL_MARKER: Final = "new-journal"
"""Files in DATA/meta that request a new delay store or a new transaction journal. An operator creates such a file to
replace a lost store or journal. The first start creates both files itself. A start deletes the file when the new store
or journal exists."""


def open_delay(broker: Broker) -> None:
    """Open the delay store of this data folder, and create the components that need it."""
    folder = join(broker.data, DELAY_FOLDER)
    _make_store_folder(broker, folder, _require_new_delay)
    _rebuild_buckets(broker, folder)
    new_id = partial(_new_store_id, broker, folder, _require_new_delay, NEW_DELAY_MARKER, DELAY_STORE)
    buckets = BucketStore.open(broker.disk, folder, new_id=new_id, randomness=broker.randomness)
    known = broker.catalog.state.delay_store
    try:
        if known and known != buckets.store_id:
            reason = f"it holds the delayed messages of store {buckets.store_id}, and store {known}"
            raise _delay_error(broker, folder, f"{reason} belongs to this data")
        partition, state, lost = _open_arrivals(broker, folder, buckets)
    except BaseException:
        buckets.abandon()
        raise
    try:
        _require_newest_delay(broker, folder, partition.log, buckets)
        if broker.catalog.log.stopped is None:
            if not known:
                broker.catalog.append_now((DELAY_STORE, buckets.store_id))
            _skip_ids(broker, max(partition.producers.highest_id, buckets.store_id), "the delayed messages")
        _create_delay(broker, partition, state, buckets, lost)
    except BaseException:
        partition.log.abandon("the start failed")
        buckets.abandon()
        raise
    _remove_marker(broker, NEW_DELAY_MARKER)


def _make_store_folder(broker: Broker, folder: str, require_new: Callable[[Broker, str], None]) -> None:
    if not broker.disk.exists(folder):
        require_new(broker, folder)
        broker.disk.make_folder(folder)
    broker.disk.force_folder(broker.data)


def _new_store_id(
    broker: Broker, folder: str, require_new: Callable[[Broker, str], None], marker: str, kind: int
) -> int:
    """Allocate the id of a new delay store or transaction journal, and enter the id in the catalog.

    The caller then creates the store or journal. If the start ends before that, the next start finds the file `marker`,
    and allocates another id. `require_new` raises an error if no new store may be created. `kind` is the kind of the
    catalog entry.
    """
    require_new(broker, folder)
    path = join(broker.meta, marker)
    if not broker.disk.exists(path):
        broker.disk.create(path).close()
        broker.disk.force_folder(broker.meta)
    new_id = broker.catalog.state.next_id
    broker.catalog.append_now((LEASE, new_id + 1, broker.clock.wall_ms()))
    broker.catalog.append_now((kind, new_id))
    return new_id


def _remove_marker(broker: Broker, marker: str) -> None:
    path = join(broker.meta, marker)
    if broker.disk.exists(path):
        broker.disk.unlink(path)
        broker.disk.force_folder(broker.meta)


def _delay_error(broker: Broker, path: str, reason: str) -> Corrupt:
    return Corrupt(path, 0, 0, f"{reason}. {new_delay_advice(broker.meta)}")


def _rebuild_buckets(broker: Broker, folder: str) -> None:
    try:
        repaired = rebuild_from_arrivals(broker.disk, folder)
    except (OSError, Full) as error:
        log.error(
            "buckets in %s cannot be read or repaired now (%s). What is whole would be lost: the start ends here. Make"
            " space, or repair the disk, then start again, or run `tfmq log repair %s`",
            folder, error, broker.data,
        )  # fmt: skip
        raise
    for each in repaired:
        log.error(
            "%s was damaged (%s): %d delayed messages are kept, %d lost; %s; the file as it was is kept as %s",
            each.file, each.reason, each.kept, each.lost, each.note, each.file + DAMAGED_SUFFIX,
        )  # fmt: skip


def _require_new_delay(broker: Broker, folder: str) -> None:
    if not broker.catalog.state.delay_store or broker.disk.exists(join(broker.meta, NEW_DELAY_MARKER)):
        return
    arrivals = join(folder, ARRIVALS_NAME)
    if broker.disk.exists(arrivals) and broker.disk.list(arrivals):
        # The checkpoint is written before the arrival log is created. So there was a checkpoint, and it is lost.
        reason = "the checkpoint of the delayed messages is missing, and the log in which they arrive is there"
        raise Corrupt(join(folder, CHECKPOINT_NAME), 0, 0, reason)
    raise _delay_error(broker, folder, "the store of delayed messages is missing")


def _open_arrivals(broker: Broker, folder: str, buckets: BucketStore) -> tuple[ArrivalPartition, ArrivalLogState, int]:
    """Open the arrival log, after a repair if it is damaged. Return log, state, and number of lost messages."""
    path = join(folder, ARRIVALS_NAME)
    is_there = broker.disk.exists(path)
    if not is_there or not broker.disk.list(path):
        if buckets.spilled_offset or not broker.disk.exists(join(broker.meta, NEW_DELAY_MARKER)):
            raise _delay_error(broker, path, "the log in which delayed messages arrive is missing")
        if not is_there:
            broker.disk.make_folder(path)
    broker.disk.force_folder(folder)
    partition, state = _open_arrival_log(broker, path)
    lost = 0
    if damaged_ranges(partition.log, buckets.spilled_offset):
        partition.log.abandon("it is damaged")
        log_recovery(partition.log, damage=False)  # the result of the repair is logged below
        lost = _repair_arrivals(broker, path, buckets.spilled_offset, buckets.spilled_number)
        partition, state = _open_arrival_log(broker, path)
    log_recovery(partition.log)
    return partition, state, lost


def _open_arrival_log(broker: Broker, path: str) -> tuple[ArrivalPartition, ArrivalLogState]:
    producers = broker.new_producer_state()
    state = ArrivalLogState(producers)
    flush = broker.config.flush
    options = arrival_options(flush.messages, flush.seconds, _segment_bytes(broker))
    opened = Log.open(broker.disk, path, log_id=LOG_ID, clock=broker.clock, options=options, state=state)
    if opened.stopped is not None:
        # The log is resumed now, because no command can resume it later. No acked message can be lost by that: acked
        # messages are durable, and recovery verifies all others again. If the resume fails, only delivery continues.
        log.error("the arrivals of delayed messages were stopped (%s); trying to resume them", opened.stopped)
        try:
            opened.resume()
        except (OSError, JournalError) as error:
            log.error("the arrivals of delayed messages stay stopped: %s", error)
    state.epochs.finish_recovery(opened.whole_end[1])
    return ArrivalPartition(opened, producers, broker, broker.produce_handler), state


def _segment_bytes(broker: Broker) -> int:
    return max(SEGMENT_BYTES, 2 * broker.limits["frame_bytes"])  # the largest append, one frame, must fit


def _repair_arrivals(broker: Broker, path: str, offset: int, number: int) -> int:
    """Repair the arrival log: keep undamaged records of damaged ranges. Return how many messages are lost.

    Messages before `offset` have numbers below `number`. They are not counted, because they are in the buckets (files
    of messages by due time), or were delivered or cancelled.
    """
    try:
        repaired = repair(broker.disk, path, suffix=ARRIVALS_SUFFIX, starts={offset: number}, expected=LOG_ID)
    except (Corrupt, NewerFormat) as error:
        log.error("delayed messages are lost where the arrivals are damaged; they cannot be repaired: %s", error)
        return 0
    except (OSError, Full) as error:
        log.error(
            "%s is damaged, and cannot be repaired now (%s). What is whole in it would be lost: the start ends here."
            " Make space, or repair the disk, then start again",
            path, error,
        )  # fmt: skip
        raise
    for each in repaired:
        log.error(
            "%s was damaged from %d to %d (%s): %d records are kept, %d lost; the file as it was is kept as %s",
            each.file, each.first, each.next, each.reason, each.kept, each.lost, each.file + DAMAGED_SUFFIX,
        )  # fmt: skip
    # A damaged range may begin with records that are in the buckets, too. Only the records after these can be lost.
    return sum(min(each.lost, max(0, each.first_ordinal + each.kept + each.lost - number)) for each in repaired)


def _require_newest_delay(broker: Broker, folder: str, arrivals: Log, buckets: BucketStore) -> None:
    """Raise Corrupt if the arrival log is older than buckets or partitions, or the buckets are older than that log.

    Buckets (files of messages by due time) are filled from the arrival log, and a message is delivered only after it is
    durable there. So all messages in buckets, and all delivered messages, must be before the end of the arrival log.
    """
    path = join(folder, ARRIVALS_NAME)
    end_offset, end_ordinal = arrivals.whole_end
    if end_offset < buckets.spilled_offset:
        reason = "the log in which delayed messages arrive is older than the buckets that were filled from it"
        raise _delay_error(broker, path, reason)
    if arrivals.first_offset > buckets.spilled_offset:
        reason = "the buckets are older than the log from which they are filled: what lies between is not there"
        raise _delay_error(broker, folder, reason)
    for each in broker.topics.partitions():
        turn = each.log.applied(SOURCE_DELAY, buckets.store_id)
        if turn is not None and turn[1] >= end_ordinal:
            name = f"{each.name}-{each.number}"
            reason = f"the store of delayed messages is older than {name}, to which it delivered later ones"
            raise _delay_error(broker, folder, reason)


def _create_delay(
    broker: Broker, partition: ArrivalPartition, state: ArrivalLogState, buckets: BucketStore, lost: int
) -> None:
    settings = broker.config.delay
    turns = (each.log.applied(SOURCE_DELAY, buckets.store_id) for each in broker.topics.partitions())
    # Broker time starts at the wall clock, or at the latest due time delivered to any partition if that is later.
    queue = DelayQueue(
        arrival_log=partition,
        state=state,
        buckets=buckets,
        apply_target=broker.apply_target,
        timers=broker.timers,
        clock=broker.clock,
        run=broker.run,
        tick_ms=settings.tick_ms,
        outcome_seconds=int(settings.outcome_seconds),
        floor_ms=max((turn[0] for turn in turns if turn is not None), default=0),
        mark_ready=broker.ready_marker("delay"),
    )
    broker.delay_commands = broker.apply_target.delayed = DelayCommands(
        partition=partition,
        queue=queue,
        buckets=buckets,
        epochs=state.epochs,
        node=broker.node,
        topics=broker.topics,
        register=broker.catalog.state,
        writes=broker.produce_handler,
        runtime=broker,
        lost=lost,
    )
    broker.retention.extra_partitions.append(partition)


# Transactions. The start fails if the journal is older than the partitions: new commits would be taken for applied
# ones, and be lost.


def open_transaction_store(broker: Broker) -> TransactionStore:
    """Open the transaction journal. Raises Corrupt (missing, damaged, too old), NewerFormat, OSError, Full, Stopped."""
    folder = join(broker.data, TRANSACTIONS_FOLDER)
    _make_store_folder(broker, folder, _require_new_journal)
    store = TransactionStore(
        broker.disk,
        folder,
        clock=broker.clock,
        randomness=broker.randomness,
        new_id=partial(_new_store_id, broker, folder, _require_new_journal, NEW_JOURNAL_MARKER, JOURNAL),
        lease_time=broker.catalog.state.lease_time_ms,
        request_fsync=broker.request_fsync,
        run=broker.run,
        limits=broker.limits,
        settings=broker.transaction_settings,
        decision_time=broker.delay_commands.queue.now_rounded_up_ms,
        mark_ready=broker.ready_marker("transactions"),
    )
    for warning in store.warnings:
        log.warning("the journal of transactions: %s", warning)
    try:
        _update_catalog_from_journal(broker, folder, store)
    except BaseException:
        store.abandon("the start failed")
        raise
    _remove_marker(broker, NEW_JOURNAL_MARKER)
    return store


def _require_new_journal(broker: Broker, folder: str) -> None:
    if broker.catalog.state.journal_id and not broker.disk.exists(join(broker.meta, NEW_JOURNAL_MARKER)):
        raise Corrupt(folder, 0, 0, f"the journal of transactions is missing. {new_journal_advice(broker.meta)}")


def _update_catalog_from_journal(broker: Broker, folder: str, store: TransactionStore) -> None:
    register = broker.catalog.state
    if register.journal_id and register.journal_id != store.journal_id:
        reason = f"it holds the journal {store.journal_id}, and journal {register.journal_id} belongs to this data"
        raise Corrupt(folder, 0, 0, f"{reason}. {new_journal_advice(broker.meta)}")
    _require_newest_journal(broker, folder, store)
    if broker.catalog.log.stopped is not None:
        return
    if not register.journal_id:
        # The catalog was restored from a backup that is older than the journal.
        broker.catalog.append_now((JOURNAL, store.journal_id))
    _skip_ids(broker, store.producer_states.highest_id, "the journal")


def _require_newest_journal(broker: Broker, folder: str, store: TransactionStore) -> None:
    """Raise Corrupt if the journal is older than a target to which its commits were applied.

    A commit is durable in the journal before its effects are written, so all applied LSNs are below the journal's end.
    """
    source = (SOURCE_TRANSACTION, store.journal_id)
    positions = [(f"{each.name}-{each.number}", each.log.applied(*source)) for each in broker.topics.partitions()]
    positions.append(("the catalog", broker.catalog.state.applied_lsns.get(store.journal_id)))
    positions.append(("the store of delayed messages", broker.delay_commands.partition.log.applied(*source)))
    for name, position in positions:
        if position is not None and position[0] >= store.end_lsn:
            reason = f"the journal is older than {name}, which has messages of later transactions"
            raise Corrupt(folder, store.end_lsn, position[0], f"{reason}. {new_journal_advice(broker.meta)}")
