"""The start of transactions: the journal that belongs to this data folder is opened, what is in doubt is back, and
what was decided is written, before anybody can ask for anything.

A journal that is missing, another one's, or older than the partitions is refused by name: with it would go what
was prepared, or decisions of a later time would look as if they were applied already. A new one is begun only in
a data folder that never had one, or by the operator's word: an empty file DATA/meta/new-journal.
"""

import logging
from typing import Final

from journal.errors import Corrupt
from journal.filenames import join
from journal.record.block_trailer import SOURCE_TRANSACTION
from tfmq.broker.house import House
from tfmq.broker.register import ID_SLACK, JOURNAL, LEASE
from tfmq.data_dir import new_journal_advice
from tfmq.transaction.store import JournalTransactionStore

log = logging.getLogger("tfmq.broker")

FOLDER_NAME: Final = "transactions"
WORD_NAME: Final = "new-journal"
"""In DATA/meta: a journal is to be begun. The operator's word that the old one is given up; the first start gives
it to itself, and takes it back when the journal is there.
"""


def open_store(house: House) -> JournalTransactionStore:
    """The journal of this data folder with all it holds. Raises Corrupt, NewerFormat, OSError, Full, Stopped."""
    folder, word = join(house.data, FOLDER_NAME), join(house.meta, WORD_NAME)
    if not house.disk.exists(folder):
        _require_new(house, folder)
        house.disk.make_folder(folder)
    house.disk.force_folder(house.data)
    store = JournalTransactionStore.open(
        house.disk,
        folder,
        clock=house.clock,
        randomness=house.randomness,
        new_id=lambda: _new_id(house, folder),
        leased_ms=house.catalog.register.leased_ms,
        force=house.want,
        run=house.run,
        limits=house.limits,
        settings=house.transaction_settings,
        decided_ms=house.delay.queue.taken_ms,
    )
    for warning in store.warnings:
        log.warning("the journal of transactions: %s", warning)
    try:
        _take_over(house, folder, store)
    except BaseException:
        store.abandon("the start failed")
        raise
    if house.disk.exists(word):
        house.disk.unlink(word)
        house.disk.force_folder(house.meta)
    return store


def _require_new(house: House, folder: str) -> None:
    """Raises Corrupt unless there never was a journal, or it is given up."""
    if house.catalog.register.journal_id and not house.disk.exists(join(house.meta, WORD_NAME)):
        raise Corrupt(folder, 0, 0, f"the journal of transactions is missing. {_way_on(house)}")


def _way_on(house: House) -> str:
    return new_journal_advice(house.meta)


def _new_id(house: House, folder: str) -> int:
    """For a journal that is made: nobody had the id before, and the catalog knows it first. A start that is cut short
    in between finds the word, and begins another one. Raises Corrupt, Stopped, Full, OSError.
    """
    _require_new(house, folder)
    word = join(house.meta, WORD_NAME)
    if not house.disk.exists(word):
        house.disk.create(word).close()
        house.disk.force_folder(house.meta)
    journal_id = house.catalog.register.next_id
    house.catalog.enter((LEASE, journal_id + 1, house.clock.wall_ms()))
    house.catalog.enter((JOURNAL, journal_id))
    return journal_id


def _take_over(house: House, folder: str, store: JournalTransactionStore) -> None:
    """The journal is the one that the catalog knows, and no id is given out that it knows. Raises Corrupt."""
    register = house.catalog.register
    if register.journal_id and register.journal_id != store.journal_id:
        raise Corrupt(
            folder,
            0,
            0,
            f"it holds the journal {store.journal_id}, and journal {register.journal_id} belongs to this data."
            f" {_way_on(house)}",
        )
    _require_newest(house, folder, store)
    if house.catalog.log.stopped is not None:
        return
    if not register.journal_id:
        # A catalog from a backup of the time before: the journal is newer.
        house.catalog.enter((JOURNAL, store.journal_id))
    known = store.streams.highest
    if known >= register.next_id:
        log.error("the catalog is older than the journal: ids up to %d were given out before", known)
        house.catalog.enter((LEASE, known + 1 + ID_SLACK, house.clock.wall_ms()))


def _require_newest(house: House, folder: str, store: JournalTransactionStore) -> None:
    """A decision is on the disk before its first message is in a partition: no partition is ahead of the journal."""
    source = (SOURCE_TRANSACTION, store.journal_id)
    places = [(f"{each.name}-{each.number}", each.log.applied(*source)) for each in house.topics.partitions()]
    places.append(("the catalog", house.catalog.register.applied.get(store.journal_id)))
    places.append(("the store of delayed messages", house.delay.partition.log.applied(*source)))
    for name, place in places:
        if place is not None and place[0] >= store.end_place:
            raise Corrupt(
                folder,
                store.end_place,
                place[0],
                f"the journal is older than {name}, which has messages of later transactions. {_way_on(house)}",
            )


def recover(house: House) -> None:
    """Decided transactions are written, as far as their targets take writes. Workers and forces run in this thread."""
    recovered: list[bool] = []
    house.transactions.handler.recover(lambda: recovered.append(True))
    house.turn_ended()
    if not recovered:
        raise RuntimeError("decided transactions were neither written nor put off")
    counts = {state: count for state, count in house.transactions.store.counts.items() if count}
    if counts:
        log.info("transactions back from the journal: %s", counts)
