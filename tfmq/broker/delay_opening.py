"""The start of delayed delivery: the store of delayed messages that belongs to this data folder is opened before any
decided transaction is written, since that may bring some; it fires when everything else is there.

A store that is missing, another one's, or older than the partitions is refused by name: with it would go what waits,
or messages would get numbers that others had. A new one is begun only in a data folder that never had one, or by the
operator's word: an empty file DATA/meta/new-delay.
"""

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from journal.errors import Corrupt, Full, JournalError, NewerFormat
from journal.filenames import DAMAGED_SUFFIX, join
from journal.fsck.log_repair import repair
from journal.log.log import Log
from journal.record.block_trailer import SOURCE_DELAY
from tfmq.broker.arrivals_landing import INCARNATION, NAME, Arrivals, ArrivalsLanding
from tfmq.broker.delay import Delay
from tfmq.broker.folders import say_recovery
from tfmq.broker.house import House
from tfmq.broker.producers import Producers
from tfmq.broker.register import DELAY_STORE, ID_SLACK, LEASE
from tfmq.data_dir import new_delay_advice
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX, LOG_ID, SEGMENT_BYTES, arrival_options, damaged_ranges
from tfmq.delay.arrivals.state import ArrivalState
from tfmq.delay.buckets.store import Buckets
from tfmq.delay.delay_queue import DelayQueue
from tfmq.delay.requests import DelaySettings

log = logging.getLogger("tfmq.broker")

FOLDER_NAME: Final = "delay"
ARRIVALS_NAME: Final = "arrivals"
WORD_NAME: Final = "new-delay"
"""In DATA/meta: a store is to be begun. The operator's word that the old one is given up; the first start gives it to
itself, and takes it back when the store is there.
"""


class DelayStore(NamedTuple):
    """What is on the disk of delayed messages: where they arrive, and the buckets in which they wait."""

    log: Log
    state: ArrivalState
    buckets: Buckets
    lost: int = 0
    """Messages that damage of the arrivals took."""

    @property
    def producers(self) -> Producers:
        """Who has sent what to the arrivals."""
        return cast(Producers, self.state.producers)

    def abandon(self, reason: str) -> None:
        """Lets go of it without writing anything more."""
        self.log.abandon(reason)
        self.buckets.abandon()


def open_delay(house: House) -> DelayStore:
    """The store of this data folder. Raises Corrupt, NewerFormat, OSError, Full, Stopped."""
    folder, word = join(house.data, FOLDER_NAME), join(house.meta, WORD_NAME)
    if not house.disk.exists(folder):
        _require_new(house, folder)
        house.disk.make_folder(folder)
    house.disk.force_folder(house.data)
    buckets = Buckets.open(
        house.disk, folder, new_id=lambda: _new_id(house, folder), randomness=house.randomness
    )
    try:
        _require_own(house, folder, buckets)
        store = _open_arrivals(house, folder, buckets)
    except BaseException:
        buckets.abandon()
        raise
    try:
        _require_newest(house, folder, store)
        _take_over(house, store)
    except BaseException:
        store.abandon("the start failed")
        raise
    if house.disk.exists(word):
        house.disk.unlink(word)
        house.disk.force_folder(house.meta)
    return store


def _require_new(house: House, folder: str) -> None:
    """Raises Corrupt unless there never was a store, or it is given up."""
    if house.catalog.register.delay_store and not house.disk.exists(join(house.meta, WORD_NAME)):
        raise Corrupt(folder, 0, 0, f"the store of delayed messages is missing. {_way_on(house)}")


def _way_on(house: House) -> str:
    return new_delay_advice(house.meta)


