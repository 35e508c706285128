"""Sealed segments are read again at a limited pace: what is damaged is reported once, shown, and forgotten in time."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import pytest

from journal.disk import File
from journal.testing.memory_disk import SimulatedFile
from tests.broker.helpers import DATA, Broker
from tests.scale import scaled, seeded
from tfmq.broker.verification import FINDINGS_MAX, PLAN_SECONDS, SLICE_BYTES
from tfmq.protocol.commands import DeleteTopic, DescribeTopic, ResumePartition, Status, Truncate
from tfmq.testing.broker import SimulatedBroker

FOLDER = f"{DATA}/orders-0"
INTERVAL = 1800.0


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a worker reads once, or verifies the rest of what the job before has read."""
    monkeypatch.setattr("tfmq.broker.verification.SLICE_BYTES", 1)


def filled(batches: int = 8, **values: Any) -> Broker:
    """A partition with a sealed segment for each two of `batches`, except the last."""
    broker = Broker(log__segment_bytes=1 << 16, verification__interval_seconds=INTERVAL, **values)
    broker.create()
    producer = broker.lease()
    for sequence in range(batches):
        broker.produce(producer, sequence, [bytes([sequence]) * 30_000])
    broker.work()
    broker.advance(60)  # the marks are written
    broker.work()
    return broker


def one_segment(broker: Broker) -> None:
    """Of a broker with queued jobs, until the first segment was verified."""
    broker.advance(PLAN_SECONDS)
    while not broker.engine.broker.segment_verifier.status()["segments"]:
        broker.step()
        broker.advance(0.1)


def one_pass(broker: Broker) -> None:
    """Time goes on until all segments that are due were verified."""
    passes = status(broker)["passes"]
    while status(broker)["passes"] == passes:
        broker.advance(PLAN_SECONDS)


def status(broker: Broker) -> Any:
    return broker.ask(Status()).status["verification"]


def described(broker: Broker) -> Any:
    answer = broker.ask(DescribeTopic("orders"))
    broker.work()
    return answer.description["partitions"][0]


def flip(broker: Broker, segment: int, position: int) -> None:
    path = broker.log().sealed_segments[segment].path
    (byte,) = broker.disk.read_file(path)[position : position + 1]
    broker.disk.damage(path, position, bytes((byte ^ 4,)))


def test_a_sound_log_is_verified_once_in_an_interval_and_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    broker = filled()
    size = broker.log().sealed_segments[-1].end
    one_pass(broker)
    first = status(broker)
    assert (first["segments"], first["waiting"], set(first["findings"].values())) == (3, 0, {0})
    assert size <= first["bytes"] <= 1.2 * size and first["last_pass_ms"] <= broker.clock.wall_ms()
    broker.advance(INTERVAL - 2 * PLAN_SECONDS)
    assert status(broker)["segments"] == 3
    broker.advance(2 * PLAN_SECONDS)
    assert status(broker)["segments"] == 6
    row = described(broker)
    assert (row["state"], row["damage"], row["findings"]) == ("open", [], [])
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_flipped_byte_is_found_logged_once_and_what_readers_get(caplog: pytest.LogCaptureFixture) -> None:
    broker = filled()
    segment = broker.log().sealed_segments[1]
    block = segment.size // 2
    flip(broker, 1, block + 100)
    one_pass(broker)
    found_ms = broker.clock.wall_ms()
    for _ in range(2):
        row = described(broker)
        (found,) = row["findings"]
        first, next = segment.base + block, segment.end
        assert (found["file"], found["first"], found["next"]) == (segment.path.rpartition("/")[2], first, next)
        assert found["kind"] == "damaged" and "fails its checksum" in found["reason"]
        assert found_ms - PLAN_SECONDS * 1000 <= found["found_ms"] <= found_ms
        assert row["state"] == "damaged" and row["damage"] == [[first, next, found["reason"]]]
        assert status(broker)["findings"]["damaged"] == 1
        answer = broker.fetch(first)
        assert answer.code == "damaged" and answer.failure is not None and answer.failure.details["next"] == next
        assert broker.fetch(segment.base).code == broker.fetch(next).code == "ok"
        broker.advance(INTERVAL)
        one_pass(broker)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith(f"orders-0: {segment.path.rpartition('/')[2]} is damaged from {first} to {next}: ")


