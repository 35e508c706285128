"""Whether the messages that dead letters speak of are the ones that stand there: Spark reads partition by partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tfmq.arrow.decoder import Decoder
from tfmq.arrow.schema import project
from tfmq.errors import OffsetOutOfRange
from tfmq.spark.logs import Address, Logs, open_logs
from tfmq.spark.pipelines.reconcile_rows import WRONG, Fault, Kept
from tfmq.spark.pipelines.tasks import Done
from tfmq.spark.ranges import PartitionLog, Range

LETTERS_AT_ONCE: Final = 500
COLUMNS: Final = project(("offset", "id"))


class Claim(NamedTuple):
    """A letter says that the message `id` stands at `offset`; `group` and `letter` are its own, `resent`: it was sent
    there again."""

    offset: int
    id: int
    group: str
    letter: str
    resent: bool


class Inquiry(NamedTuple):
    """One task's: claims about one partition, by rising offsets."""

    address: Address
    log: PartitionLog
    claims: tuple[Claim, ...]


def inquiries(address: Address, logs: Iterable[PartitionLog], kept: Sequence[Kept]) -> list[Inquiry]:
    """What is to be asked about these letters; of partitions that are gone, nothing."""
    known = {(log.topic, log.incarnation, log.partition): log for log in logs}
    claims: dict[PartitionLog, list[Claim]] = {}
    for letter in kept:
        places = [
            ((letter.topic, letter.incarnation, letter.partition), letter.offset, letter.message_id, False)
        ]
        if letter.sent is not None:
            topic, incarnation, partition, offset, id = letter.sent
            places.append(((topic, incarnation, partition), offset, id, True))
        for key, offset, id, resent in places:
            if key in known:
                claims.setdefault(known[key], []).append(Claim(offset, id, letter.group, letter.id, resent))
    return [
        Inquiry(address, log, tuple(sorted(found)[first : first + LETTERS_AT_ONCE]))
        for log, found in claims.items()
        for first in range(0, len(found), LETTERS_AT_ONCE)
    ]


def inquire(inquiry: Inquiry) -> Done[list[Fault]]:
    """The claims that do not hold. What retention took proves nothing."""
    faults: list[Fault] = []
    log = inquiry.log
    size = 0
    with open_logs(inquiry.address) as logs:
        decoder = Decoder(log.topic, log.partition, log.log_id, COLUMNS)
        for claim in inquiry.claims:
            found, read = _id_at(logs, decoder, log, claim.offset)
            size += read
            if found is not None and found != claim.id:
                faults.append(_fault(log, claim, found))
    return Done(faults, len(inquiry.claims), size)


def _id_at(logs: Logs, decoder: Decoder, log: PartitionLog, offset: int) -> tuple[int | None, int]:
    """(id of the record that begins at `offset`, 0: none begins there, None: retention took it; bytes read)."""
    bounds = logs.bounds(log)
    if offset < bounds.first:
        return None, 0
    if offset >= bounds.end or logs.at_or_after(log, offset) != offset:
        return 0, 0
    read = 0
    try:
        for chunk in logs.chunks(Range(log, offset, offset + 1), 1):
            read += len(chunk.data)
            rows = decoder.decode(chunk.data, chunk.offset, offset, offset + 1)
            if len(rows):
                return int(rows.column("id")[0].as_py()), read
    except OffsetOutOfRange:
        return None, read
    return 0, read


def _fault(log: PartitionLog, claim: Claim, found: int) -> Fault:
    what = "was sent again to" if claim.resent else "is of a message at"
    there = "no message begins there" if not found else f"there stands message {found:#x}"
    text = (
        f"letter {claim.letter} {what} offset {claim.offset} of {log.name} with the id {claim.id:#x}; {there}"
    )
    return Fault(WRONG, claim.group, log.topic, log.partition, text)
