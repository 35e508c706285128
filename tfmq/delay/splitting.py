"""What is in a bucket, a chunk at a time, to be put into finer ones: columns and records, as they lie there.

A record keeps the checksum that it has, and is not proven here: if it is damaged, whoever reads it finds that out, in
the new bucket as in the old one. What is settled, cancelled or gone is left out: so its bytes are given up.
"""

from collections.abc import Container, Iterator, Sequence

from journal.errors import Corrupt
from tfmq.delay.bucket import Bucket
from tfmq.delay.bucket_file import CHUNK_SIZE, decode_columns
from tfmq.delay.columns import Messages
from tfmq.delay.open_files import OpenFiles
from tfmq.delay.spans import Span
from tfmq.delay.spilling import Pending, pending_rows


def pieces_of(bucket: Bucket, files: OpenFiles, pending: Pending | None = None) -> Iterator[Messages]:
    """The messages of one chunk after the other that are pending (None: all), without what is damaged: it is named.

    Raises NewerFormat, OSError.
    """
    with files.use(bucket.path) as file:
        for part in bucket.parts(file):
            if isinstance(part, Corrupt):
                bucket.note(part)
                continue
            data = memoryview(file.pread(part.size, part.position))
            try:
                columns = decode_columns(
                    data[CHUNK_SIZE : CHUNK_SIZE + part.columns_size],
                    part, bucket.span, bucket.seed, bucket.path,
                )  # fmt: skip
            except Corrupt as error:
                bucket.note(error)
                continue
            records = bytes(data[CHUNK_SIZE + part.columns_size :])
            messages = Messages(
                columns.dues, columns.numbers, columns.targets, columns.sizes, columns.flags, columns.table,
                [records],
            )  # fmt: skip
            keep = b"" if pending is None else pending_rows(columns, pending)
            if all(keep):
                yield messages
            elif any(keep):
                yield messages.kept(keep)


def first_of(
    named: Sequence[Bucket], following: Bucket | None, horizon: int, wait: Container[Span]
) -> Bucket | None:
    """Which of the buckets that should be cut is cut first: the one that is loaded next, if it is among them. None of
    what is loaded already, or has to `wait`."""
    left = [bucket for bucket in named if bucket.span.end > horizon and bucket.span not in wait]
    return following if following in left else next(iter(left), None)
