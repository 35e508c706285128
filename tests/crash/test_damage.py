"""Damage of every kind to every file of a data folder: what a start, a check and a repair make of it.

Invariants, for each file and each kind of damage:
    a start serves, or refuses with a sentence that names the path and what to do
    what was not damaged is served, once, in order, whatever else is damaged
    what is lost lay in the damaged bytes; a check names the damage, unless nothing is lost by it
    after a repair the next two starts serve; what was decided stays decided, what was prepared is prepared or lost
    after a repair that succeeds the broker starts, and serves at least what it served without the repair
    no id is given out again, by nothing that a start or a repair does
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from struct import calcsize
from typing import Final, NamedTuple

import pytest

from journal.fsck.log_verify import DamagedRange, find_log_id, scan_segment
from journal.log.segment import Segment
from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_BODY, TRAILER_SIZE
from journal.record.format import HEADER, HEADER_SIZE, records_of
from journal.testing import SimulatedClock, SimulatedDisk
from journal.testing.memory_disk import SimulatedFolder, walk_tree
from tests.broker.helpers import DATA, Broker, after
from tests.scale import SCALE, scaled, seeded
from tfmq.broker.data_repair import repair_data, verify_data
from tfmq.protocol import commands
from tfmq.server import main

HOUR: Final = 3_600_000
TOPICS: Final = {"orders": 2, "bills": 1, "small": 1, "dead.billing": 1, "ticks": 1}
PREPARED: Final = ("first", "second")
SMALL_FILES: Final = {"transaction__journal_file_bytes": 1 << 16}
"""A journal of several files."""
FOLDER: Final = "a folder"
END: Final = "the end"

Files = dict[str, bytes | None]
"""Every path of a disk; None is a folder."""


def files_of(disk: SimulatedDisk) -> Files:
    found = walk_tree(disk.tree.root)
    return {f"/{path}": None if isinstance(node, SimulatedFolder) else bytes(node.data) for path, node in found}


def disk_of(files: Files) -> SimulatedDisk:
    disk = SimulatedDisk()
    for path, data in sorted(files.items()):
        if data is None:
            disk.make_folder(path)
        else:
            disk.write_file(path, data)
    disk.tree.fsync(None)
    return disk


class Life(NamedTuple):
    """A data folder: its files now and at an earlier clean stop, and the time."""

    files: Files
    older: Files
    wall_ms: int
    highest_id: int


class World:
    """Verbs that give each message a payload of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broker = Broker(start=False, **SMALL_FILES)
        self.broker.random.count = sum(name.encode()) << 20  # salts and node ids of its own
        self.broker.engine.start()
        self.count = 0
        self.sequences: dict[int, int] = {}

    def payload(self, size: int = 0) -> bytes:
        self.count += 1
        return f"{self.name} {self.count:04d}.".encode().ljust(size, b".")

    def produce(self, producer: int, topic: str, partition: int = 0, size: int = 0) -> None:
        sequence = self.sequences.get(producer, 0)
        answer = self.broker.produce(
            producer, sequence, [self.payload(size), self.payload()], topic=topic, partition=partition
        )
        assert answer.code == "ok"
        self.sequences[producer] = sequence + 2

    def work(self, xid: str) -> None:
        """Of everything some: messages, offsets, delayed ones, a transaction of each kind."""
        broker = self.broker
        for topic, partition in (("orders", 0), ("orders", 1), ("bills", 0), ("dead.billing", 0)):
            producer = broker.lease()
            for _ in range(4):
                self.produce(producer, topic, partition)
        producer = broker.lease()
        for _ in range(5):
            self.produce(producer, "small", size=20_000)
        member = broker.join("billing", topics="orders")
        offset = broker.log("orders", 0).end_offset
        assert broker.commit(member, offset, "billing").code == "ok"
        stream = broker.stream()
        broker.transact(stream, [("orders", 0, [self.payload()]), ("bills", 0, [self.payload()])])
        broker.transact(broker.stream(), [("orders", 1, [self.payload()], after(30 * HOUR))])
        stream = broker.stream()
        rolled = broker.begin(stream, f"{xid} rolled back")
        broker.send(stream, rolled, [b"never"])
        broker.rollback(rolled)
        stream = broker.stream()
        began = broker.begin(stream, xid)
        for topic in ("orders", "bills"):
            for size in (0, 20_000, 20_000):
                assert broker.send(stream, began, [self.payload(size)], topic=topic).code == "ok"
        assert broker.prepare(began).code == "ok"
        self.delay(24)

    def delay(self, hours: int) -> None:
        for topic in ("orders", "bills"):
            producer = self.broker.lease()
            for number in range(3):
                due = after((hours + number) * HOUR)
                assert self.broker.delay(producer, number, [self.payload()], due=due, topic=topic).code == "ok"


