"""A broker as a child process: started, used, stopped, and ended with the process that started it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tfmq
from tfmq.errors import BadRequest, ConnectionFailed

SECONDS = 20.0


def alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(process_id: int) -> bool:
    until = time.monotonic() + SECONDS
    while alive(process_id) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(process_id)


@pytest.mark.long
def test_it_serves_and_stops_and_keeps_its_data(tmp_path: Path) -> None:
    for round_ in range(2):
        with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
            assert producer.send("orders", b"x").result(SECONDS).message_id
            with tfmq.Admin(servers) as admin:
                assert admin.topic("orders").messages == round_ + 1


def test_settings_reach_it(tmp_path: Path) -> None:
    with tfmq.local_server(tmp_path, settings={"topics.partitions": 3}) as servers, tfmq.Admin(servers) as admin:
        assert len(admin.create_topic("orders").partitions) == 3


def test_one_that_cannot_start_reports_why(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match=r"no\.such"), tfmq.local_server(tmp_path, settings={"no.such": 1}):
        pytest.fail("it started")


def test_a_folder_in_use_is_reported(tmp_path: Path) -> None:
    with (
        tfmq.local_server(tmp_path),
        pytest.raises(ConnectionFailed, match="ended with code"),
        tfmq.local_server(tmp_path),
    ):
        pytest.fail("it started")


def test_it_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    context = tfmq.local_server(tmp_path)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(context.__enter__()))
    thread.start()
    thread.join(SECONDS)
    try:
        with tfmq.Admin(found[0]) as admin:
            assert admin.ping() > 0
    finally:
        context.__exit__(None, None, None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="cannot be had here: prctl is Linux's")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time, tfmq\n"
        "with tfmq.local_server(sys.argv[1]) as servers, tfmq.Admin(servers) as admin:\n"
        "    print(servers, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline()
    children = Path(f"/proc/{parent.pid}/task").glob("*/children")
    (server,) = [int(number) for each in children for number in each.read_text().split()]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(SECONDS)
    parent.stdout.close()
    assert gone(server)


def test_data_are_in_a_folder() -> None:
    with pytest.raises(BadRequest, match="5 is no path"), tfmq.local_server(5):  # type: ignore[arg-type]
        pass
