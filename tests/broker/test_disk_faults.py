"""Faults of the disk in unexpected places."""

import errno
from pathlib import Path
from typing import Any

import pytest

from journal.disk import RealDisk
from journal.errors import Stopped
from journal.filenames import parse_segment_name, segment_name
from tests.broker.helpers import DATA, Broker
from tests.journal.logs import Bench
from tests.server.test_session import Client
from tfmq.protocol import commands


def test_a_failed_write_that_cannot_be_cut_off_for_lack_of_space_stops_the_log() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    bench.disk.faults.short_write(100, path=".zxQueue")
    bench.disk.faults.fail("write", nth=2, error=errno.ENOSPC, path=".zxQueue")
    bench.disk.faults.fail("truncate", error=errno.ENOSPC, path=".zxQueue")
    with pytest.raises(Stopped):
        bench.send(1)
    assert log.stopped is not None


def test_a_file_name_beyond_every_offset_is_no_segment() -> None:
    assert parse_segment_name(segment_name((1 << 64) - 1)) == (1 << 64) - 1
    assert parse_segment_name(segment_name(1 << 64)) is None
    broker = Broker()
    broker.create()
    broker.stop()
    broker.disk.create(f"{DATA}/orders-0/{segment_name(10**32 - 1)}")
    broker = Broker(broker.disk, broker.clock)
    assert broker.produce(broker.lease(), 0).code == "ok"


def test_a_status_without_the_data_folder_has_everything_but_the_free_space(tmp_path: Path) -> None:
    broker, deleted = Broker(), str(tmp_path / "deleted")
    found = broker.ask(commands.Status()).status
    assert found["free_bytes"] > 0
    broker.disk.free_space = lambda path: RealDisk().free_space(deleted)  # type: ignore[method-assign]
    assert broker.ask(commands.Status()).status == {**found, "free_bytes": None}


def test_a_status_that_cannot_be_reported_is_an_error_and_the_session_goes_on() -> None:
    client = Client()

    def unknown() -> dict[str, Any]:
        raise OSError(errno.EIO, "the disk is gone")

    client.engine.status = unknown  # type: ignore[method-assign]
    client.say(commands.Status())
    (reply,) = client.replies()
    assert reply[2] == "internal_error"
    client.say(commands.Ping(), 2)
    assert len(client.engine.requests) == 1


def test_a_stop_does_not_wait_for_the_rest_of_a_round_of_retention() -> None:
    broker = Broker(queued=True, retention__seconds=1)
    broker.create(partitions=20)
    broker.advance(2)
    broker.work()  # the catalog's mark
    broker.clock.advance(61)
    broker.engine.broker.timers.tick(broker.clock.monotonic())
    assert len(broker.jobs) == 1
    stopped: list[bool] = []
    broker.engine.broker.stop(lambda: stopped.append(True))
    broker.step()
    assert len(broker.jobs) == 1, "the closing of the logs, and no more retention"
    broker.step()
    assert stopped == [True]