@cache
def young() -> Life:
    """A broker that was killed at once after its first sends: nothing but the record files says that there are any."""
    world = World("young")
    for topic, partitions in TOPICS.items():
        assert world.broker.create(topic, partitions).code == "ok"
    world.produce(world.broker.lease(), "orders")
    stream = world.broker.stream()
    began = world.broker.begin(stream, "first")
    assert world.broker.send(stream, began, [world.payload()], topic="bills").code == "ok"
    assert world.broker.prepare(began).code == "ok"
    world.delay(24)
    highest = world.broker.lease()
    files = files_of(world.broker.disk)
    return Life(files, files, world.broker.clock.wall_ms(), highest)


def lived_by(ending: str) -> Life:
    return young() if ending == "young" else life("life", ending == "stopped")


@cache
def life(name: str, clean: bool) -> Life:
    """Two runs of a broker; the later one ends cleanly, or is killed."""
    world = World(name)
    for topic, partitions in TOPICS.items():
        own = {"log__segment_bytes": 1 << 16} if topic == "small" else {}
        assert world.broker.create(topic, partitions, **own).code == "ok"
    schedule = commands.AddSchedule("nightly", "0 3 1 1 *", "UTC", "ticks")
    assert world.broker.ask(schedule, b"tick").code == "ok"
    world.work("first")
    world.broker.advance(300)  # delayed messages go to the buckets
    random = world.broker.random
    world.broker.stop()
    older = files_of(world.broker.disk)
    world.broker = Broker(world.broker.disk, world.broker.clock, start=False, **SMALL_FILES)
    world.broker.random = random
    world.broker.engine.start()
    world.broker.advance(120)  # the group's member of the first run is not expected any more
    world.work("second")
    world.broker.advance(300)
    world.delay(40)  # these stay in the arrivals
    highest = world.broker.lease()
    if clean:
        world.broker.stop()
    else:
        world.broker.advance(2)  # the marks are as they are in a running broker
    return Life(files_of(world.broker.disk), older, world.broker.clock.wall_ms(), highest)


# What a start shows.


@dataclass
class View:
    """What a broker has: read at once, and what comes of it when everything prepared is committed and all is due."""

    payloads: dict[tuple[str, int], list[bytes] | None] = field(default_factory=dict)
    saved: dict[tuple[str, int], int] = field(default_factory=dict)
    prepared: frozenset[str] = frozenset()
    schedules: tuple[str, ...] = ()
    settings: dict[str, dict[str, object]] = field(default_factory=dict)
    node: str = ""
    next_id: int = 0


def read(broker: Broker, topic: str, partition: int) -> list[bytes] | None:
    """What can be read, past damage; None of a partition that is not served."""
    try:
        log = broker.log(topic, partition)
    except AssertionError:
        return None
    found: list[bytes] = []
    for segment in log._segment_set.segments:
        for item in scan_segment(segment):
            if not isinstance(item, DamagedRange) and item.offset >= log.first_offset and item.next <= log.end_offset:
                found += payloads(item.data)
    return found


def payloads(data: memoryview) -> list[bytes]:
    return [
        bytes(data[record.position + HEADER_SIZE : record.position + record.size])
        for record in records_of(data)
        if not record.flag & 0x60
    ]


