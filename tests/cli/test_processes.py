"""Processes that are started, started again, begun anew and ended, with small programs in the place of workers."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tfmq.cli import worker
from tfmq.cli.worker import NOT_STARTED, Supervisor, worker_command

SECONDS = 30.0


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def when(condition: Callable[[], bool], do: Callable[[], None]) -> threading.Thread:
    """In a thread: wait for it, then do it."""

    def wait() -> None:
        until = time.monotonic() + SECONDS
        while not condition() and time.monotonic() < until:
            time.sleep(0.02)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_a_process_is_a_run_of_the_same_target() -> None:
    command = worker_command("billing:consumer", 4, "key", tracebacks=False, quiet=True)
    assert command[0] == sys.executable
    assert command[3:] == [
        "run",
        "--workers",
        "4",
        "--order",
        "key",
        "--watched",
        "--no-tracebacks",
        "--quiet",
        "--",
        "billing:consumer",
    ]


def test_one_that_dies_is_started_again_and_one_that_ends_well_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PAUSE_SECONDS", 0.05)
    said: list[str] = []
    text = (
        "import os\n"
        f"log = open({str(tmp_path / 'log')!r}, 'a')\n"
        "before = os.path.getsize(log.name)\n"
        "log.write('x\\n')\n"
        "log.close()\n"
        "os._exit(3 if before < 4 else 0)\n"
    )
    assert Supervisor(program(text), 1, say=said.append).run() == 0
    assert lines(tmp_path / "log") == ["x", "x", "x"]
    assert len(said) == 2 and "ended with 3" in said[0]


def test_one_that_cannot_begin_ends_them_all(tmp_path: Path) -> None:
    assert Supervisor(program("import sys; sys.exit(2)"), 2, say=lambda text: None).run() == 2


@pytest.mark.parametrize("code", [1, 3])
def test_what_never_began_ends_them_all_with_its_code(code: int) -> None:
    said: list[str] = []
    text = f"import sys; sys.exit({NOT_STARTED + code})"
    assert Supervisor(program(text), 2, say=said.append).run() == code
    assert not said


def test_what_cannot_begin_where_another_one_did_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is away when a worker died: that passes."""
    monkeypatch.setattr(worker, "PAUSE_SECONDS", 0.05)
    text = (
        "import os\n"
        f"log = open({str(tmp_path / 'log')!r}, 'a')\n"
        "before = os.path.getsize(log.name)\n"
        "log.write('x\\n')\n"
        "log.close()\n"
        f"os._exit([1, {NOT_STARTED + 3}, 0][before // 2])\n"
    )
    said: list[str] = []
    assert Supervisor(program(text), 1, say=said.append).run() == 0
    assert ["ended with 1" in said[0], "ended with 3" in said[1]] == [True, True]


def test_a_signal_reaches_each_once_and_the_code_is_theirs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = (
        "import signal, sys, time\n"
        f"log = open({str(log)!r}, 'a', buffering=1)\n"
        "def came(number, frame): log.write(f'{number}\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, came)\n"
        "log.write('up\\n')\n"
        "time.sleep(60)\n"
    )
    when(lambda: lines(log).count("up") == 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert Supervisor(program(text), 2, say=lambda text: None).run() == 0
    assert lines(log).count(str(int(signal.SIGTERM))) == 2


def test_a_change_begins_anew(tmp_path: Path) -> None:
    log, source = tmp_path / "log", tmp_path / "billing.py"
    source.write_text("1")
    text = f"import time; f = open({str(log)!r}, 'a'); f.write('up\\n'); f.close(); time.sleep(60)"

    def change() -> None:
        source.write_text("2")
        when(lambda: len(lines(log)) == 2, lambda: os.kill(os.getpid(), signal.SIGINT))

    when(lambda: len(lines(log)) == 1, change)
    said: list[str] = []
    Supervisor(program(text), 1, say=said.append, folder=tmp_path).run()
    assert lines(log) == ["up", "up"]
    assert said == ["A source file changed: restarting."]
