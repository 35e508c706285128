"""`tfmq run`: which consumer it means, and a worker over a live broker."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import tfmq
from tests.cli.conftest import Cli
from tfmq.cli.main import WRONG_USAGE
from tfmq.cli.run import consumer_of
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


def test_what_a_module_raises_keeps_its_traceback(folder: Path) -> None:
    write(folder, "raising_one", "import no_such_thing_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        consumer_of("raising_one:consumer")


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