def look(broker: Broker) -> View:
    register = broker.engine.broker.catalog.state
    known = {row.name: row for row in register.topics.values()}
    found = View(node=broker.engine.broker.node)
    for topic, partitions in TOPICS.items():
        for partition in range(partitions):
            there = topic in known and partition < known[topic].partitions
            found.payloads[topic, partition] = read(broker, topic, partition) if there else None
    found.saved = broker.saved("billing")
    found.prepared = frozenset(str(row["xid"]) for row in broker.listed() if row["state"] == "prepared")
    found.schedules = tuple(row.name for row in register.schedules)
    found.settings = {name: dict(row.settings) for name, row in known.items()}
    return found


def end(broker: Broker) -> View:
    """Everything prepared is committed, what lost messages only by hand and force; a later start finds everything
    delayed due."""
    for row in broker.listed():
        if row["state"] == "prepared":
            request = commands.CommitTransaction(row["xid"], row["epoch"], False, False, [])
            answer = broker.ask(request)
            broker.work()
            require(not row["lost"] or answer.code == "damaged", f"a commit with a loss is told as {answer.code}")
            if row["lost"]:
                broker.ask(request._replace(heuristic=True, force=True))
                broker.work()
    next_id = broker.lease()
    broker.stop()
    broker = started(broker.disk, broker.clock.wall_ms() + 60 * HOUR)
    broker.advance(5)
    found = look(broker)
    found.next_id = min(next_id, broker.lease())
    return found


def started(disk: SimulatedDisk, wall_ms: int) -> Broker:
    return Broker(disk, SimulatedClock(wall_ms), **SMALL_FILES)


@cache
def whole(ending: str) -> tuple[View, View]:
    """Of the data folder without damage: at the start, and at the end."""
    lived = lived_by(ending)
    broker = started(disk_of(lived.files), lived.wall_ms)
    first = look(broker)
    return first, end(broker)


# Damage.


def flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        position = min(len(data) - 1, int(len(data) * place))
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        return bytes(changed)

    return flip


