"""Runs of a pipeline that SIGKILL ends at a call of their choice: processes of their own, forked from one that has
loaded everything, so that a kill costs little.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from tests.spark.pipelines.messages import archived, run_inline
from tfmq.admin import Admin
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.replay import ReplayFilter, ReplayOptions, ReplayRun
from tfmq.spark.pipelines.spark_jobs import Progress

LOADED_LATE = ("tfmq.spark.wire_reader", "tfmq.spark.file_reader")
NEVER = 0


class Ended(NamedTuple):
    """How a run ended: its exit code, -9 where it was killed; and how many calls it made."""

    code: int
    calls: int


@contextmanager
def runs_of(name: str, *arguments: Any) -> Iterator[Callable[[int], Ended]]:
    """A function that runs `archive` or `replay` below with these arguments, to its so manieth call, or to its end."""
    command = [sys.executable, "-m", "tests.spark.pipelines.killing", name, json.dumps(arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(calls: int = NEVER) -> Ended:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{calls}\n")
            process.stdin.flush()
            return Ended(*json.loads(process.stdout.readline()))

        yield run


def archive(servers: str, folder: str, topic: str, piece_bytes: int, step_bytes: int) -> None:
    address = SourceAddress(servers, None, 10.0)
    archived(Path(folder), topic, address, piece_bytes=piece_bytes, step_bytes=step_bytes)


def replay(servers: str, folder: str, topic: str, to: str) -> None:
    wish = ReplayOptions(Path(folder), ReplayFilter(topic), servers, to, 10.0)
    with Admin(servers) as admin:
        ReplayRun(wish, admin, run_inline).replay_new(lambda total: nullcontext(Progress(topic, total)))


def child(work: Callable[..., None], arguments: Any, kill_at: int, tell: int) -> None:
    """Never returns."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1
            if calls == kill_at:
                os.write(tell, str(calls).encode())
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.setprofile(count)
        work(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.setprofile(None)
    os.write(tell, str(calls).encode())
    os._exit(code)


def main(name: str, arguments: Any) -> None:
    for module in LOADED_LATE:
        importlib.import_module(module)
    work = {"archive": archive, "replay": replay}[name]
    for line in sys.stdin:
        reported, tell = os.pipe()
        process = os.fork()
        if not process:
            child(work, arguments, int(line), tell)
        os.close(tell)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with os.fdopen(reported) as reader:
            print(json.dumps([status, int(reader.read())]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
