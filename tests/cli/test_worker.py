"""Processes that are started, started again, begun anew and ended, with small programs in the place of workers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tfmq
from tests.cli.conftest import Cli
from tfmq.cli import worker
from tfmq.cli.main import NOT_REACHED, WRONG_USAGE
from tfmq.cli.worker import (
    NOT_STARTED,
    SourceWatcher,
    Supervisor,
    consumer_of,
    log_process_id,
    run_worker,
    worker_command,
)
from tools.rigs.live_server import LiveServer

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
    assert Supervisor(program(text), 1, report=said.append).run() == 0
    assert lines(tmp_path / "log") == ["x", "x", "x"]
    assert len(said) == 2 and "ended with 3" in said[0]


def test_one_that_cannot_begin_ends_them_all(tmp_path: Path) -> None:
    assert Supervisor(program("import sys; sys.exit(2)"), 2, report=lambda text: None).run() == 2


@pytest.mark.parametrize("code", [1, 3])
def test_what_never_began_ends_them_all_with_its_code(code: int) -> None:
    said: list[str] = []
    text = f"import sys; sys.exit({NOT_STARTED + code})"
    assert Supervisor(program(text), 2, report=said.append).run() == code
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
    assert Supervisor(program(text), 1, report=said.append).run() == 0
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
    assert Supervisor(program(text), 2, report=lambda text: None).run() == 0
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
    Supervisor(program(text), 1, report=said.append, folder=tmp_path).run()
    assert lines(log) == ["up", "up"]
    assert said == ["A source file changed: restarting."]


# `tfmq run`: which consumer it means, and a worker over a live broker.

SECONDS_RUN = 60.0
WORKER = """
import tfmq

consumer = tfmq.Consumer(topics="{topic}", group="{topic}", dead_letters=None)

@consumer.on("{topic}")
{kind}def handle(message):
    print(message.text, flush=True)
    if message.text == "2":
        consumer.stop()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def write(folder: Path, module: str, text: str) -> None:
    (folder / f"{module}.py").write_text(text)


def test_a_consumer_or_what_makes_one_is_found_in_a_module_of_this_folder(folder: Path) -> None:
    write(folder, "found_one", WORKER.format(topic="orders", kind="") + "\ndef make(): return consumer\n")
    assert consumer_of("found_one:consumer") is consumer_of("found_one:make")
    assert isinstance(consumer_of("found_one:consumer"), tfmq.Consumer)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("wrong_one", "MODULE:CONSUMER"),
        ("no_such_module:consumer", "there is no module 'no_such_module'"),
        ("wrong_one:consumr", "Did you mean 'consumer'"),
        ("wrong_one:tfmq", "is a module, not a tfmq.Consumer"),
    ],
)
def test_what_is_no_consumer_is_wrong_usage(offline: Cli, folder: Path, target: str, sentence: str) -> None:
    write(folder, "wrong_one", WORKER.format(topic="orders", kind=""))
    ran = offline("run", target)
    assert ran.code == WRONG_USAGE and sentence.lower() in ran.err.lower()


