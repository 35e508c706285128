"""Facts (rows of numbers) from a data folder's transaction journal. The audit compares them with the partitions.

Each journal file is read by a task of its own; `expected_facts` combines the contents. The broker deletes a journal
file when all transactions in it are complete, so there are no facts about transactions in deleted files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt, NewerFormat
from journal.fsck.wal_verify import JournalScan, is_journal
from journal.log.recovery_rules import decide
from journal.record.format import BadRecord, make_id
from journal.wal.entry import AppendMsg, JournalEntry, Operation
from journal.wal.file import FILE_HEADER_SIZE, JournalFile
from journal.wal.recovery_rules import FILES_RULES, FilesAction
from tfmq.spark.pipelines.audit_check import DECISION, EXPECTED, FORBIDDEN, Facts, concatenate_facts, make_facts
from tfmq.spark.pipelines.audit_plan import JOURNAL, LISTING_ATTEMPTS, Finding
from tfmq.transaction import journal_records as records

COMMITS: Final = (records.CommitRecord, records.LocalCommitRecord, records.HeuristicCommitRecord)
ROLLBACKS: Final = (records.RollbackRecord, records.LocalRollbackRecord, records.HeuristicRollbackRecord)
UNKNOWN_NUMBER: Final = 1 << 62
"""Stands for an unknown number of a message within its commit, for example because a journal file was deleted."""


class JournalFilePlan(NamedTuple):
    """One journal file: from LSN `first` to `end`, durable up to `durable_end`. `seed`: start value of checksums."""

    data: str
    number: int
    first: int
    end: int
    seed: int
    durable_end: int


class JournalPlan(NamedTuple):
    """The files of a data folder's transaction journal. `journal_id` 0: there is no journal, or it is unreadable."""

    data: str
    journal_id: int
    files: list[JournalFilePlan]
    findings: list[Finding]


class JournalMessages(NamedTuple):
    """Consecutive messages of a transaction in one journal entry.

    `lsn`: LSN of the entry; if compaction copied the entry, LSN of the original · `copied`: the entry is such a copy.
    """

    lsn: int
    epoch: int
    log_id: int
    first_id: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    copied: bool = False


class JournalFileContents(NamedTuple):
    """The contents of one journal file that the audit uses. The epoch of a transaction is its unique number.

    `decisions`: LSN of each commit and the epochs of the transactions that it commits; a commit group commits several
    transactions at once · `rolled_back`: epochs of transactions that were rolled back · `spans`: LSN ranges read
    without a gap · `totals`: (epoch, number of messages) of each transaction, as its prepare or commit entry states.
    """

    messages: list[JournalMessages]
    decisions: list[tuple[int, tuple[int, ...]]]
    rolled_back: list[int]
    spans: list[tuple[int, int]]
    findings: list[Finding]
    totals: list[tuple[int, int]]


def plan_journal(disk: Disk, data: str) -> JournalPlan:
    """Plan which files of a journal to read.

    Call this after the partitions were read: so the commits of all messages that were found are in the journal already.
    """
    folder = filenames.join(data, filenames.TRANSACTIONS_FOLDER)
    if not is_journal(disk, folder):
        return JournalPlan(data, 0, [], [])
    for tried in range(LISTING_ATTEMPTS):
        try:
            made = _plan_files(disk, data, folder)
        except FileNotFoundError:
            if tried == LISTING_ATTEMPTS - 1:
                raise
        except (NewerFormat, Corrupt) as error:
            return JournalPlan(data, 0, [], [_journal_finding(data, "", 0, 0, str(error))])
        else:
            if not made.findings:
                break
    return made


def _plan_files(disk: Disk, data: str, folder: str) -> JournalPlan:
    with closing(JournalScan(disk, folder)) as scan:
        findings = []
        row = decide(FILES_RULES, found) if (found := scan.files_facts()) is not None else None
        if row is None or row.decision is FilesAction.REFUSE:
            fault = scan.checkpoint_fault or "no snapshot that its checkpoint names is whole"
            findings.append(_journal_finding(data, "", 0, 0, f"a start would refuse it: {row.label if row else fault}"))
        if scan.identity is None:
            return JournalPlan(data, 0, [], findings)
        durable_lsn = scan.checkpoint.durable_lsn if scan.checkpoint is not None else 0
        last = scan.files[-1].number if scan.files else 0
        files = [
            JournalFilePlan(
                data, file.number, file.first, file.end, scan.seed, durable_lsn if file.number == last else file.end
            )
            for file in scan.files
            if file.number not in scan.head_faults
        ]
        return JournalPlan(data, scan.identity[0], files, findings)


def _journal_finding(data: str, file: str, first: int, next: int, text: str) -> Finding:
    return Finding(JOURNAL, data, filenames.TRANSACTIONS_FOLDER, -1, file, first, next, text)


def read_journal_file(disk: Disk, plan: JournalFilePlan) -> JournalFileContents:
    """Read all entries of one file. Return empty contents if the file was deleted after it was planned."""
    found = JournalFileContents([], [], [], [], [], [])
    name = filenames.journal_name(plan.number)
    path = filenames.join(filenames.join(plan.data, filenames.TRANSACTIONS_FOLDER), name)
    try:
        file = JournalFile(disk.open_read(path), plan.number, plan.first, plan.end - plan.first)
    except FileNotFoundError:
        return found
    with closing(file):
        begun = lsn = plan.first + FILE_HEADER_SIZE
        while lsn < plan.end:
            try:
                for entry in file.entries(lsn, plan.seed):
                    _add_entry(entry, found)
                    lsn = entry.next
            except BadRecord as error:
                found.spans.append((begun, lsn))
                following = file.find_entry(error.position + 1, plan.seed)
                begun = plan.end if following is None else following.lsn
                if lsn < plan.durable_end or following is not None:
                    text = f"cannot be read: {error.reason}"
                    found.findings.append(_journal_finding(plan.data, name, lsn, begun, text))
                lsn = begun
        found.spans.append((begun, lsn))
    return found


