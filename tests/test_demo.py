"""`make demo`: what it prints, what it takes, and that it waits for a broker that is down."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tfmq
from tools import demo
from tools.demo_broker import Broker, DemoFailed, Steps, Task

COUNT = 3_000
DOWN = 5


@pytest.mark.long
def test_every_part_keeps_its_promises_and_says_what_it_does(tmp_path: Path) -> None:
    printed = io.StringIO()
    lines = demo.text_lines()[:COUNT]
    rows = demo.run(tmp_path, Console(file=printed, width=80), lines, 60, 300, with_spark=False)
    assert [row for row in rows if row.kept is False] == []
    assert {row.text: row.number for row in rows}.items() >= {
        "found in the topic": COUNT,
        "read by the consumer meanwhile": COUNT,
        "transactions committed": 60,
        "delayed messages delivered": 300,
        "lines acknowledged as replicated": COUNT,
    }.items()
    steps = printed.getvalue().splitlines()
    assert sum("kill -9 of the" in step for step in steps) == 4
    assert all(step[:6].strip().replace(".", "").isdigit() and step[6:10] == " s  " for step in steps), steps


def test_an_argument_it_does_not_know_is_refused_and_help_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, code in (("--help", 0), ("--fast", 2), ("5", 2)):
        with pytest.raises(SystemExit) as ended:
            demo.main([argument])
        assert ended.value.code == code
    said = capsys.readouterr()
    assert said.out.startswith("usage: python -m tools.demo") and "unrecognized arguments: 5" in said.err


class Late:
    """A consumer whose first connection is made when the broker has been down for a while."""

    def __init__(self, lines: list[bytes]) -> None:
        self.calls, self.lines = 0, lines

    def poll(self, timeout: float, max_messages: int) -> list[Any]:
        self.calls += 1
        if self.calls <= DOWN:
            raise tfmq.ConnectionFailed("Nothing listens there.")
        return [type("Received", (), {"payload": line}) for line in self.lines]

    def __enter__(self) -> Late:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_the_consumer_waits_for_a_broker_that_is_down_when_it_starts() -> None:
    story, steps = demo.Story(), Steps(Console(file=io.StringIO()))
    late: Any = Late([b"a", b"b"])
    demo.follow(late, story, 2, steps.counting("lines", 2))
    assert story.followed == [b"a", b"b"] and late.calls == DOWN + 1


def test_progress_is_a_line_now_and_then_and_a_bar_only_on_a_terminal() -> None:
    times, printed, shown = [0.0], io.StringIO(), io.StringIO()
    steps = Steps(Console(file=printed, width=80), lambda: times[-1])
    bars = Steps(Console(file=shown, width=80, force_terminal=True), lambda: times[-1])
    with steps.progress, bars.progress:
        for each in (steps.counting("lines", 90), bars.counting("lines", 90)):
            for time in (1.0, 4.0, 6.0, 7.0, 12.0):
                times.append(time)
                each.add(10)
            times.append(0.0)
    assert printed.getvalue().splitlines() == ["   6.0 s  lines: 30 of 90", "  12.0 s  lines: 50 of 90"]
    assert "━" in shown.getvalue() and " s  lines:" not in shown.getvalue()


def test_the_error_of_a_thread_is_raised_where_its_end_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise DemoFailed("no broker")

    with pytest.raises(DemoFailed, match="no broker"):
        Task(fail).join()
    assert capfd.readouterr().err == ""


def test_a_broker_that_does_not_start_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    with pytest.raises(DemoFailed, match=r"did not start; .*server\.log says why"):
        Broker(tmp_path / "data", tmp_path / "server.log").start()


def test_ctrl_c_and_a_failure_leave_a_sentence_and_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[Broker] = []
    start = Broker.start

    def noted(broker: Broker) -> float:
        started.append(broker)
        return start(broker)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Broker, "start", noted)
    monkeypatch.setattr(demo, "copy_a_log", interrupted)
    monkeypatch.setattr(demo.demo_spark, "missing", lambda: "no Spark in this test")
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(demo.logging, "basicConfig", lambda **_: None)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == f"Stopped. What was written until now is in {tmp_path}.\n"
    assert started[0].process is not None and started[0].process.returncode == 0