@pytest.mark.usefixtures("slices")
def test_what_is_found_at_the_beginning_of_a_segment_is_still_there_at_its_end() -> None:
    broker = filled()
    flip(broker, 0, 100)
    one_pass(broker)
    assert status(broker)["segments"] == 3 and len(described(broker)["findings"]) == 1


def test_an_error_of_the_disk_is_a_finding_and_stops_nothing() -> None:
    broker = filled()
    broker.disk.faults.fail("read", times=None, path=broker.log().sealed_segments[0].path)
    one_pass(broker)
    row = described(broker)
    assert [found["kind"] for found in row["findings"]] == ["unreadable"]
    assert (row["state"], row["damage"], row["reason"], row["oldest_ms"]) == ("open", [], "", None)
    assert broker.produce(broker.lease(), 0, [b"more"]).code == "ok"
    broker.disk.faults.clear()
    assert broker.fetch(0).code == "ok"
    broker.advance(INTERVAL)
    one_pass(broker)
    assert not described(broker)["findings"], "it was read again without an error"


def test_a_wrong_index_is_a_finding_without_damage() -> None:
    broker = filled()
    index = broker.log().sealed_segments[0].path.removesuffix(".zxQueue") + ".index"
    broker.disk.damage(index, 20, b"\xee")
    one_pass(broker)
    row = described(broker)
    assert [(found["file"], found["kind"]) for found in row["findings"]] == [(index.rpartition("/")[2], "index")]
    assert row["state"] == "open"


def test_what_is_sound_again_is_no_finding_after_the_next_pass() -> None:
    broker = filled()
    flip(broker, 0, 100)
    one_pass(broker)
    assert described(broker)["state"] == "damaged"
    flip(broker, 0, 100)
    broker.advance(INTERVAL)
    one_pass(broker)
    row = described(broker)
    assert (row["state"], row["damage"], row["findings"]) == ("open", [], [])
    assert broker.fetch(0).code == "ok"


@pytest.mark.parametrize("removal", ["truncate", "retention", "delete", "a part"])
def test_findings_end_with_what_they_are_about(removal: str) -> None:
    broker = filled(**{"retention__seconds": INTERVAL} if removal == "retention" else {})
    flip(broker, 0, 100)
    one_pass(broker)
    assert status(broker)["findings"]["damaged"] == 1
    if removal == "delete":
        broker.ask(DeleteTopic("orders"))
    elif removal == "retention":
        broker.advance(2 * INTERVAL)
    else:
        # A part: the damaged block is before the first offset, in a segment that is still there.
        segment = broker.log().sealed_segments[0]
        before = segment.size // 2 if removal == "a part" else segment.end
        broker.ask(Truncate("orders", broker.incarnation(), 0, before))
        assert broker.log().first_offset == before
    assert set(status(broker)["findings"].values()) == {0}
    if removal != "delete":
        row = described(broker)
        assert (row["state"], row["findings"]) == ("open", [])


