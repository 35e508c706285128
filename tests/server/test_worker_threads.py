"""Work goes to threads and comes back in the reactor's thread."""

import threading
import time
from typing import Any

import pytest

from tfmq.server.reactor import TurnReactor, WorkerThreads

PATIENCE_SECONDS = 20


@pytest.fixture
def reactor() -> Any:
    made = TurnReactor()
    yield made
    made._poller.close()


def poll_until(reactor: Any, condition: Any) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it took too long"
        reactor.doPoll(0.1)


def test_results_and_errors_come_back_in_the_reactors_thread(reactor: Any) -> None:
    workers = WorkerThreads(reactor)
    here = threading.get_ident()
    back: list[Any] = []

    def done(result: Any, error: BaseException | None) -> None:
        back.append((result, type(error), threading.get_ident() == here))

    workers.run(lambda: threading.get_ident() != here, done)
    poll_until(reactor, lambda: len(back) == 1)
    workers.run(lambda: 1 // 0, done)
    poll_until(reactor, lambda: len(back) == 2)
    assert back == [(True, type(None), True), (None, ZeroDivisionError, True)]
    workers.stop()


def test_work_that_blocks_does_not_hold_up_other_work(reactor: Any) -> None:
    workers = WorkerThreads(reactor, threads_max=2)
    gate = threading.Event()
    back: list[str] = []
    workers.run(lambda: gate.wait(PATIENCE_SECONDS), lambda *_: back.append("slow"))
    for _ in range(5):
        workers.run(lambda: None, lambda *_: back.append("quick"))
    poll_until(reactor, lambda: len(back) == 5)
    gate.set()
    poll_until(reactor, lambda: len(back) == 6)
    assert back == ["quick"] * 5 + ["slow"]
    assert len(workers._threads) == 2
    workers.stop()


@pytest.mark.parametrize("threads", [0, 1])
def test_work_is_done_also_where_no_more_threads_can_be_started(
    reactor: Any, threads: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = WorkerThreads(reactor)
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(workers._threads) >= threads:
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    back: list[Any] = []
    for number in range(4):
        workers.run(lambda number=number: number, lambda result, _: back.append(result))
    assert back == [], "what follows is called in a turn of its own"
    poll_until(reactor, lambda: len(back) == 4)
    assert back == [0, 1, 2, 3]
    assert [each.getMessage() for each in caplog.records] == [
        f"out of memory or threads (can't start new thread): {threads} threads do all work on files"
    ]
    workers.stop()


def test_stopping_finishes_what_was_handed_in(reactor: Any) -> None:
    workers = WorkerThreads(reactor, threads_max=1)
    back: list[int] = []
    for number in range(10):
        workers.run(lambda number=number: number, lambda result, _: back.append(result))
    workers.stop()
    assert back == list(range(10))
    assert not any(thread.is_alive() for thread in workers._threads)


def test_a_failing_callback_does_not_swallow_the_next(reactor: Any, caplog: pytest.LogCaptureFixture) -> None:
    workers = WorkerThreads(reactor, threads_max=1)
    back: list[int] = []
    workers.run(lambda: None, lambda *_: 1 // 0)
    workers.run(lambda: None, lambda *_: back.append(1))
    workers.stop()
    assert back == [1]
    assert "a callback after a worker's job failed" in caplog.text
