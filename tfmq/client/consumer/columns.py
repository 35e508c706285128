"""Decoder of fetch responses to Arrow record batches instead of messages; `tfmq.arrow` verifies and decodes the blocks.

Needs pyarrow and numpy, as `tfmq.arrow` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from struct import error as StructError
from typing import Final

import pyarrow as pa

from journal.record.block import trailer_position
from journal.record.block_trailer import TRAILER_SIZE, BadBlockTrailer, decode_trailer
from journal.record.format import BadRecord, make_log_id
from tfmq import arrow
from tfmq.client.consumer.decoder import DecodedBlock
from tfmq.client.consumer.message import Origin, ReceivedMessage, make_message
from tfmq.errors import Damaged, DecodeFailed
from tfmq.offsets.storage import PartitionName

DEFAULT_COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp")


def column_decoder_factory(columns: Iterable[str] | None) -> Callable[[PartitionName, int], ColumnDecoder]:
    """Return a function that creates the decoder of a partition. `columns`: the columns to decode; None means
    DEFAULT_COLUMNS. Raises: BadRequest for an unknown column."""
    names = (columns,) if isinstance(columns, str) else columns
    return partial(ColumnDecoder, arrow.project(DEFAULT_COLUMNS if names is None else names))


class ColumnDecoder:
    """Decodes the fetch responses of one partition, each to one record batch. Used in place of `decoder.Decoder`.

    A record batch is delivered as the payload of one message, which has the offsets of the batch. So positions, acks
    and commits work as for messages.
    """

    def __init__(self, schema: pa.Schema, name: PartitionName, incarnation: int) -> None:
        self._name = name
        self._incarnation = incarnation
        self._log_id = make_log_id(incarnation, name.partition)
        self._decoder = arrow.Decoder(name.topic, name.partition, self._log_id, schema)

    def decode(
        self, body: bytes, start: int, skip_to: int, next_offset: int, *, gaps: bool = False
    ) -> Iterator[DecodedBlock]:
        """Decode `body` to one record batch; if a block is bad, to a separate record batch for each block before it.

        Parameters and errors are those of `decoder.Decoder.decode`. `gaps` is never true, because a consumer with a tag
        filter refuses to deliver columns."""
        try:
            decoded = self._decode(body, start, skip_to) if body else None
        except (Damaged, DecodeFailed):
            # The blocks before the bad block are delivered before the error is raised.
            yield from self._decode_until_error(body, start, skip_to)
            raise
        if decoded is not None:
            yield decoded
        if start + len(body) != next_offset:
            end = start + len(body)
            sentence = f"{self._name} at offset {end} is damaged up to offset {next_offset}: bytes are missing there."
            raise Damaged(sentence, first=end, next=next_offset)

    def _decode(self, body: bytes, start: int, skip_to: int) -> DecodedBlock:
        rows = self._decoder.decode(body, start, skip_to)
        last = decode_trailer(body, len(body) - TRAILER_SIZE, self._log_id)
        origin = Origin(self._incarnation, last.append_time, last.epoch, None, None)
        fields = (max(start, skip_to), last.next, last.next_ordinal - 1, 0, None, origin)
        message: ReceivedMessage[pa.RecordBatch] = make_message(rows, self._name.topic, self._name.partition, *fields)
        return DecodedBlock([message] if len(rows) else [], start, last.next, last.next_ordinal, last.epoch)

    def _decode_until_error(self, body: bytes, start: int, skip_to: int) -> Iterator[DecodedBlock]:
        position = 0
        try:
            while position < len(body):
                end = trailer_position(body, position) + TRAILER_SIZE
                yield self._decode(body[position:end], start + position, skip_to)
                position = end
        except (Damaged, DecodeFailed, BadBlockTrailer, BadRecord, StructError):
            return  # The caller raises the error of the whole response.