def _add_entry(entry: JournalEntry, found: JournalFileContents) -> None:
    content = entry.content
    if isinstance(content, AppendMsg):
        first_id = make_id(content.producer_id, content.sequence)
        copied = bool(content.moved_from)
        lsn = content.moved_from or entry.lsn
        found.messages.append(JournalMessages(lsn, content.epoch, content.log_id, first_id, content.count, copied))
    elif isinstance(content, Operation):
        try:
            record = records.unpack(*content)
        except ValueError:
            return
        if isinstance(record, records.PrepareRecord | records.LocalCommitRecord):
            found.totals.append((record.epoch, record.messages))
        if isinstance(record, COMMITS):
            found.decisions.append((entry.lsn, (record.epoch,)))
        elif isinstance(record, records.GroupCommitRecord):
            found.decisions.append((entry.lsn, tuple(record.members)))
            found.rolled_back.extend(record.dropped)
        elif isinstance(record, ROLLBACKS):
            found.rolled_back.append(record.epoch)
        elif isinstance(record, records.GroupAbortRecord):
            found.rolled_back.extend(record.dropped)


def join_spans(found: Sequence[JournalFileContents]) -> list[tuple[int, int]]:
    """Return the LSN ranges that were read without a gap; ranges of adjacent files are joined."""
    joined_spans: list[tuple[int, int]] = []
    for first, next in sorted(span for each in found for span in each.spans):
        if joined_spans and first <= joined_spans[-1][1] + FILE_HEADER_SIZE:
            joined_spans[-1] = joined_spans[-1][0], max(next, joined_spans[-1][1])
        else:
            joined_spans.append((first, next))
    return joined_spans


def expected_facts(
    plan: JournalPlan, found: Sequence[JournalFileContents], folder: int, logs: Mapping[int, int]
) -> Facts:
    """Return the facts of a journal: messages that partitions must have or must not have, and commits.

    `plan`, `found`: the journal's files and their contents · `folder`: number of the data folder in facts · `logs`: log
    id -> number of the log in facts. A log that is not in `logs` belongs to a deleted topic, so its messages are left
    out.
    """
    spans = join_spans(found)
    known_from = spans[-1][0] if spans else 0
    decisions = sorted(decision for each in found for decision in each.decisions)
    of_epoch: dict[int, tuple[int, int]] = {}
    for lsn, epochs in decisions:
        for order, epoch in enumerate(epochs):
            of_epoch[epoch] = lsn, order
    rolled = {epoch for each in found for epoch in each.rolled_back}
    facts = [make_facts(folder, -1, [[lsn, DECISION, 0, 0, 0, plan.journal_id] for lsn, _ in decisions])]
    rows: dict[int, list[list[int]]] = {}
    for message, number in _number_messages(found, of_epoch):
        epoch = message.epoch
        if epoch in of_epoch:
            row = [message.first_id, EXPECTED, message.count, of_epoch[epoch][0], epoch, number]
        elif epoch in rolled or message.lsn >= known_from:
            row = [message.first_id, FORBIDDEN, message.count, 0, epoch, int(epoch in rolled)]
        else:
            continue  # no commit or rollback was found: it may have been in a file that is deleted now
        rows.setdefault(message.log_id, []).append(row)
    facts += [make_facts(folder, logs[log_id], each) for log_id, each in rows.items() if log_id in logs]
    return concatenate_facts(facts)


def _number_messages(
    found: Sequence[JournalFileContents], of_epoch: Mapping[int, tuple[int, int]]
) -> Iterator[tuple[JournalMessages, int]]:
    """Yield (messages, number of the last of these messages within its commit) for all messages, without duplicates.

    The number is UNKNOWN_NUMBER if some messages of the commit are not found, or are found only as copies.
    """
    once: dict[tuple[int, int], JournalMessages] = {}
    for message in (message for each in found for message in each.messages):
        known = once.get((message.epoch, message.first_id))
        if known is None or known.copied:
            once[message.epoch, message.first_id] = message
    unnumbered = _unnumbered_decisions(found, once.values(), of_epoch)
    no_commit = (0, 0)
    decided = sorted(once.values(), key=lambda m: (*of_epoch.get(m.epoch, no_commit), m.epoch, m.lsn))
    number, current = 0, -1
    for message in decided:
        lsn = of_epoch.get(message.epoch, no_commit)[0]
        number = message.count if lsn != current else number + message.count
        current = lsn
        yield message, UNKNOWN_NUMBER if lsn in unnumbered else number


def _unnumbered_decisions(
    found: Sequence[JournalFileContents], messages: Collection[JournalMessages], of_epoch: Mapping[int, tuple[int, int]]
) -> set[int]:
    """Return the LSNs of commits with messages that are found only as copies, or not at all (the file is deleted)."""
    has: Counter[int] = Counter()
    for message in messages:
        has[message.epoch] += message.count
    copied = {message.epoch for message in messages if message.copied}
    total = dict(total for each in found for total in each.totals)
    return {lsn for epoch, (lsn, _) in of_epoch.items() if epoch in copied or total.get(epoch) != has[epoch]}
