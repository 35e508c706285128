"""What lies in the folder of the buckets, without a server: for checks, dumps and repairs. It only reads.

Nobody else may write there meanwhile: who uses this holds the data folder's lock.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt
from tfmq.delay.bucket import Bucket
from tfmq.delay.bucket_file import HEAD_SIZE, Chunk, Identity, decode_head, parse_bucket_name
from tfmq.delay.bucket_recovery import Decision, Found, decide
from tfmq.delay.checkpoint import MAGIC, Checkpoint, CheckpointFile, Listed
from tfmq.delay.open_files import OpenFiles

FOLDER_NAME: Final = "delay"
"""In a data folder."""
ARRIVALS_NAME: Final = "arrivals"
"""In that folder: the log of the arrivals."""

MAGIC_SIZE: Final = Struct(f"{len(MAGIC)}s").size


def is_delay(disk: Disk, folder: str) -> bool:
    """Whether a folder holds buckets of delayed messages, or what is left of them."""
    if not disk.is_folder(folder):
        return False
    children = disk.list(folder)
    if any(parse_bucket_name(name) is not None for name in children):
        return True
    return (
        filenames.CHECKPOINT_NAME in children
        and _magic(disk, filenames.join(folder, filenames.CHECKPOINT_NAME)) == MAGIC
    )


def _magic(disk: Disk, path: str) -> bytes:
    file = disk.open_read(path)
    try:
        return file.pread(MAGIC_SIZE, 0)
    finally:
        file.close()


class BucketSurvey:
    """See the module. `checkpoint` is None where there is none that can be used: `fault` says why.

    Raises NewerFormat, OSError.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder
        self.files = OpenFiles(disk)
        self.file = CheckpointFile(disk, folder)
        self.fault: Corrupt | None = None
        self.checkpoint: Checkpoint | None = None
        paths = {name: filenames.join(folder, name) for name in disk.list(folder)}
        self.sizes = {name: disk.size(path) for name, path in paths.items() if not disk.is_folder(path)}
        try:
            self.checkpoint = self.file.read()
        except Corrupt as error:
            self.fault = error
        if self.checkpoint is None and self.fault is None and any(map(parse_bucket_name, self.sizes)):
            self.fault = Corrupt(self.file.path, 0, 0, "the checkpoint is missing")
        self.identity = self._identity()

    @property
    def listed(self) -> list[Listed]:
        """The buckets of the checkpoint; without one, every file that has the name of a bucket."""
        if self.checkpoint is not None:
            return list(self.checkpoint.buckets)
        spans = {name: parse_bucket_name(name) for name in self.sizes}
        return sorted(Listed(span, self.sizes[name], 0) for name, span in spans.items() if span is not None)

    def found(self) -> list[Found]:
        """Each name and what a start would do about it."""
        return decide(self.listed, self.sizes)

    def buckets(self) -> list[tuple[Listed, Bucket]]:
        """Those that count and whose files are there, by time. Without an identity there are none."""
        if self.identity is None:
            return []
        result = []
        for slot, found in enumerate(self.found(), 1):
            listed = found.listed
            if listed is not None and found.row.decision is not Decision.REFUSE:
                bucket = Bucket(self.folder, self.identity, listed.span, slot, listed.size, listed.count)
                bucket.is_quiet = True
                result.append((listed, bucket))
        return result

    def parts(self, bucket: Bucket) -> Iterator[Chunk | Corrupt]:
        """The chunks of a bucket, and what of it has none."""
        with self.files.use(bucket.path) as file:
            yield from bucket.parts(file)

    def close(self) -> None:
        """Gives the files back."""
        self.files.close()

    def _identity(self) -> Identity | None:
        """Whose buckets they are: as the checkpoint says, else as the first whole head does."""
        if self.checkpoint is not None:
            return self.checkpoint.identity
        for name in sorted(filter(parse_bucket_name, self.sizes)):
            path = filenames.join(self.folder, name)
            file = self.disk.open_read(path)
            try:
                return decode_head(file.pread(HEAD_SIZE, 0), path)[0]
            except Corrupt:
                continue
            finally:
                file.close()
        return None