def zeroed(data: bytes) -> bytes:
    """A sector in the middle; of a short file its second half."""
    first = min(len(data) // 2, max(0, len(data) // 1024 * 512))
    return data[:first] + bytes(len(data[first : first + 512])) + data[first + 512 :]


GARBAGE: Final = "garbage at its end"
EMPTY: Final = "empty"
BYTES: Final[dict[str, Callable[[bytes], bytes]]] = {
    **{f"a bit flipped at {place}": flipped(place) for place in (0, 0.05, 0.3, 0.5, 0.8, 1)},
    "cut to half": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    EMPTY: lambda data: b"",
    "a zeroed sector": zeroed,
    GARBAGE: lambda data: data + bytes(range(1, 200)),
    "its end twice": lambda data: data + data[-max(1, len(data) // 4) :],
    "its middle again at its end": lambda data: data + data[len(data) // 3 : len(data) * 2 // 3],
}
DELETED, OLDER, OTHER = "deleted", "an older copy", "another file of the kind"
KINDS: Final = (*BYTES, DELETED, OLDER, FOLDER, OTHER)


def other_of(lived: Life, path: str) -> bytes | None:
    """Another file of the same kind: of another folder of this data, otherwise of another broker's.

    Not of the catalog: all have one log id, and one that ends where this one does, with entries that fit, is taken for
    it where no snapshot contradicts it.
    """
    if path.endswith(".catalog"):
        return None
    folder, _, name = path.rpartition("/")
    suffix = name.rpartition(".")[2] if "." in name else name
    others = [
        other
        for other in lived.files
        if other != path and other.endswith(suffix) and lived.files[other] != lived.files[path]
    ]
    same = [other for other in others if other.rpartition("/")[0] == folder] or others
    strange = life("other", True).files.get(path)
    data = lived.files[same[0]] if same else strange
    return data


TRAILER: Final = "a bit of a trailer: "
HEADER_FIELDS: Final = ("length", "checksum", "log id", "flag")
BODY_FIELDS: Final = (
    "version", "bits", "records", "size", "crc", "append time", "epoch", "source kind", "forced",
    "first ordinal", "offset", "source id", "source high", "source low",
)  # fmt: skip
BLOCKS: Final = ("first", "middle", "last")
TRAILER_KINDS: Final = tuple(
    f"{TRAILER}{field}, {which} block" for field in (*HEADER_FIELDS, *BODY_FIELDS) for which in BLOCKS
)
"""The checksum in the header of a block trailer covers its body, not the log id beside it."""


def trailer_fields() -> dict[str, tuple[int, int]]:
    """(position, size) of each field of a block trailer."""
    found, position = {}, 0
    formats = (*HEADER.format[1:], *TRAILER_BODY.format[1:])
    for name, code in zip((*HEADER_FIELDS, *BODY_FIELDS), formats, strict=True):
        found[name] = (position, calcsize(f">{code}"))
        position += calcsize(f">{code}")
    assert position == TRAILER_SIZE
    return found


def with_trailer_bit(data: bytes, path: str, kind: str) -> bytes:
    """One bit of one field of the block trailer of one block, both drawn by the names."""
    log_id, base = log_of(path, data)
    blocks = list(blocks_of(data, base, log_id))
    field, which, _ = kind.removeprefix(TRAILER).replace(",", "").rsplit(" ", 2)
    generator = seeded("trailer", path, kind)
    number = {"first": 0, "middle": generator.randrange(len(blocks)), "last": len(blocks) - 1}[which]
    position, size = trailer_fields()[field]
    at = blocks[number].next - base - TRAILER_SIZE + position
    bit = 8 * at + generator.randrange(8 * size)
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def log_of(path: str, data: bytes) -> tuple[int, int]:
    """The log's id, and the offset of the first byte, of an undamaged segment."""
    disk = SimulatedDisk()
    disk.make_folder("/whole")
    name = f"/whole/{path.rpartition('/')[2]}"
    disk.write_file(name, data)
    log_id = find_log_id(disk, name)
    assert log_id is not None
    return log_id, int(name.rpartition("/")[2].split(".")[0])


def damaged(lived: Life, path: str, kind: str) -> Files | None:
    """The files with one damaged; None where that is none."""
    files = dict(lived.files)
    data = files[path]
    assert data is not None
    if kind.startswith(TRAILER):
        files[path] = with_trailer_bit(data, path, kind)
    elif kind in BYTES:
        if not data and kind != GARBAGE:
            return None
        files[path] = BYTES[kind](data)
    elif kind == DELETED:
        del files[path]
    elif kind == FOLDER:
        files[path] = None
    elif kind == OLDER:
        if path not in lived.older:
            return None
        files[path] = lived.older[path]
    else:
        files[path] = other_of(lived, path)
        if files[path] is None:
            return None
    return files if files != lived.files else None


def cells(ending: str) -> Iterator[tuple[str, str]]:
    for path, data in sorted(lived_by(ending).files.items()):
        if data is not None:
            for kind in KINDS:
                yield path, kind


def trailer_cells(ending: str) -> Iterator[tuple[str, str]]:
    for path, data in sorted(lived_by(ending).files.items()):
        if data and path.endswith((".zxQueue", ".arrivals")):
            for kind in TRAILER_KINDS:
                yield path, kind


# What may be lost.


def touched(lived: Life, files: Files, path: str) -> set[bytes]:
    """Payloads of the blocks of a segment in which bytes are not what they were."""
    before, data = lived.files[path], files.get(path)
    assert before is not None
    now = data or b""
    same = next((n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    changed_end = len(before)
    if before and len(now) == len(before):
        changed_end = next(n for n in range(len(before), 0, -1) if before[n - 1] != now[n - 1])
    disk = disk_of(lived.files)
    folder, _, name = path.rpartition("/")
    base = int(name.split(".")[0])
    log_id = find_log_id(disk, path)
    if log_id is None:
        return set()
    suffix = "." + name.split(".")[1]
    segment = Segment.open(disk, folder, base, log_id, writable=False, suffix=suffix)
    found: set[bytes] = set()
    for item in scan_segment(segment):
        assert not isinstance(item, DamagedRange)
        if item.offset - base < changed_end and item.next - base > same:
            found.update(payloads(item.data))
    return found


class Lost(NamedTuple):
    """What the damage may take: payloads, names of prepared transactions, and what the catalog alone knows. `again`:
    what may come twice, since the word that a transaction was applied is lost with the bytes.
    """

    payloads: set[bytes]
    xids: frozenset[str]
    catalog: bool
    again: frozenset[bytes] = frozenset()


def may_lose(ending: str, files: Files, path: str) -> Lost:
    lived = lived_by(ending)
    before, now = lived.files[path], files.get(path)
    if before and now and now.startswith(before):
        return NOTHING  # every byte is there
    part = path.removeprefix(f"{DATA}/")
    first, last = ({p for found in view.payloads.values() for p in found or ()} for view in whole(ending))
    later = last - first
    if part.endswith(".zxQueue"):
        return Lost(touched(lived, files, path), frozenset(), False)
    if part.startswith("transactions/") and part.endswith(".journal"):
        return Lost(later, frozenset(PREPARED), False)
    if part.endswith(".bucket"):
        return Lost(later, frozenset(), False)
    if part.endswith(".arrivals"):
        return Lost(later, frozenset(), False, frozenset(later))
    return Lost(set(), frozenset(), part.endswith(".catalog"))


NOTHING: Final = Lost(set(), frozenset(), False)


class Trouble(AssertionError):
    """A promise that is not kept."""


def require(kept: object, what: str) -> None:
    if not kept:
        raise Trouble(what)


def compare(view: View, right: View, lost: Lost, path: str, when: str) -> bool:
    """Raises Trouble; whether anything is missing."""
    missing = False
    for place, expected in right.payloads.items():
        found = view.payloads[place]
        assert expected is not None
        if found is None:
            own = path.startswith(f"{DATA}/{place[0]}-{place[1]}/")
            require(own, f"{when}: {place} is not served")
            missing = True
            continue
        twice = {payload for payload in found if found.count(payload) > 1}
        require(twice <= lost.again, f"{when}: a message of {place} is doubled")
        kept = [payload for payload in expected if payload in found or payload not in lost.payloads]
        gone = [payload for payload in kept if payload not in found]
        require(not gone, f"{when}: {len(gone)} undamaged of {place} are gone, such as {gone[:1]}")
        strange = [payload for payload in found if payload not in expected]
        require(not strange, f"{when}: {place} has what it had not, such as {strange[:1]}")
        # What is applied only now comes in the order of its decisions and dues, which the damage may have changed.
        require(when == END or found == kept, f"{when}: {place} is in another order")
        missing |= len(found) < len(expected)
    for what in ("saved", "schedules", "settings"):
        same = getattr(view, what) == getattr(right, what)
        require(same or lost.catalog, f"{when}: {what} {getattr(view, what)}, not {getattr(right, what)}")
        missing |= not same
    require(view.prepared <= right.prepared, f"{when}: {view.prepared - right.prepared} is prepared again")
    require(right.prepared - view.prepared <= lost.xids, f"{when}: {right.prepared - view.prepared} is lost")
    require(view.node == right.node, f"{when}: another node")
    return missing or view.prepared != right.prepared


def examine(ending: str, path: str, kind: str, caplog: pytest.LogCaptureFixture) -> str:
    """One cell. Raises Trouble; what became of it in a word."""
    lived = lived_by(ending)
    files = damaged(lived, path, kind)
    if files is None:
        return "no damage"
    first, last = whole(ending)
    lost = may_lose(ending, files, path)
    # Of a block of which the trailer alone is damaged, every record proves itself: a repair loses none of them, nor a
    # start that repairs the arrivals.
    lost_for_good = NOTHING if kind.startswith(TRAILER) else lost
    if path.endswith(".arrivals"):
        lost = lost_for_good
    disk = disk_of(files)
    findings = [each for report in verify_data(disk, DATA) for each in report.findings]
    require(files_of(disk) == files, "verify: it changed something")
    caplog.clear()
    outcome = "served"
    try:
        broker = started(disk, lived.wall_ms)
    except Exception as error:
        said = main.startup_sentence(error, DATA)
        require(said is not None, f"start: {type(error).__name__} without a sentence: {error}")
        assert said is not None
        folder = path.rpartition("/")[0]
        require(folder in said, f"start: the sentence names another path: {said}")
        require("tfmq log repair" in said, f"start: no repair is named: {said}")
        outcome = "refused"
    else:
        missing = compare(look(broker), first, lost, path, "first start")
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        require(not missing or findings or warned, "first start: something is missing, and nothing says so")
        broker.stop()
        disk = broker.disk
    repaired_at_once(lived, files, whole_end(lived, files) if outcome == "served" else None)
    disk = disk_of(files_of(disk))
    done = repair_data(disk, DATA)
    require(not done.failed, f"repair: {done.failed}")
    for when in ("second start", "third start"):
        try:
            broker = started(disk, lived.wall_ms)
        except Exception as error:
            raise Trouble(f"{when}: {main.startup_sentence(error, DATA) or repr(error)}") from error
        compare(look(broker), first, lost_for_good, path, when)
        broker.stop()
        disk = disk_of(files_of(broker.disk))
    left = [each for report in verify_data(disk, DATA) for each in report.findings if each.weight == "damage"]
    require(not left, f"verify after the repair: {left[:2]}")
    view = end(started(disk, lived.wall_ms))
    require(view.next_id > lived.highest_id, f"the id {view.next_id} is given out again")
    compare(view, last, lost_for_good, path, END)
    return outcome


def whole_end(lived: Life, files: Files) -> View:
    """What a broker has in the end that was started on the damaged files."""
    return end(started(disk_of(files), lived.wall_ms))


def repaired_at_once(lived: Life, files: Files, unrepaired: View | None) -> None:
    """The damaged files are repaired before any start. Raises Trouble."""
    disk = disk_of(files)
    done = repair_data(disk, DATA)
    require(not done.failed, f"repair at once: {done.failed}")
    try:
        repaired = end(started(disk, lived.wall_ms))
    except Exception as error:
        raise Trouble(f"start after a repair at once: {error}") from error
    for place, served in unrepaired.payloads.items() if unrepaired is not None else ():
        gone = set(served or ()) - set(repaired.payloads[place] or ())
        require(not gone, f"repair at once: {len(gone)} of {place} that were served are gone: {list(gone)[:1]}")


SHORT: Final = 12
"""Cells of a short run."""


@pytest.mark.long
@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_every_damage_is_served_around_or_refused_and_repaired(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    every = list(cells(ending))
    examine_all(every, scaled(len(every), SHORT), ending, caplog)


@pytest.mark.long
@pytest.mark.parametrize("ending", ["stopped", "killed"])
def test_a_flipped_bit_in_any_field_of_a_trailer_costs_no_message(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    every = list(trailer_cells(ending))
    examine_all(every, scaled(len(every), SHORT), ending, caplog)


@pytest.mark.long
@pytest.mark.parametrize("how", [DELETED, EMPTY])
def test_a_file_that_is_gone_right_after_a_kill_is_named(how: str, caplog: pytest.LogCaptureFixture) -> None:
    every = [(path, kind) for path, kind in cells("young") if kind == how]
    if how == EMPTY:
        # An empty record file is what a power cut before the first fsync leaves.
        every = [cell for cell in every if not cell[0].endswith((".zxQueue", ".catalog"))]
    examine_all(every, len(every), "young", caplog)


def examine_all(every: list[tuple[str, str]], count: int, ending: str, caplog: pytest.LogCaptureFixture) -> None:
    chosen = every if SCALE >= 1 else seeded("damage", ending == "stopped").sample(every, count)
    troubles = []
    for path, kind in chosen:
        try:
            examine(ending, path, kind, caplog)
        except Trouble as trouble:
            troubles.append(f"{path}, {kind}: {trouble}")
        except Exception as error:
            troubles.append(f"{path}, {kind}: {error!r} in {traceback.extract_tb(error.__traceback__)[-1]}")
    assert not troubles, f"{len(troubles)} of {len(chosen)}:\n" + "\n".join(troubles)
