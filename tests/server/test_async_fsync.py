"""Forces of the kernel come back in the reactor's thread."""

import time
from pathlib import Path
from typing import Any

import pytest

from journal.disk import RealDisk
from journal.linux_aio import AioFsyncQueue
from tfmq.server.reactor import AsyncFsync, TurnReactor

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


def test_an_end_is_reported_also_after_one_whose_consequences_failed(reactor: Any, tmp_path: Path) -> None:
    delivered: list[str] = []
    forces = AsyncFsync(reactor, lambda: delivered.append("turn"))
    if forces.begin is None:
        pytest.skip("cannot be had here: this system has no AIO")
    file = RealDisk().create(str(tmp_path / "file"))
    reported: list[OSError | None] = []

    def fails(error: OSError | None) -> None:
        raise RuntimeError("a mistake")

    for callback in (fails, reported.append):
        assert forces.begin(file, callback) is not None
    poll_until(reactor, lambda: reported)
    assert reported == [None] and delivered
    forces.stop()
    file.close()


def test_a_system_without_it_has_no_begin(reactor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AioFsyncQueue, "open", lambda: None)
    forces = AsyncFsync(reactor, lambda: None)
    assert forces.begin is None
    forces.stop()


def test_an_end_that_nothing_reported_is_found_all_the_same(reactor: Any, tmp_path: Path) -> None:
    forces = AsyncFsync(reactor, lambda: None)
    if forces.begin is None:
        pytest.skip("cannot be had here: this system has no AIO")
    reactor.removeReader(forces._wakeup)  # as if the eventfd had been read by another thread
    file = RealDisk().create(str(tmp_path / "file"))
    reported: list[OSError | None] = []
    assert forces.begin(file, reported.append) is not None
    end = time.monotonic() + PATIENCE_SECONDS
    while not reported and time.monotonic() < end:
        reactor.runUntilCurrent()
        time.sleep(0.01)
    assert reported == [None]
    reactor.addReader(forces._wakeup)
    forces.stop()
    file.close()
