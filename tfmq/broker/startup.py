"""The start, as a table in order: each step's ground is laid by those before it, and the listener comes
after all.

A step that fails ends the start; what was opened is let go again, so that a corrected start finds the
folder free.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from journal.disk import is_no_folder
from journal.errors import Corrupt, Full, JournalError
from journal.filenames import LOCK_NAME, TRANSACTIONS_FOLDER, join, known_in_partition, parse_partition_folder
from journal.fsync import Forcer
from tfmq.broker.catalog import SUFFIX, Catalog, read_version, write_version
from tfmq.broker.delay_opening import FOLDER_NAME as DELAY_FOLDER
from tfmq.broker.delay_opening import join_delay, open_delay
from tfmq.broker.delay_opening import recover as recover_delay
from tfmq.broker.folders import HOUSE_NAMES
from tfmq.broker.house import House
from tfmq.broker.register import (
    CREATING,
    DELETING,
    GONE,
    GROWING,
    ID_SLACK,
    LEASE,
    NODE,
    OPEN,
    READY,
    TopicRow,
)
from tfmq.broker.topics import Topic
from tfmq.broker.transaction_opening import open_store, recover
from tfmq.data_dir import FOLDER_NAMES, VERSION_NAME, is_log

log = logging.getLogger("tfmq.broker")


def data_folder(house: House) -> None:
    """The data folder and DATA/meta, with every folder above that is not there.

    Until the version file is there, which is written after this, a start before may have been cut short
    between making a folder and forcing its name; so all of the names are forced again.
    """
    for name in FOLDER_NAMES:
        path = join(house.data, name)
        if house.disk.exists(path) and not house.disk.is_folder(path):
            raise is_no_folder(path)
    if house.disk.exists(join(house.meta, VERSION_NAME)):
        return
    missing = []
    path = house.meta
    while path not in ("", ".", "/") and not house.disk.exists(path):
        missing.append(path)
        path = _above(path)
    for path in reversed(missing):
        house.disk.make_folder(path)
    for path in {*missing, house.meta, house.data}:
        house.disk.force_folder(_above(path))


def _above(path: str) -> str:
    head = path.rpartition("/")[0]
    return head or ("/" if path.startswith("/") else ".")


def lock(house: House) -> None:
    """One broker a data folder."""
    house.lock = house.disk.lock(join(house.data, LOCK_NAME))


def meta(house: House) -> None:
    """The data folder's format and the node's id.

    Partitions without them are half a copy: a new catalog would give their producers' ids to others, whose
    first batches then look like repeats, and are answered without being stored.
    """
    if not house.disk.exists(join(house.meta, VERSION_NAME)):
        for name in house.disk.list(house.data):
            if _is_partition(house, name) and name not in HOUSE_NAMES:
                path = join(house.meta, VERSION_NAME)
                raise Corrupt(
                    path, 0, 0, f"it is missing, and there are partitions ({name}) that it belongs to"
                )
        write_version(house.disk, house.meta, house.randomness(16).hex())
    house.node = read_version(house.disk, house.meta).node


def _is_partition(house: House, name: str) -> bool:
    """Whether the folder `name` holds a partition's log: others may be named like one."""
    path = join(house.data, name)
    return (
        parse_partition_folder(name) is not None
        and house.disk.is_folder(path)
        and is_log(house.disk.list(path))
    )


def forcer(house: House) -> None:
    """The group commit of all logs; its anchor is opened before the first write, so that it sees every
    error.
    """
    house.forcer = Forcer(
        house.disk,
        house.run,
        anchor_path=house.data,
        method=house.config.flush.method,
        clock=house.clock,
        begin=house.begin_force,
    )


def catalog(house: House) -> None:
    """What must not be forgotten besides messages. Raises Corrupt where it is missing: a new one would know none of the
    topics.
    """
    children = house.disk.list(house.meta)
    if not any(known_in_partition(name, SUFFIX) for name in children):
        for name in house.disk.list(house.data):
            if _is_partition(house, name) or name in (TRANSACTIONS_FOLDER, DELAY_FOLDER):
                raise Corrupt(
                    house.meta, 0, 0, f"the catalog is missing, and there is {name} that it belongs to"
                )
    house.catalog = Catalog.open(house.disk, house.meta, house.clock, house.want, house.run, house.timers)
    _bind_node(house)
    house.join()


