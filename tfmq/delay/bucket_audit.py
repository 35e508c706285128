"""An offline check of the buckets of delayed messages: the checkpoint, every file, every chunk, every byte of a record.

It reads only, and answers in the words of journal.fsck.log_verify: files count as segments, chunks as blocks, messages
as records. Nobody else may write there meanwhile: who calls this holds the data folder's lock.
"""

from typing import Final

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt
from journal.fsck.log_verify import DAMAGE, NOTE, Finding, Progress, Report
from journal.record.format import BadRecord, body_holds, records_of
from tfmq.delay.bucket import Bucket
from tfmq.delay.bucket_file import CHUNK_SIZE, Chunk, decode_columns
from tfmq.delay.bucket_recovery import Found, is_house_name
from tfmq.delay.bucket_survey import BucketSurvey
from tfmq.delay.checkpoint import Listed
from tfmq.delay.columns import CRC_SIZE, Columns, failing
from tfmq.delay.leaves import Leaves

WEIGHTS: Final = {
    "unlisted chunks": (NOTE, "the end of the file counts not yet; a start cuts it off"),
    "missing": (DAMAGE, "the file is missing"),
    "unlisted": (NOTE, "the checkpoint does not list it; a start removes it"),
    "unfinished": (NOTE, "it was never finished; a start removes it"),
}
"""What is found in the folder, by the label of `bucket_recovery`. What is too short is found by walking it."""


def verify_buckets(
    disk: Disk, folder: str, *, records: bool = False, progress: Progress | None = None
) -> Report:
    """Checks the buckets in `folder`; with `records` also the checksum that each message's producer made.

    Raises NewerFormat, OSError.
    """
    survey = BucketSurvey(disk, folder)
    try:
        return _Audit(survey, records, progress).run()
    finally:
        survey.close()


class _Audit:
    """One check."""

    def __init__(self, survey: BucketSurvey, records: bool, progress: Progress | None) -> None:
        self.survey = survey
        self.report = Report()
        self.records = records
        self.progress = progress

    def run(self) -> Report:
        self._checkpoint()
        for found in self.survey.found():
            self._name(found)
        buckets = self.survey.buckets()
        for listed, bucket in buckets:
            self._bucket(listed, bucket)
        for one, other in Leaves([bucket for _, bucket in buckets]).overlapping():
            self._find(other.path, 0, 0, f"its span of time overlaps that of {one.path}", "span")
        return self.report

    def _find(self, file: str, first: int, next: int, what: str, field: str, weight: str = DAMAGE) -> None:
        self.report.findings.append(Finding(file, first, next, what, field, weight))

    def _damage(self, error: Corrupt, field: str, weight: str = DAMAGE) -> None:
        self._find(error.path, error.first, error.next, error.reason, field, weight)

    def _checkpoint(self) -> None:
        survey = self.survey
        if survey.fault is not None:
            self._damage(survey.fault, "checkpoint")
            return
        for error in survey.file.faulty():
            what = f"a copy of the checkpoint is not whole ({error.reason}); the other one is"
            self._find(error.path, error.first, error.next, what, "checkpoint", NOTE)

    def _name(self, found: Found) -> None:
        path = filenames.join(self.survey.folder, found.name)
        label = found.row.label
        if label in WEIGHTS:
            weight, what = WEIGHTS[label]
            if label == "missing" and found.listed is not None:
                what = f"{what}, and with it {found.listed.count} messages"
            self._find(path, 0, 0, what, "file", weight)
        elif label == "foreign" and not is_house_name(found.name):
            self._find(path, 0, 0, "a name that delayed delivery does not give", "name", NOTE)

    def _bucket(self, listed: Listed, bucket: Bucket) -> None:
        self.report.segments += 1
        count = 0
        for part in self.survey.parts(bucket):
            if isinstance(part, Corrupt):
                self._damage(part, "chunk")
            else:
                count += self._chunk(bucket, part)
            if self.progress is not None:
                self.progress(bucket.path, part.next, bucket.size)
        if self.survey.checkpoint is not None and count != listed.count and not bucket.damage:
            what = f"{count} messages are there, the checkpoint lists {listed.count}"
            self._find(bucket.path, 0, bucket.size, what, "count")

    def _chunk(self, bucket: Bucket, chunk: Chunk) -> int:
        """Checks one; the count of messages that it names."""
        with self.survey.files.use(bucket.path) as file:
            data = file.pread(chunk.size, chunk.position)
        begins = CHUNK_SIZE + chunk.columns_size
        try:
            columns = decode_columns(data[CHUNK_SIZE:begins], chunk, bucket.span, bucket.seed, bucket.path)
        except Corrupt as error:
            self._damage(error, "columns")
            return chunk.count
        self.report.blocks += 1
        self.report.bytes += chunk.size
        self.report.records += chunk.count
        faults = dict.fromkeys(
            failing(data[begins:], columns.sizes, columns.numbers), "its bytes fail their checksum"
        )
        if self.records:
            faults = own_faults(data, columns, chunk.position) | faults
        for index, what in sorted(faults.items()):
            first = columns.positions[index]
            what = f"message {columns.numbers[index]} cannot be relied on: {what}"
            self._find(bucket.path, first, first + CRC_SIZE + columns.sizes[index], what, "record")
        return chunk.count


def own_faults(data: bytes, columns: Columns, position: int) -> dict[int, str]:
    """By index, what is wrong with a record of the chunk at `position` by what it says of itself."""
    faults = {}
    for index, (place, size) in enumerate(zip(columns.positions, columns.sizes, strict=True)):
        begin = place - position + CRC_SIZE
        view = memoryview(data)[begin : begin + size]
        try:
            (record,) = records_of(view)
        except (BadRecord, ValueError):
            faults[index] = "it is no record of the size that the columns say"
        else:
            if not body_holds(view, record):
                faults[index] = "it fails the checksum that its producer made"
    return faults
