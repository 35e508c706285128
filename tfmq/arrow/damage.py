"""What is wrong with a stretch of control blocks, found block by block: the slow way, for bytes that are known to be
bad, so that the error names the block and the record."""

from __future__ import annotations

from typing import Final

from journal.record.block import Block, blocks_of, find_next_control
from journal.record.block_trailer import BadControl
from journal.record.format import (
    FLAG_ATTRIBUTE,
    FLAG_CODEC_MASK,
    FLAG_CONTROL,
    FLAG_FILLER,
    FLAG_TOMBSTONE,
    FLAG_VERSION_MASK,
    BadRecord,
    body_holds,
    records_of,
    split_body,
)
from tfmq.errors import Damaged, DecodeFailed

KNOWN_FLAGS: Final = FLAG_ATTRIBUTE | FLAG_TOMBSTONE | FLAG_FILLER
LOW_FLAGS: Final = 0xFFFF
BAD_RECORDS_NAMED: Final = 5
"""A sentence that names more of them helps nobody."""


class Inspector:
    """Looks for what is wrong in the bytes of one partition. `verify` as of `Decoder`."""

    def __init__(self, topic: str, partition: int, log_id: int, verify: str) -> None:
        self.name = f"{topic}-{partition}"
        self.log_id = log_id
        self.verify = verify

    def find(self, data: bytes, offset: int) -> Damaged | DecodeFailed | None:
        """The first thing that is wrong in `data`, which begins at `offset`; None if all is right."""
        place = offset
        try:
            for block in blocks_of(data, offset, self.log_id, verify=self.verify != "none"):
                place = block.next
                error = self._in_block(block)
                if error is not None:
                    return error
        except BadControl as bad:
            if bad.version is not None:
                return DecodeFailed(f"{self._where(place)}: {bad.reason}; use a newer client.")
            return self._damaged(data, place, offset, bad.reason)
        except BadRecord as bad:
            return self._damaged(data, place, offset, bad.reason)
        return None

    def _in_block(self, block: Block) -> Damaged | DecodeFailed | None:
        """What is wrong with a record of a block that is whole."""
        ordinals = 0
        for record in records_of(block.data):
            place, kind = block.offset + record.position, record.flag & LOW_FLAGS
            if kind & ~KNOWN_FLAGS:
                return DecodeFailed(f"{self._where(place)}: {_unknown(kind)}")
            if kind & FLAG_FILLER:
                ordinals += record.checksum
                continue
            ordinals += 1
            body = block.data[record.position + 20 : record.position + record.size]
            try:
                _, payload = split_body(body, kind)
            except BadRecord as bad:
                return self._in(block, f"the record at offset {place}: {bad.reason}")
            if kind & FLAG_TOMBSTONE and len(payload):
                reason = "a tombstone has a payload, which means nothing in this release."
                return DecodeFailed(f"{self._where(place)}: {reason}")
            if not record.id:
                return self._in(block, f"the record at offset {place} has the id 0")
            if self.verify == "message" and not body_holds(block.data, record):
                return self._in(block, f"the record at offset {place} fails its own checksum")
        if ordinals != block.control.records:
            reason = f"{ordinals} records where {block.control.records} are announced"
            return self._in(block, reason)
        return None

    def _in(self, block: Block, reason: str) -> Damaged:
        return self._sentence(block.offset, block.next, reason)

    def _damaged(self, data: bytes, place: int, offset: int, reason: str) -> Damaged:
        """The error for the block at `place`, with the nearest place behind it where reading can go on."""
        start = place - offset
        claim = find_next_control(data, start, offset=offset, log_id=self.log_id)
        following = offset + len(data)
        if claim is not None:
            begins = claim.control.offset
            following = begins if begins > place else claim.control.next
            if begins == place:
                reason += _bad_records(data[start : claim.position], place)
        return self._sentence(place, following, reason)

    def _sentence(self, first: int, next: int, reason: str) -> Damaged:
        return Damaged(
            f"{self._where(first)} is damaged up to offset {next}: {reason}.", first=first, next=next
        )

    def _where(self, offset: int) -> str:
        return f"{self.name} at offset {offset}"


def _unknown(kind: int) -> str:
    if kind & FLAG_CODEC_MASK:
        return "a compressed batch, which this release cannot read; use a newer client."
    if kind & FLAG_VERSION_MASK:
        return f"a record of format version {kind >> 12}, which this release cannot read; use a newer client."
    if kind & FLAG_CONTROL:
        return "a control record stands inside a block."
    return f"the flag {kind:#06x} has bits that this release does not know; use a newer client."


def _bad_records(records: bytes, offset: int) -> str:
    """Which records fail their own checksum, as the end of a sentence."""
    bad: list[int] = []
    try:
        for record in records_of(records):
            if not record.flag & FLAG_FILLER and not body_holds(records, record):
                bad.append(offset + record.position)
    except BadRecord as broken:
        return f"; from offset {offset + broken.position} on no records can be told apart"
    if not bad:
        return "; every record's own checksum holds, so a header is wrong"
    named = ", ".join(map(str, bad[:BAD_RECORDS_NAMED]))
    more = " and more" if len(bad) > BAD_RECORDS_NAMED else ""
    return f"; the record at offset {named}{more} is wrong"