def _new_id(house: House, folder: str) -> int:
    """For a store that is made: nobody had the id before, and the catalog knows it first. A start that is cut short in
    between finds the word, and begins another one. Raises Corrupt, Stopped, Full, OSError.
    """
    _require_new(house, folder)
    word = join(house.meta, WORD_NAME)
    if not house.disk.exists(word):
        house.disk.create(word).close()
        house.disk.force_folder(house.meta)
    store_id = house.catalog.register.next_id
    house.catalog.enter((LEASE, store_id + 1, house.clock.wall_ms()))
    house.catalog.enter((DELAY_STORE, store_id))
    return store_id


def _require_own(house: House, folder: str, buckets: Buckets) -> None:
    """Raises Corrupt unless it is the store that the catalog knows."""
    known = house.catalog.register.delay_store
    if known and known != buckets.store_id:
        reason = f"it holds the delayed messages of store {buckets.store_id}, and store {known} belongs to this data"
        raise Corrupt(folder, 0, 0, f"{reason}. {_way_on(house)}")


def _open_arrivals(house: House, folder: str, buckets: Buckets) -> DelayStore:
    path = join(folder, ARRIVALS_NAME)
    is_there = house.disk.exists(path)
    if not is_there or not house.disk.list(path):
        if buckets.spilled_offset or not house.disk.exists(join(house.meta, WORD_NAME)):
            raise Corrupt(
                path, 0, 0, f"the log in which delayed messages arrive is missing. {_way_on(house)}"
            )
        if not is_there:
            house.disk.make_folder(path)
    house.disk.force_folder(folder)
    opened, state = _open_log(house, path)
    if not damaged_ranges(opened, buckets.spilled_offset):
        say_recovery(opened)
        return DelayStore(opened, state, buckets)
    opened.abandon("it is damaged")
    say_recovery(opened, damage=False)  # what comes of the damage is told below, once
    lost = _mend(house, path, {buckets.spilled_offset: buckets.spilled_number})
    opened, state = _open_log(house, path)
    say_recovery(opened)
    return DelayStore(opened, state, buckets, lost)


def _open_log(house: House, path: str) -> tuple[Log, ArrivalState]:
    state = ArrivalState(house.producers())
    flush = house.config.flush
    opened = Log.open(
        house.disk,
        path,
        log_id=LOG_ID,
        clock=house.clock,
        options=arrival_options(flush.messages, flush.seconds, _segment_bytes(house)),
        state=state,
    )
    if opened.stopped is not None:
        _resume(opened)
    return opened, state


def _mend(house: House, path: str, starts: Mapping[int, int]) -> int:
    """Keeps what is whole where arrivals that are in no bucket are damaged, as `tfmq log repair` does; how many
    messages are lost. Whatever passed over it would give up for good what is whole beside the damage. Raises OSError,
    Full.
    """
    try:
        repaired = repair(house.disk, path, suffix=ARRIVALS_SUFFIX, starts=starts, expected=LOG_ID)
    except (Corrupt, NewerFormat) as error:
        log.error(
            "delayed messages are lost where the arrivals are damaged; they cannot be mended: %s", error
        )
        return 0
    except (OSError, Full) as error:
        log.error(
            "%s is damaged, and cannot be mended now (%s). What is whole in it would be lost: the start ends here."
            " Make space, or mend the disk, then start again",
            path, error,
        )  # fmt: skip
        raise
    for each in repaired:
        log.error(
            "%s was damaged from %d to %d (%s): %d records are kept, %d lost; the file as it was is kept as %s",
            each.file, each.first, each.next, each.reason, each.kept, each.lost, each.file + DAMAGED_SUFFIX,
        )  # fmt: skip
    return sum(each.lost for each in repaired)


def _segment_bytes(house: House) -> int:
    """An append, which is a frame and its due times at most, fits in a segment."""
    return max(SEGMENT_BYTES, 2 * house.limits["frame_bytes"])


def _resume(arrivals: Log) -> None:
    """No topic is there to be resumed, so a start is what lifts the stop: what was answered is forced, and recovery
    proves the rest again; if even that fails, what waits is delivered all the same.
    """
    log.error("the arrivals of delayed messages were stopped (%s); trying to resume them", arrivals.stopped)
    try:
        arrivals.resume()
    except (OSError, JournalError) as error:
        log.error("the arrivals of delayed messages stay stopped: %s", error)


