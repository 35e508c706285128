"""What a progress line says, and when one is shown."""

from __future__ import annotations

import pytest

from tfmq.cli.output import Output
from tfmq.spark.pipelines.spark_jobs import Progress, show_progress

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_has_rows_bytes_rate_and_rest() -> None:
    clock = Clock()
    progress = Progress("archiving", 100 * MIB, clock=clock)
    clock.now += 10
    progress.add(1_000_000, 25 * MIB)
    assert progress.line() == (
        "archiving: 1,000,000 messages, 25.0 MiB of 100.0 MiB, 2.5 MiB/s, about 30 s left"
    )
    progress.add(0, 75 * MIB)
    assert progress.line().endswith("10.0 MiB/s, finishing")


def test_what_came_before_the_work_does_not_count() -> None:
    clock = Clock()
    progress = Progress("archiving", 100 * MIB, clock=clock)
    clock.now += 1000
    progress.restart()
    clock.now += 10
    progress.add(1, 50 * MIB)
    assert progress.line().endswith("5.0 MiB/s, about 10 s left")


def test_without_a_total_no_rest_is_made_up() -> None:
    clock = Clock()
    progress = Progress("reading", None, clock=clock)
    clock.now += 1
    progress.add(5, 2048)
    assert progress.line() == "reading: 5 messages, 2.0 KiB, 2.0 KiB/s"


def test_lines_come_no_more_often_than_asked() -> None:
    clock, lines = Clock(), []
    progress = Progress("archiving", None, lines.append, 10.0, clock)
    for _ in range(25):
        clock.now += 1
        progress.add(1, 1)
    assert len(lines) == 2


def test_a_line_that_says_nothing_new_does_not_come() -> None:
    clock, lines = Clock(), []
    progress = Progress("reading", 100, lines.append, 10.0, clock)
    for size in (0, 0, 0, 100):
        clock.now += 11
        progress.add(0, size)
    assert [line.split(", ")[1] for line in lines] == ["0 B of 100 B", "100 B of 100 B"]


def test_where_nobody_looks_nothing_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmq.spark.pipelines.spark_jobs.LINE_SECONDS", 0.0)
    for output, said in (
        (Output(None, True, False), False),
        (Output(None, False, True), False),
        (Output(None, False, False), True),
    ):
        with show_progress(output, "archiving", None) as progress:
            progress.add(3, 3)
        assert ("archiving: 3 messages" in capsys.readouterr().err) is said
