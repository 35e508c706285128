"""An offline check of the transaction journal: its checkpoint, both snapshots, every file, every entry, every block.

It reads only, and answers in the words of journal.verify: files count as segments, entries as blocks, messages as
records. Nobody else may write there meanwhile: who calls this holds the data folder's lock.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from journal import names
from journal.disk import Disk
from journal.entry import AppendMsg, Entry, Filler
from journal.header import BadRecord, body_holds, records_of, split_id
from journal.journal_file import HEAD_SIZE, JournalFile
from journal.journal_recovery import Files, decide_files
from journal.journal_survey import Gap, JournalSurvey, claim
from journal.verify import DAMAGE, NOTE, Finding, Progress, Report

LEASED_ID_MIN: Final = 16
"""The producer ids below are the broker's own. Its records stand before a producer's (the note of due times before a
delayed batch) and are not among those that a piece counts."""


def is_journal(disk: Disk, folder: str) -> bool:
    """Whether a folder holds a transaction journal, or what is left of one."""
    children = disk.list(folder) if disk.is_folder(folder) else []
    return any(
        name == names.CHECKPOINT_NAME or names.parse_journal_name(name) is not None for name in children
    )


def verify_journal(
    disk: Disk, folder: str, *, records: bool = False, progress: Progress | None = None
) -> Report:
    """Checks the journal in `folder`; with `records` every message's own checksum too. Raises NewerFormat, OSError."""
    survey = JournalSurvey(disk, folder)
    try:
        return _Audit(survey, records, progress).run()
    finally:
        survey.close()


class _Audit:
    """One check."""

    def __init__(self, survey: JournalSurvey, records: bool, progress: Progress | None) -> None:
        self.survey = survey
        self.report = Report()
        self.records = records
        self.progress = progress

    def run(self) -> Report:
        self._checkpoint()
        self._snapshots()
        self._files()
        for file in self.survey.files:
            self._file(file)
        for name in self.survey.disk.list(self.survey.folder):
            if not names.known_in_transactions(name):
                self.find(name, 0, 0, "a name that the journal does not give", "name", NOTE)
        return self.report

    def find(self, file: str, first: int, next: int, what: str, field: str, weight: str = DAMAGE) -> None:
        path = names.join(self.survey.folder, file)
        self.report.findings.append(Finding(path, first, next, what, field, weight))

    def _checkpoint(self) -> None:
        survey = self.survey
        if survey.checkpoint_fault:
            self.find(names.CHECKPOINT_NAME, 0, 0, survey.checkpoint_fault, "checkpoint")
            return
        for first, next in survey.checkpoint_file.faulty():
            what = "a slot is not whole; the other one is"
            self.find(names.CHECKPOINT_NAME, first, next, what, "slot", NOTE)

    def _snapshots(self) -> None:
        survey = self.survey
        named = (
            [pointer.number for pointer in survey.checkpoint.snapshots]
            if survey.checkpoint is not None
            else []
        )
        enough = survey.base is not None
        for number, error in survey.snapshot_faults.items():
            weight = NOTE if enough or number not in named else DAMAGE
            what = (
                f"{error.reason}; a start uses the other one" if enough and number in named else error.reason
            )
            self.find(names.snapshot_name(number), error.first, error.next, what, "snapshot", weight)

    def _files(self) -> None:
        """What a start would say of the files as a whole, and each head that cannot be used."""
        survey = self.survey
        found = survey.found()
        row = None if found is None else decide_files(found)
        told = False
        for number, fault in survey.head_faults.items():
            needless = row is not None and row.decision is not Files.REFUSE
            self.find(names.journal_name(number), 0, HEAD_SIZE, fault, "head", NOTE if needless else DAMAGE)
            told = True
        if (
            found is None
            or row is None
            or row.decision is not Files.REFUSE
            or (told and row.label == "head damaged")
        ):
            return
        about = found.missing or (found.file_number,)
        if found.shorter:
            about = (found.shorter[0].number,)
        elif found.hole is not None:
            about = (found.hole.number,)
        elif row.label == "end missing":
            about = (found.files[-1].number,)
        self.find(names.journal_name(about[0]), 0, 0, row.label, "files")

    def _file(self, file: JournalFile) -> None:
        self.report.segments += 1
        name = names.journal_name(file.number)
        forced = self.survey.forced(file)
        for part in self.survey.parts(file):
            if isinstance(part, Gap):
                self._gap(name, file, part, forced)
                done = part.next
            else:
                self._entry(name, file, part)
                done = part.next
            if self.progress is not None:
                self.progress(file.path, done - file.first, file.size)

    def _gap(self, name: str, file: JournalFile, gap: Gap, forced: int) -> None:
        torn = gap.first >= forced
        what = f"a tail that a start cuts off: {gap.reason}" if torn else f"cannot be read: {gap.reason}"
        said = claim(file, gap.first)
        what = f"{what} ({said})" if said and not torn else what
        first, next = gap.first - file.first, gap.next - file.first
        self.find(name, first, next, what, "entry", NOTE if torn else DAMAGE)

    def _entry(self, name: str, file: JournalFile, entry: Entry) -> None:
        content = entry.content
        first = entry.place - file.first
        if isinstance(content, Filler):
            self.find(
                name, first, first + entry.size, "was lost; a repair has closed the gap", "filler", NOTE
            )
            return
        self.report.blocks += 1
        self.report.bytes += entry.size
        if isinstance(content, AppendMsg):
            self.report.records += content.count
            fault = _fault(content, self.records)
            if fault:
                self.find(name, first, first + entry.size, fault, "block")


def _fault(content: AppendMsg, records: bool) -> str:
    """What of a piece's own checksums does not hold; "" if all do."""
    view = memoryview(content.data)
    start = 0
    for size, _, crc in content.blocks:
        if crc32(view[start : start + size]) != crc:
            return f"{size} bytes of messages at {start} of its records fail their block's checksum"
        start += size
    if content.blocks and start != len(view):
        return f"its blocks have {start} bytes, its records {len(view)}"
    if not records:
        return ""
    try:
        found = list(records_of(view))
    except BadRecord as error:
        return f"its records do not add up at {error.position}: {error.reason}"
    own = [record.id for record in found if split_id(record.id)[0] >= LEASED_ID_MIN]
    if len(own) != content.count:
        return f"{len(own)} records, it names {content.count}"
    bad = next((record for record in found if not body_holds(view, record)), None)
    return "" if bad is None else f"the record at {bad.position} fails its own checksum"
