"""What is in a bucket, a chunk at a time, to be put into finer ones: columns and records, as they lie there.

A record keeps the checksum that it has, and is not proven here: if it is damaged, whoever reads it finds that out, in
the new bucket as in the old one.
"""

from collections.abc import Iterator

from journal.errors import Corrupt
from tfmq.delay.bucket import Bucket
from tfmq.delay.bucket_file import CHUNK_SIZE, decode_columns
from tfmq.delay.columns import Messages
from tfmq.delay.open_files import OpenFiles


def pieces_of(bucket: Bucket, files: OpenFiles) -> Iterator[Messages]:
    """The messages of one chunk after the other, without what is damaged: that is named.

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
            yield Messages(
                columns.dues, columns.numbers, columns.targets, columns.sizes, columns.flags, columns.table,
                [records],
            )  # fmt: skip