@pytest.mark.parametrize("removal", ["truncate", "delete", "resume"])
@pytest.mark.parametrize("job", range(3))
@pytest.mark.usefixtures("slices")
def test_a_segment_that_is_removed_while_it_is_verified_is_no_finding(
    removal: str, job: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In each of the jobs of a pass: before it runs, and after it read, before the broker gets its result."""
    for runs_first in (False, True):
        broker = filled(queued=True)
        for segment in range(3):
            flip(broker, segment, 100)
        broker.advance(PLAN_SECONDS)
        broker.step()
        for _ in range(job):
            broker.step()
            broker.advance(1)
        (work, done), broker.jobs = broker.jobs[0], deque()
        result = work() if runs_first else None
        if removal == "truncate":
            broker.ask(Truncate("orders", broker.incarnation(), 0, broker.log().end_offset))
        elif removal == "delete":
            broker.ask(DeleteTopic("orders"))
        else:
            broker.log().stop("a test")
            broker.ask(ResumePartition("orders", 0))
        caplog.clear()
        broker.work()
        done(result if runs_first else work(), None)
        if removal != "resume":
            broker.advance(PLAN_SECONDS)
            broker.work()
            assert set(status(broker)["findings"].values()) == {0}
            assert not [record for record in caplog.records if record.levelno > logging.INFO]
        else:
            assert not broker.log().damage and not described(broker)["findings"]


@pytest.mark.usefixtures("slices")
def test_nothing_is_open_between_jobs_so_a_removed_segment_frees_its_space() -> None:
    broker = filled(queued=True)
    open_files = len(broker.disk.open_files)
    used = broker.disk.used_bytes()
    one_segment(broker)
    assert len(broker.disk.open_files) == open_files
    broker.ask(Truncate("orders", broker.incarnation(), 0, broker.log().end_offset))
    broker.work()
    assert broker.disk.used_bytes() <= used - 180_000


def test_the_pace_is_held_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = 20_000
    broker = filled(60, verification__bytes_per_second=pace)
    reads: list[tuple[float, int]] = []
    pread = SimulatedFile.pread_uncached

    def recorded(file: File, size: int, position: int) -> bytes:
        data = pread(file, size, position)  # type: ignore[arg-type]
        reads.append((broker.clock.monotonic(), len(data)))
        return data

    monkeypatch.setattr(SimulatedFile, "pread_uncached", recorded)
    one_pass(broker)
    began, total = reads[0][0], 0
    for time, size in reads:
        total += size
        assert total <= pace * (time - began) + SLICE_BYTES + (1 << 16)
    assert total >= broker.log().sealed_segments[-1].end
    assert total / pace / 2 <= reads[-1][0] - began, "small segments count more, not less"


def test_no_bytes_per_second_switch_it_off_and_a_reload_switches_it_on() -> None:
    broker = filled(verification__bytes_per_second=0)
    flip(broker, 0, 100)
    broker.advance(2 * INTERVAL)
    assert status(broker)["segments"] == status(broker)["bytes"] == 0
    inner = broker.engine.broker
    inner.reload(Broker(start=False, verification__bytes_per_second="1MB").engine.broker.config)
    broker.advance(PLAN_SECONDS)
    assert status(broker)["findings"]["damaged"] == 1
    inner.reload(Broker(start=False, verification__bytes_per_second=0).engine.broker.config)
    broker.advance(2 * INTERVAL)
    assert status(broker)["segments"] == 3


@pytest.mark.usefixtures("slices")
def test_switched_off_in_the_middle_of_a_pass_it_reads_no_more() -> None:
    broker = filled(queued=True)
    one_segment(broker)
    assert status(broker)["waiting"] == 2
    broker.engine.broker.reload(Broker(start=False, verification__bytes_per_second=0).engine.broker.config)
    broker.work()  # the job that was queued already
    done = status(broker)["bytes"]
    for _ in range(10):
        broker.advance(PLAN_SECONDS)
        broker.work()
    assert (status(broker)["bytes"], status(broker)["waiting"]) == (done, 0)


@pytest.mark.usefixtures("slices")
def test_the_segments_that_wait_longest_come_first_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = filled(16, verification__bytes_per_second=1000)
    opened: list[str] = []
    open_read = broker.disk.open_read

    def recorded(path: str) -> Any:
        if path.endswith(".zxQueue") and path not in opened:
            opened.append(path)
        return open_read(path)

    monkeypatch.setattr(broker.disk, "open_read", recorded)
    one_pass(broker)
    first = list(opened)
    assert len(first) == 7 and first != sorted(first), "after a start in a random order, so that each has its turn"
    opened.clear()
    producer = broker.lease()
    for sequence in range(4):
        broker.produce(producer, sequence, [b"x" * 30_000])
    broker.advance(INTERVAL)
    one_pass(broker)
    new = sorted(set(opened) - set(first))
    assert len(new) == 2
    assert [path for path in opened if path in first] == first
    assert min(map(opened.index, new)) < opened.index(first[-1])


def test_a_stop_waits_for_no_read_but_the_one_that_runs() -> None:
    broker = filled(queued=True)
    broker.advance(PLAN_SECONDS)
    broker.step()
    (verify,) = broker.jobs
    stopped: list[bool] = []
    broker.engine.broker.stop(lambda: stopped.append(True))
    reads = broker.disk.faults.counts["read"]
    assert broker.jobs[0] is verify
    broker.step()
    assert broker.disk.faults.counts["read"] == reads
    broker.work()
    assert stopped and status_after(broker) == 0
    broker.advance(INTERVAL)
    assert not broker.jobs


def status_after(broker: Broker) -> int:
    return int(broker.engine.broker.segment_verifier.status()["segments"])


def test_a_job_without_memory_is_logged_and_the_pass_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = filled()
    pread = SimulatedFile.pread_uncached
    calls: list[int] = []

    def failing(file: Any, size: int, position: int) -> bytes:
        calls.append(size)
        if len(calls) == 1:
            raise MemoryError
        return pread(file, size, position)

    monkeypatch.setattr(SimulatedFile, "pread_uncached", failing)
    one_pass(broker)
    assert status(broker)["segments"] == 2, "the third is first in the next pass"
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == [
        "the verification of a segment failed: out of memory"
    ]
    broker.advance(PLAN_SECONDS)
    assert status(broker)["segments"] == 3


def test_without_a_free_descriptor_it_waits_and_reports_nothing() -> None:
    broker = filled()
    broker.disk.descriptors_max = len(broker.disk.open_files)
    broker.advance(PLAN_SECONDS)
    assert status(broker)["segments"] == 0 and set(status(broker)["findings"].values()) == {0}
    broker.disk.descriptors_max = None
    broker.advance(PLAN_SECONDS)
    assert status(broker)["segments"] == 3


def test_a_file_that_was_removed_by_hand_is_a_finding() -> None:
    broker = filled()
    path = broker.log().sealed_segments[0].path
    broker.disk.rename(path, f"{path}.away")
    one_pass(broker)
    (found,) = described(broker)["findings"]
    broker.disk.rename(f"{path}.away", path)
    assert (found["kind"], found["reason"]) == ("unreadable", "No such file or directory")


def test_kept_findings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.broker.verification.FINDINGS_MAX", 2)
    broker = filled(16)
    for segment in range(4):
        flip(broker, segment, 100)
    one_pass(broker)
    assert status(broker)["findings"]["damaged"] == 2 < FINDINGS_MAX
    assert len(broker.log().damage) == 4


def test_each_flipped_byte_is_found_in_the_simulation_of_programs() -> None:
    """With the production server of `tfmq_broker`, whose jobs of workers run between turns."""
    settings = {"log.segment_bytes": "64KiB", "verification.interval_seconds": 3600}
    generator = seeded("verification")
    with SimulatedBroker(settings) as broker, broker.producer() as producer, broker.admin() as admin:
        for number in range(8):
            producer.send("orders", bytes([number]) * 30_000).result()
        disk = broker.disk
        log = sealed_log(broker)
        for _ in range(scaled(12)):
            segment = generator.choice(log.sealed_segments)
            position = generator.randrange(segment.size)
            (byte,) = disk.read_file(segment.path)[position : position + 1]
            for flipped, count in ((byte ^ 1 << generator.randrange(8), 1), (byte, 0)):
                disk.damage(segment.path, position, bytes((flipped,)))
                for _ in range(6):
                    broker.clock.advance(minutes=30)
                found = admin.topic("orders").partitions[0].findings
                assert len(found) == count, f"{segment.path} {position}"
                assert all(each.first <= segment.base + position < each.next for each in found)


def sealed_log(broker: SimulatedBroker) -> Any:
    assert broker._server.engine is not None
    (partition,) = broker._server.engine.broker.topics.partitions()
    return partition.log