def _bind_node(house: House) -> None:
    """The node's id is that of the version file and of the catalog: handles of delayed messages, dead letters and what
    Spark has saved name it. Raises Corrupt if they differ.
    """
    known = house.catalog.register.node
    if known and known != house.node:
        reason = f"it names the node {house.node}, and the catalog beside it is of node {known}"
        raise Corrupt(join(house.meta, VERSION_NAME), 0, 0, reason)
    try:
        if not known and house.catalog.log.stopped is None:
            house.catalog.enter((NODE, house.node))
        if not read_version(house.disk, house.meta).checked:
            write_version(house.disk, house.meta, house.node)
    except Full as error:
        log.warning(
            "the node's id could not be entered in the catalog, the next start tries again: %s", error
        )


def finish_deletions(house: House) -> None:
    """Topics whose deletion was decided go; so do files of those that had gone already."""
    if house.catalog.log.stopped is not None:
        return
    for topic in _in_state(house, DELETING):
        house.folders.put_aside(topic.name, topic.incarnation, topic.target)
        house.catalog.enter((GONE, topic.incarnation))
    house.folders.unlink(house.folders.aside())


def finish_creations(house: House) -> None:
    """Topics that were being made or grown: what is missing of them is made."""
    if house.catalog.log.stopped is not None:
        return
    for topic in _in_state(house, CREATING) + _in_state(house, GROWING):
        try:
            for opened in house.folders.make(topic):
                opened.log.close()
        except (OSError, JournalError) as error:
            log.error(
                "the topic %s cannot be finished now, the next start tries again: %s", topic.name, error
            )
        else:
            house.catalog.enter((READY, topic.incarnation))


def logs(house: House) -> None:
    """Every partition's log, recovered, with its producers."""
    for topic in _in_state(house, OPEN) + _in_state(house, GROWING):
        house.topics.put(house.folders.open_all(topic))
    house.strangers = house.folders.strangers(house.catalog.register.topics)
    for name in house.strangers:
        log.warning("%s is no partition of a known topic and is left alone", name)


def ids(house: House) -> None:
    """No id is given out that a partition knows: a catalog from an older backup than the partitions would."""
    known = max((each.producers.highest for each in house.topics.partitions()), default=0)
    if known >= house.catalog.register.next_id:
        log.error("the catalog is older than the partitions: ids up to %d were given out before", known)
        house.catalog.enter((LEASE, known + 1 + ID_SLACK, house.clock.wall_ms()))


def delay(house: House) -> None:
    """What waits for its time is known: decided transactions may bring more of that."""
    store = open_delay(house)
    try:
        join_delay(house, store)
    except BaseException:
        store.abandon("the start failed")
        raise
    recover_delay(house)


def transactions(house: House) -> None:
    """What is in doubt is back, what was decided is written: before anybody can ask."""
    house.join_transactions(open_store(house))
    recover(house)


def housekeeping(house: House) -> None:
    """Retention by the clock, what is due, and who is expected back."""
    house.retention.start()
    house.delay.queue.start()
    house.schedules.start()
    house.groups.start()
    house.starting = False
    house.open = True


STEPS: Final[tuple[Callable[[House], None], ...]] = (
    data_folder,
    lock,
    meta,
    forcer,
    catalog,
    finish_deletions,
    finish_creations,
    logs,
    ids,
    delay,
    transactions,
    housekeeping,
)


def start(house: House) -> None:
    """Runs the table. Raises Locked, NewerFormat, Corrupt, OSError, Full: why the broker cannot start."""
    began = house.clock.monotonic()
    try:
        with uncollected():
            for step in STEPS:
                step(house)
    except BaseException:
        let_go(house)
        raise
    log.info(
        "%d topics, %d partitions opened in %.3f s",
        len(house.topics),
        house.topics.partition_count(),
        house.clock.monotonic() - began,
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: what a start makes stays, and to look at it again and again was half of the start of a
    broker with 100,000 prepared transactions.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def let_go(house: House) -> None:
    """Releases what a failed start holds. Nothing was promised to anybody, so nothing needs to be forced."""
    for topic in house.topics.all() if hasattr(house, "topics") else ():
        _abandon(topic)
    if hasattr(house, "delay"):
        house.delay.abandon("the start failed")
    if hasattr(house, "transactions"):
        house.transactions.store.abandon("the start failed")
    if hasattr(house, "catalog"):
        house.catalog.log.abandon("the start failed")
    if hasattr(house, "lock"):
        house.lock.release()


def _abandon(topic: Topic) -> None:
    for partition in topic.partitions:
        if not isinstance(partition, str):
            partition.log.abandon("the start failed")


def _in_state(house: House, state: str) -> list[TopicRow]:
    return [topic for topic in house.catalog.register.topics.values() if topic.state == state]
