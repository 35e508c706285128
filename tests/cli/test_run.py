"""`tfmq run`: which consumer it means, and a worker over a live broker."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tfmq
from tests.cli.conftest import Cli
from tfmq.cli.main import NOT_REACHED, WRONG_USAGE
from tfmq.cli.worker import consumer_of, log_process_id, run_worker
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
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
        (
            "needs",
            "cannot be called without arguments, as `tfmq run` calls a function that makes a consumer: missing",
        ),
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
    ("target", "module"),
    [("side.py", "side"), ("./side.py", "side"), ("sub/side.py", "sub.side"), ("./side", "side")],
)
def test_a_file_is_no_module_and_is_not_imported(
    offline: Cli, folder: Path, target: str, module: str
) -> None:
    write(folder, "side", "open('imported', 'w')")
    ran = offline("run", f"{target}:consumer")
    assert ran.code == WRONG_USAGE and f"write {module}:consumer." in ran.err
    assert not (folder / "imported").exists()


@pytest.mark.long
def test_several_processes_say_once_what_they_cannot_begin_with(tmp_path: Path) -> None:
    write(tmp_path, "broken", "raise LookupError('no table')\n")
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    for target, sentence in (
        ("broken:consumer", "broken.py:1: LookupError"),
        ("none_there:consumer", "tfmq run"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", main, "run", target, "--processes", "3"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
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
        timeout=SECONDS,
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
def test_a_worker_handles_what_is_there(
    broker: LiveServer, tmp_path: Path, kind: str, processes: int
) -> None:
    topic = f"run-{kind.strip() or 'plain'}-{processes}"
    text = WORKER.format(topic=topic, kind=kind)
    write(tmp_path, "billing", text.replace("tfmq.Consumer", "tfmq.aio.Consumer") if kind else text)
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    with tfmq.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=1)
    with tfmq.Producer(broker.address) as producer:
        producer.send_many(topic, ["0", "1", "2"]).result()
    command = ["run", "billing:consumer", "--servers", broker.address, "--processes", str(processes)]
    process = subprocess.Popen(
        [sys.executable, "-c", main, *command], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
    if processes > 1:
        process.terminate()
    assert process.wait(SECONDS) == 0


@pytest.mark.long
def test_the_processes_of_one_that_was_killed_end_by_themselves(broker: LiveServer, tmp_path: Path) -> None:
    topic = "run-orphans"
    text = WORKER.format(topic=topic, kind="") + "import os; open('pids', 'a').write(f'{os.getpid()}\\n')\n"
    write(tmp_path, "billing", text)
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    command = ["run", "billing:consumer", "--servers", broker.address, "--processes", "2", "-q"]
    process = subprocess.Popen([sys.executable, "-c", main, *command], cwd=tmp_path)
    pids = tmp_path / "pids"
    until = time.monotonic() + SECONDS
    while (not pids.exists() or len(pids.read_text().split()) < 2) and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.05)