def _require_newest(house: House, folder: str, store: DelayStore) -> None:
    """Buckets are filled from the arrivals, and a message fires once its arrival is on the disk: so the arrivals reach
    as far as both. Raises Corrupt.
    """
    arrivals, buckets = store.log, store.buckets
    path = join(folder, ARRIVALS_NAME)
    end_offset, end_ordinal = arrivals.whole_end
    if end_offset < buckets.spilled_offset:
        reason = "the log in which delayed messages arrive is older than the buckets that were filled from it"
        raise Corrupt(path, 0, 0, f"{reason}. {_way_on(house)}")
    if arrivals.first_offset > buckets.spilled_offset:
        reason = (
            "the buckets are older than the log from which they are filled: what lies between is not there"
        )
        raise Corrupt(folder, 0, 0, f"{reason}. {_way_on(house)}")
    for each in house.topics.partitions():
        turn = each.log.applied(SOURCE_DELAY, buckets.store_id)
        if turn is not None and turn[1] >= end_ordinal:
            name = f"{each.name}-{each.number}"
            reason = f"the store of delayed messages is older than {name}, to which it delivered later ones"
            raise Corrupt(folder, 0, 0, f"{reason}. {_way_on(house)}")


def _take_over(house: House, store: DelayStore) -> None:
    """A catalog from a backup of the time before learns what the store knows: no id is given out twice."""
    register = house.catalog.register
    if house.catalog.log.stopped is not None:
        return
    if not register.delay_store:
        house.catalog.enter((DELAY_STORE, store.buckets.store_id))
    known = max(store.producers.highest, store.buckets.store_id)
    if known >= register.next_id:
        log.error("the catalog is older than the delayed messages: ids up to %d were given out before", known)
        house.catalog.enter((LEASE, known + 1 + ID_SLACK, house.clock.wall_ms()))


def join_delay(house: House, store: DelayStore) -> None:
    """Makes the parts that stand on the store. Broker time begins now, not below what any partition has fired."""
    arrivals, state, buckets, lost = store
    partition = Arrivals(
        NAME,
        INCARNATION,
        0,
        arrivals,
        store.producers,
        force=house.want,
        run=house.run,
        timers=house.timers,
        full_disk=house.full_disk,
        append_bytes_max=house.limits["append_bytes"],
    )
    settings = house.config.delay
    queue = DelayQueue(
        landing=ArrivalsLanding(partition, house.writes),
        state=state,
        buckets=buckets,
        destination=house.destination,
        timers=house.timers,
        clock=house.clock,
        run=house.run,
        settings=DelaySettings(settings.tick_ms, int(settings.outcome_seconds)),
        floor_ms=floor_ms(house, buckets.store_id),
    )
    house.delay = house.destination.delayed = Delay(
        partition=partition,
        queue=queue,
        buckets=buckets,
        node=house.node,
        topics=house.topics,
        register=house.catalog.register,
        writes=house.writes,
        quotas=house.quotas,
        limits=house.limits,
        levels=settings.levels,
        lost=lost,
    )
    house.retention.also(partition)


def floor_ms(house: House, store_id: int) -> int:
    """The highest due time that any partition has: broker time was there already."""
    turns = (each.log.applied(SOURCE_DELAY, store_id) for each in house.topics.partitions())
    return max((turn[0] for turn in turns if turn is not None), default=0)


def recover(house: House) -> None:
    """What waits is known again. Workers run in this thread. Raises what keeps that from being known."""
    recovered: list[BaseException | None] = []
    house.delay.queue.recover(recovered.append)
    if not recovered:
        raise RuntimeError("what delayed messages wait is not known")
    if recovered[0] is not None:
        raise recovered[0]