BROKEN = {
    "syntax": ("x = (\n", "broken_syntax.py:1: SyntaxError"),
    "import": ("import os\nimport no_such_thing_at_all\n", "broken_import.py:2: ModuleNotFoundError"),
    "name": ("from os import no_such_name\n", "broken_name.py:1: ImportError"),
    "raise": ("\nraise LookupError('no table')\n", "broken_raise.py:2: LookupError: no table"),
    "exit": ("import sys\nsys.exit(4)\n", "broken_exit.py:2: SystemExit: 4"),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_what_a_module_raises_is_one_sentence_with_its_place(offline: Cli, folder: Path, kind: str) -> None:
    text, sentence = BROKEN[kind]
    write(folder, f"broken_{kind}", text)
    ran = offline("run", f"broken_{kind}:consumer")
    assert ran.code == WRONG_USAGE and len(ran.err.splitlines()) == 1
    assert ran.err.startswith(f"tfmq: broken_{kind} cannot be imported: ") and sentence in ran.err


def test_of_what_goes_through_several_places_only_the_users_are_shown(offline: Cli, folder: Path) -> None:
    write(folder, "broken_deep", "def table():\n    raise LookupError('no table')\n\n\ntable()\n")
    ran = offline("run", "broken_deep:consumer")
    assert ran.code == WRONG_USAGE
    assert "broken_deep.py:2: LookupError: no table" in ran.err
    places = [line for line in ran.err.splitlines() if line.startswith("  File")]
    assert len(places) == 2 and all("broken_deep.py" in each for each in places)


FACTORIES = """
import tfmq.twisted
def boom(): raise LookupError("no table")
def needs(name): ...
async def later(): ...
twisted = tfmq.twisted.Consumer(topics="orders")
number = 5
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("boom", "factories.py:3: LookupError: no table"),
        ("needs", "cannot be called without arguments, as `tfmq run` calls a function that makes a consumer: missing"),
        ("later", "is a coroutine function; what makes a consumer is a plain one"),
        ("twisted", "is a tfmq.twisted.Consumer, which your own program runs in its reactor"),
        ("number", "is an int, not a tfmq.Consumer"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_makes_no_consumer_is_said_so(offline: Cli, folder: Path, name: str, sentence: str) -> None:
    write(folder, "factories", FACTORIES)
    ran = offline("run", f"factories:{name}")
    assert ran.code == WRONG_USAGE and sentence in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("target", "module"), [("side.py", "side"), ("./side.py", "side"), ("sub/side.py", "sub.side"), ("./side", "side")]
)
def test_a_file_is_no_module_and_is_not_imported(offline: Cli, folder: Path, target: str, module: str) -> None:
    write(folder, "side", "open('imported', 'w')")
    ran = offline("run", f"{target}:consumer")
    assert ran.code == WRONG_USAGE and f"write {module}:consumer." in ran.err
    assert not (folder / "imported").exists()


@pytest.mark.long
def test_several_processes_say_once_what_they_cannot_begin_with(tmp_path: Path) -> None:
    write(tmp_path, "broken", "raise LookupError('no table')\n")
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    for target, sentence in (("broken:consumer", "broken.py:1: LookupError"), ("none_there:consumer", "tfmq run")):
        ran = subprocess.run(
            [sys.executable, "-c", main, "run", target, "--processes", "3"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_RUN,
        )
        assert ran.returncode == WRONG_USAGE and ran.stderr.count(sentence) >= 1
        assert ran.stderr.count("cannot be imported") + ran.stderr.count("there is no module") == 1
        assert "-c" not in ran.stderr


@pytest.mark.long
@pytest.mark.parametrize("kind", ["", "async "])
def test_without_a_broker_none_of_several_processes_begins_and_all_end(tmp_path: Path, kind: str) -> None:
    text = WORKER.format(topic="orders", kind=kind)
    write(tmp_path, "billing", text.replace("tfmq.Consumer", "tfmq.aio.Consumer") if kind else text)
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    command = ["run", "billing:consumer", "--servers", "127.0.0.1:1", "--processes", "2"]
    ran = subprocess.run(
        [sys.executable, "-c", main, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_RUN,
    )
    assert ran.returncode == NOT_REACHED and "Nothing listens at 127.0.0.1:1" in ran.stderr
    assert "it is restarted" not in ran.stderr


def test_what_one_of_several_processes_logs_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("tfmq")
    before = list(logger.handlers)
    logger.handlers[:] = [logging.StreamHandler()]
    try:
        log_process_id()
        logger.warning("Dead letters are kept.")
    finally:
        logger.handlers[:] = before
    assert f"tfmq[{os.getpid()}]: Dead letters are kept." in capfd.readouterr().err


@pytest.mark.parametrize("face", ["tfmq", "tfmq.aio"])
def test_no_tracebacks_is_an_option_of_the_run(
    offline: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, face: str
) -> None:
    module = face.replace(".", "_") + "_worker"
    write(folder, module, f"import {face}\nconsumer = {face}.Consumer(topics='orders', group='g')\n")
    given: list[bool] = []

    def run(*, tracebacks: bool, **options: object) -> object:
        given.append(tracebacks)
        return asyncio.sleep(0) if face == "tfmq.aio" else None

    consumer = consumer_of(f"{module}:consumer")
    monkeypatch.setattr(consumer, "run", run)
    for option in ([], ["--no-tracebacks"]):
        assert offline("run", f"{module}:consumer", *option).code == 0
    assert given == [True, False]


def test_one_of_several_processes_collects_what_was_imported_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the time between SIGTERM and the end of four idle processes were the collections at their exit."""
    write(folder, "frozen_worker", "import tfmq\nconsumer = tfmq.Consumer(topics='orders', group='g')\n")
    done: list[str] = []
    consumer = consumer_of("frozen_worker:consumer")
    monkeypatch.setattr(consumer, "run", lambda **options: done.append("run"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    for watched in (False, True):
        assert run_worker("frozen_worker:consumer", 1, "partition", True, quiet=True, watched=watched) == 0
    assert done == ["run", "freeze", "run"]


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_worker_handles_what_is_there(broker: LiveServer, tmp_path: Path, kind: str, processes: int) -> None:
    topic = f"run-{kind.strip() or 'plain'}-{processes}"
    text = WORKER.format(topic=topic, kind=kind)
    write(tmp_path, "billing", text.replace("tfmq.Consumer", "tfmq.aio.Consumer") if kind else text)
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    with tfmq.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=1)
    with tfmq.Producer(broker.address) as producer:
        producer.send_many(topic, ["0", "1", "2"]).result()
    command = ["run", "billing:consumer", "--servers", broker.address, "--processes", str(processes)]
    process = subprocess.Popen([sys.executable, "-c", main, *command], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
    if processes > 1:
        process.terminate()
    assert process.wait(SECONDS_RUN) == 0


@pytest.mark.parametrize("face", ["tfmq", "tfmq.aio"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_handler_that_fails_finally_ends_the_run_with_a_sentence(
    cli: Cli, folder: Path, broker: LiveServer, monkeypatch: pytest.MonkeyPatch, face: str, workers: str
) -> None:
    name = f"failing_{len(face)}_{workers}"
    text = WORKER.format(topic=name, kind="async " if face == "tfmq.aio" else "")
    write(folder, name, text.replace("tfmq", face).replace("dead_letters=None", "dead_letters=None, retries=0") + FAILS)
    cli("send", name, "0")
    ran = cli("run", f"{name}:consumer", "-q", "--workers", workers)
    assert (ran.code, ran.out) == (1, b"0\n")
    assert ran.err == (
        f"tfmq: a handler failed finally, in {name}.py:11: KeyError: 'toaster'."
        " The run ended before its message, because dead_letters= names no store.\n"
    )


FAILS = "    {}['toaster']\n"


@pytest.mark.long
def test_the_processes_of_one_that_was_killed_end_by_themselves(broker: LiveServer, tmp_path: Path) -> None:
    topic = "run-orphans"
    text = WORKER.format(topic=topic, kind="") + "import os; open('pids', 'a').write(f'{os.getpid()}\\n')\n"
    write(tmp_path, "billing", text)
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    command = ["run", "billing:consumer", "--servers", broker.address, "--processes", "2", "-q"]
    process = subprocess.Popen([sys.executable, "-c", main, *command], cwd=tmp_path)
    pids = tmp_path / "pids"
    until = time.monotonic() + SECONDS_RUN
    while (not pids.exists() or len(pids.read_text().split()) < 2) and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.05)


# Which change of which file begins anew.


def test_files_of_python_that_come_go_or_change_are_seen(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    file = tmp_path / "app" / "billing.py"
    file.write_text("1")
    sources = SourceWatcher(tmp_path)
    assert not sources.has_changed()
    os.utime(file, ns=(1, 1))
    assert sources.has_changed() and not sources.has_changed()
    (tmp_path / "more.py").touch()
    assert sources.has_changed()
    file.unlink()
    assert sources.has_changed()


def test_other_files_hidden_folders_and_environments_are_left_out(tmp_path: Path) -> None:
    for folder in (".git", "env", "__pycache__"):
        (tmp_path / folder).mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    sources = SourceWatcher(tmp_path)
    for folder in (".git", "env", "__pycache__"):
        (tmp_path / folder / "x.py").touch()
    (tmp_path / "notes.txt").touch()
    assert not sources.has_changed()
