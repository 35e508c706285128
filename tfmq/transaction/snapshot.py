"""Encoding and decoding of snapshots of the transaction table.

A snapshot is a stream of msgpack values: the head [version, time, end of the epochs, producer states, commit groups,
outcomes, outcomes of local transactions, decisions over several transactions, count of transactions], then one row per
transaction. New fields are only added at the end of the head or of the rows; docs/formats/operations.md has the table.
The journal adds the checksum.

Open transactions are included, because their commit record may follow the snapshot. A committed transaction is
included, with the LSN of its commit record, at least until its effects are durable in all targets.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgpack

from journal.errors import NewerFormat
from tfmq.bounded_msgpack import decoding, unpack_stored_values
from tfmq.transaction import states
from tfmq.transaction.journal_records import origin_fields, unpack_offsets, unpack_origin
from tfmq.transaction.model import BatchLocations, Decision, Transaction, pack_locations, unpack_locations

VERSION: Final = 1
NAME: Final = "the snapshot of the transactions"

YIELD_ROWS: Final = 64
"""Number of rows (0.2 ms) after which the encoding worker pauses, so that the broker's thread runs."""


class SnapshotHead(NamedTuple):
    """The head of a snapshot: the fields before the rows. `parts`: producer states, commit groups, both `Outcomes`."""

    time_ms: int
    epochs_end: int
    parts: Sequence[Any]


def capture(head: SnapshotHead, transactions: Iterable[Transaction]) -> Callable[[], bytes]:
    """Capture the transactions in the broker's thread; return a function that encodes the snapshot in any thread."""
    # Each field that may change during the encoding is captured as one list of all its values. No object is made for
    # each transaction, because 100,000 new objects would start a garbage collection, which takes half a second.
    found = list(transactions)
    decisions = [each.decision for each in found]
    locations = [each.locations for each in found]
    columns = (
        found,
        [each.state for each in found],
        decisions,
        [each.obsolete for each in found],
        locations,
        list(map(len, locations)),
        # The topics of prepared and committed transactions no longer change.
        [None if each.prepared_ms or each.decision else tuple(each.topics.items()) for each in found],
    )

    def encode() -> bytes:
        shared = {
            id(decision): (decision.lsn, [each.epoch for each in decision.transactions])
            for decision in decisions
            if decision is not None and len(decision.transactions) > 1
        }
        packer = msgpack.Packer(autoreset=False)
        packer.pack((VERSION, head.time_ms, head.epochs_end, *head.parts, sorted(shared.values()), len(found)))
        for number, row in enumerate(zip(*columns, strict=True), 1):
            packer.pack(_row(*row))
            if not number % YIELD_ROWS:
                time.sleep(0)
        return bytes(packer.bytes())

    return encode


DURABLE_STATES: Final = {states.PREPARING: states.OPEN, states.COMMITTED: states.APPLYING}
"""State without a record -> state in the snapshot. `_row` replaces COMMITTING and ROLLING_BACK by OPEN or PREPARED."""


def _row(
    transaction: Transaction,
    state: states.State,
    decision: Decision | None,
    obsolete: bool,
    locations: BatchLocations,
    words: int,
    topics: Sequence[tuple[int, str]] | None,
) -> tuple[Any, ...]:
    """Return the row of a transaction as it was at the time of the capture."""
    if state in (states.COMMITTING, states.ROLLING_BACK):
        state = states.OPEN if topics is not None else states.PREPARED
    state = DURABLE_STATES.get(state, state)
    opened = state == states.OPEN
    return (
        transaction.epoch,
        state,
        origin_fields(transaction.origin),
        tuple(transaction.topics.items()) if topics is None else topics,
        () if opened else transaction.offsets,
        0 if opened else transaction.prepared_ms,
        0 if opened else transaction.expires_ms,
        decision.time_ms if decision is not None else transaction.decided_ms if obsolete else 0,
        decision.lsn if decision is not None else 0,
        obsolete,
        transaction.messages if obsolete else 0,
        transaction.size_bytes if obsolete else 0,
        pack_locations(locations[:words]),
    )


def decode(data: bytes) -> tuple[SnapshotHead, list[Transaction]]:
    with decoding(NAME):
        values = unpack_stored_values(data)
        head: Any = next(values, ())
        version, *fields = head
        if version > VERSION:
            raise NewerFormat(NAME, version, VERSION)
        shared, count = fields[6:8]
        rows = map(_decode_transaction, islice(values, count))
        transactions = sorted(rows, key=lambda each: each.epoch)
        if len(transactions) != count:
            raise ValueError(f"it has {len(transactions)} of {count} transactions")
        if shared:
            by_epoch = {each.epoch: each for each in transactions}
            for _, epochs in shared:
                _share_decision([by_epoch[epoch] for epoch in epochs])
        return SnapshotHead(fields[0], fields[1], tuple(fields[2:6])), transactions


def _decode_transaction(row: Sequence[Any]) -> Transaction:
    transaction = Transaction(row[0], unpack_origin(row[2]))
    if row[1] not in states.STATES:
        raise ValueError(f"a transaction in the unknown state {row[1]!r}")
    transaction.state = states.State(row[1])
    transaction.topics = dict(row[3])
    transaction.offsets = unpack_offsets(row[4])
    transaction.prepared_ms, transaction.expires_ms, transaction.decided_ms, lsn = row[5:9]
    transaction.obsolete = row[9]
    if lsn:
        transaction.decision = Decision(lsn, transaction.decided_ms, (transaction,))
    transaction.messages, transaction.size_bytes = row[10:12]
    transaction.locations = unpack_locations(row[12])
    for location in transaction.locations():
        transaction.messages += location.count
        transaction.size_bytes += location.size_bytes
        if not location.log_id:
            transaction.lost_messages += location.count
    return transaction


def _share_decision(transactions: Sequence[Transaction]) -> None:
    """Set one common decision for these transactions, which one record has committed in this order."""
    first = transactions[0].decision
    if first is None:
        raise ValueError("a shared decision refers to a transaction without a decision")
    decision = Decision(first.lsn, first.time_ms, tuple(transactions))
    for transaction in transactions:
        transaction.decision = decision
