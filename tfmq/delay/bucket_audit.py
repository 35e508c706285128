"""An offline check of the buckets of delayed messages: the checkpoint, every file, every chunk; every record if asked.

It reads only, and answers in the words of journal.verify: files count as segments, chunks as blocks, messages as
records. Nobody else may write there meanwhile: who calls this holds the data folder's lock.
"""

from typing import Final

from journal import names
from journal.disk import Disk
from journal.errors import Corrupt
from journal.verify import DAMAGE, NOTE, Finding, Progress, Report
from tfmq.delay.bucket import ALL_BYTES, Bucket
from tfmq.delay.bucket_file import CHUNK_SIZE, Chunk, decode_columns
from tfmq.delay.bucket_recovery import Found, is_house_name
from tfmq.delay.bucket_survey import BucketSurvey
from tfmq.delay.checkpoint import Listed
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
    """Checks the buckets in `folder`; with `records` every message's checksum too. Raises NewerFormat, OSError."""
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
        path = names.join(self.survey.folder, found.name)
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
            data = file.pread(chunk.columns_size, chunk.position + CHUNK_SIZE)
        try:
            columns = decode_columns(data, chunk, bucket.span, bucket.seed, bucket.path)
        except Corrupt as error:
            self._damage(error, "columns")
            return chunk.count
        self.report.blocks += 1
        self.report.bytes += chunk.size
        self.report.records += chunk.count
        if self.records:
            before = len(bucket.damage)
            bucket.read(self.survey.files, columns.positions, columns.numbers, ALL_BYTES)
            for bad in bucket.damage[before:]:
                self._damage(bad, "record")
        return chunk.count
