"""A transaction journal on a simulated disk, with verbs; and a state that remembers everything it was taught."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Set
from zlib import crc32

from journal.filenames import journal_name, parse_journal_name, parse_snapshot_name
from journal.testing import SimulatedClock, SimulatedDisk
from journal.wal.entry import (
    BLOCK,
    COMMIT,
    FORGET,
    HEADER_SIZE,
    MESSAGES,
    OPERATION,
    AppendMsg,
    Content,
    JournalEntry,
    LostEntries,
    Operation,
)
from journal.wal.file import FILE_HEADER_SIZE
from journal.wal.store import JournalOptions, JournalStore

DATA = "data"
FOLDER = "data/transactions"
CHECKPOINT = f"{FOLDER}/checkpoint"
LOG_ID = 9 << 24 | 3
PAYLOAD_SIZE = 40
ONE = HEADER_SIZE + MESSAGES.size + 12 + PAYLOAD_SIZE
"""Bytes of an entry that `Journal.send` makes."""
SMALL = JournalOptions(file_bytes=FILE_HEADER_SIZE + 5 * ONE, checkpoint_bytes=8 * ONE, flush_bytes=6 * ONE)
"""Five such entries a file."""

Seen = tuple[int, int, int, bytes]
"""(place, kind, epoch, bytes) of an entry: kind 0 is a piece, -1 a filler."""


def message(epoch: int, number: int, size: int = PAYLOAD_SIZE, moved_from: int = 0) -> AppendMsg:
    """A piece whose bytes name it."""
    data = (b"%d/%d " % (epoch, number)).ljust(size, b".")[:size]
    return AppendMsg(epoch, LOG_ID, 70, number, 1, ((len(data), 1, crc32(data)),), data, moved_from)


def entry_size(content: Content) -> int:
    """Bytes of an entry with this content, by the format's page."""
    if isinstance(content, AppendMsg):
        return HEADER_SIZE + MESSAGES.size + BLOCK.size * len(content.blocks) + len(content.data)
    return HEADER_SIZE + OPERATION.size + len(content.payload)


def row_of(entry: JournalEntry) -> Seen:
    content = entry.content
    if isinstance(content, AppendMsg):
        return entry.lsn, 0, content.epoch, bytes(content.data)
    if isinstance(content, LostEntries):
        return entry.lsn, -1, 0, b""
    assert isinstance(content, Operation)
    return entry.lsn, content.kind, content.epoch, content.payload


class RememberingState:
    """`seen` is every entry ever applied; the pieces of an epoch are held until its FORGET."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.loads = 0
        self.replayed = 0
        self.lost: set[int] = set()

    def load(self, data: bytes) -> None:
        self.loads += 1
        self.seen = list(ast.literal_eval(data.decode())) if data else []

    def apply(self, entry: JournalEntry) -> None:
        self.replayed += 1
        self.note(row_of(entry))

    def note(self, row: Seen) -> None:
        if self.seen and self.seen[-1][0] >= row[0]:
            raise ValueError(f"place {row[0]} behind {self.seen[-1][0]}")
        self.seen.append(row)

    def dump(self) -> Callable[[], bytes]:
        seen = list(self.seen)
        return lambda: repr(seen).encode()

    def needed(self) -> Iterable[int]:
        return self.held()

    def lose(self, places: Set[int]) -> None:
        self.lost = set(places)

    def held(self) -> Iterable[int]:
        return [place for places in self.live().values() for place in places]

    def live(self) -> dict[int, list[int]]:
        """The places of the pieces of each epoch that came since it was forgotten last."""
        found: dict[int, list[int]] = {}
        for place, kind, epoch, _ in self.seen:
            if kind == FORGET:
                found.pop(epoch, None)
            elif kind == 0:
                found.setdefault(epoch, []).append(place)
        return found


class Journal:
    """See the module. `store` is the journal, `state` what it teaches, `reported` why an opening failed."""

    def __init__(self, disk: SimulatedDisk | None = None, options: JournalOptions = SMALL) -> None:
        self.disk = disk or make_disk()
        self.clock = SimulatedClock()
        self.options = options
        self.ids = 4
        self.number = 0
        self.state = RememberingState()
        self.store: JournalStore

    def open(self) -> JournalStore:
        self.state = RememberingState()
        self.store = JournalStore.open(
            self.disk, FOLDER, new_id=self._new_id, clock=self.clock, state=self.state, options=self.options,
            randomness=random.Random(7).randbytes,
        )  # fmt: skip
        return self.store

    def _new_id(self) -> int:
        self.ids += 1
        return self.ids

    def kill(self) -> JournalStore:
        """The process ends; what it wrote is still in the system's memory."""
        return self.open()

    def crash(self, keep: str = "nothing") -> Journal:
        """The journal after a power cut, opened."""
        other = Journal(self.disk.crash(keep=keep), self.options)
        other.number = self.number
        other.open()
        return other

    def append(self, *contents: AppendMsg | Operation) -> list[int]:
        places = self.store.append(contents)
        for place, content in zip(places, contents, strict=True):
            if isinstance(content, AppendMsg):
                self.state.note((place, 0, content.epoch, bytes(content.data)))
                self.store.add_reference(place)
            else:
                self.state.note((place, content.kind, content.epoch, content.payload))
        return places

    def send(self, epoch: int = 1, size: int = PAYLOAD_SIZE) -> int:
        """A piece of that transaction; its place."""
        self.number += 1
        return self.append(message(epoch, self.number, size))[0]

    def tell(self, epoch: int = 1, kind: int = COMMIT, payload: bytes = b"") -> int:
        return self.append(Operation(kind, epoch, payload))[0]

    def settle(self, epoch: int) -> None:
        """The transaction is over: nothing of it is held any more."""
        places = self.state.live().get(epoch, [])
        self.tell(epoch, FORGET)
        for place in places:
            self.store.release_reference(place)

    def sent(self, count: int, epoch: int = 1) -> Journal:
        """`count` forced pieces."""
        for _ in range(count):
            self.send(epoch)
        self.store.force()
        return self

    def checkpoint(self) -> None:
        work = self.store.checkpoint()
        work()
        self.store.checkpoint_done(None)

    def path(self, name: str) -> str:
        return f"{FOLDER}/{name}"

    def file(self, number: int = -1) -> str:
        """The path of a file; -1: the last one."""
        return self.path(journal_name(self.numbers[-1] if number == -1 else number))

    @property
    def numbers(self) -> list[int]:
        found = map(parse_journal_name, self.disk.list(FOLDER))
        return sorted(number for number in found if number is not None)

    @property
    def snapshots(self) -> list[int]:
        found = map(parse_snapshot_name, self.disk.list(FOLDER))
        return sorted(number for number in found if number is not None)

    def bytes(self) -> dict[str, bytes]:
        """Every file of the folder."""
        return {name: self.disk.read_file(self.path(name)) for name in self.disk.list(FOLDER)}


def make_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder(DATA)
    disk.force_folder("")
    return disk


def opened(options: JournalOptions = SMALL) -> Journal:
    """A new journal."""
    journal = Journal(options=options)
    journal.open()
    return journal
