"""Blocks of one plain record each, as those leave behind who send one message after the other: the fast way through.

Decoding a control block costs about 9 us, which is nothing for a thousand records and much for one. Here a run of
such blocks is taken in one loop, every one of them proven as in the slow way: the control record by its own checksum,
log id and place, the record by the CRC over the block. What is not just that, and what is wrong, ends the run; the
slow way goes on there and names what it finds.
"""

from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple
from zlib import crc32

from journal.record.block_trailer import CONTROL_RECORD, CONTROL_SIZE, CONTROL_VERSION, control_mark
from journal.record.format import FLAG_ATTRIBUTE, HEADER_SIZE
from tfmq.client.received import Codec, Origin, ReceivedMessage

_PREFIX: Final = Struct(">I4xQII")
_PREFIX_SIZE: Final = _PREFIX.size
_FLAG_LOW: Final = 0xFFFF
_BODY_SIZE: Final = CONTROL_SIZE - HEADER_SIZE
_MARK_BEGIN: Final = HEADER_SIZE - 12
_new = tuple.__new__


class Run(NamedTuple):
    """The messages of a run, maybe none; it ends at `position` of the bytes and at `next_offset` of the partition.

    The last two say how things stand behind its last block.
    """

    messages: list[ReceivedMessage]
    position: int
    next_offset: int
    next_ordinal: int
    epoch: int


class SingleBlocks:
    """What is the same in all runs of one partition."""

    def __init__(
        self, topic: str, partition: int, incarnation: int, log_id: int, codec: Codec | None
    ) -> None:
        self._fixed = (topic, partition)
        self._incarnation = incarnation
        self._log_id = log_id
        self._mark = control_mark(log_id)
        self._codec = codec
        self.handler: Any = None

    def take(self, body: bytes, position: int, place: int, limit: int) -> Run:
        """The run that begins at `position` of `body`, which is offset `place`, and ends at most at offset `limit`."""
        messages: list[ReceivedMessage] = []
        view, mark, unpack, unpack_control = (
            memoryview(body),
            self._mark,
            _PREFIX.unpack_from,
            CONTROL_RECORD.unpack_from,
        )
        origin, time, epoch, ordinal = None, -1, -1, -1
        topic, partition = self._fixed
        try:
            while True:
                length, id, flag, attribute_size = unpack(body, position)
                at = position + HEADER_SIZE + length
                if body[at + _MARK_BEGIN : at + HEADER_SIZE] != mark or flag & _FLAG_LOW != FLAG_ATTRIBUTE:
                    break
                (body_size, checksum, _, _, version, bits, records, size, crc, append_time, block_epoch, _, _,
                 first_ordinal, offset, _, _, _) = unpack_control(body, at)  # fmt: skip
                begins = position + _PREFIX_SIZE
                payload_begins, behind = begins + attribute_size, at + CONTROL_SIZE
                following = place + behind - position
                if (
                    records != 1 or offset != place or not id or payload_begins > at or following > limit
                    or size != at - position or bits > 1 or version != CONTROL_VERSION or body_size != _BODY_SIZE
                    or crc32(view[position:at]) != crc or crc32(view[at + HEADER_SIZE : behind]) != checksum
                ):  # fmt: skip
                    break
                if append_time != time or block_epoch != epoch or origin is None:
                    time, epoch = append_time, block_epoch
                    origin = Origin(self._incarnation, time, epoch, self._codec, self.handler)
                ordinal = first_ordinal
                fields = (
                    body[payload_begins:at], topic, partition, place, following, ordinal, id,
                    body[begins:payload_begins], origin,
                )  # fmt: skip
                messages.append(_new(ReceivedMessage, fields))
                position, place = behind, following
        except StructError:
            pass  # the bytes end: in the slow way that is an error, or there are none left
        return Run(messages, position, place, ordinal + 1, epoch)
