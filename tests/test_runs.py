"""What a run is made of: arguments that are refused, and the store that is opened."""

import asyncio
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import tfmq
import tfmq.aio
from tests.client.handling_rig import TOPIC, Bench
from tfmq.client.consumer_options import OWN_STORE
from tfmq.client.listeners import Listeners
from tfmq.client.work import inline
from tfmq.dead_letters import default_path
from tfmq.runs import begin_run
from tfmq.testing import SimulatedBroker


@pytest.mark.parametrize("face", [tfmq.Consumer, tfmq.aio.Consumer])
@pytest.mark.parametrize(
    ("options", "arguments", "sentence"),
    [
        ({}, {"workers": 0}, "workers=0"),
        ({}, {"workers": True}, "workers=True"),
        ({}, {"order": "time"}, 'it takes "partition", "key", "none"'),
        ({"commits": "before"}, {"order": "none"}, 'needs order="partition"'),
        ({"group": None, "dead_letters": "dead.db"}, {}, "needs a group"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_happens(
    face: Any, options: dict[str, Any], arguments: dict[str, Any], sentence: str
) -> None:
    consumer = face("127.0.0.1:1", topics="orders", **{"group": "g", **options})
    with pytest.raises(tfmq.BadRequest, match=sentence):
        run = consumer.run(print, **arguments)
        run.send(None)


def test_the_store_is_the_groups_own_unless_told_and_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    consumer: Any = tfmq.Consumer("127.0.0.1:1", topics="orders", group="billing")
    with caplog.at_level(logging.INFO):
        running = begin_run(
            consumer._core, Listeners(), print, workers=1, order="key", beside=inline, wall_clock=time.time
        )
    assert running.store is not None and running.store.address == str(tmp_path / "tfmq" / "billing.db")
    assert f"Dead letters of group billing are kept in {tmp_path}" in caplog.text
    assert list(tmp_path.iterdir()) == [], "it is made when it is needed"


def test_consumers_of_a_simulated_broker_leave_nothing_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they were made; their letters are shared, as those of a group are, and go with the broker."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME")

    def reject(message: Any) -> None:
        raise tfmq.Reject("no")

    async def beside(servers: str) -> None:
        consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(servers, topics=TOPIC, group="billing")

        async def again(message: Any) -> None:
            consumer.stop()
            raise tfmq.Reject("no")

        await consumer.run(again, signals=False)

    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send("a", "b")
        bench.run(reject, until=1, dead_letters=OWN_STORE)
        asyncio.run(beside(broker.servers))
        folder = Path(broker.state_folder())
        with tfmq.dead_letters.Desk(folder / "billing.db") as desk:
            assert sorted(each.message().text for each in desk.letters(whole=True)) == ["a", "b"]
    assert list(tmp_path.iterdir()) == [] and not folder.exists()


def test_no_test_writes_into_the_home_folder() -> None:
    """What a program of a test's keeps by itself lies in a folder of the run."""
    code = "from tfmq.dead_letters import default_path; print(default_path('g'))"
    here = default_path("g")
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there == here + "\n"
    assert here.startswith(tempfile.gettempdir()) and not Path(here).is_relative_to(Path.home())


def test_the_store_can_be_a_topic(tmp_path: Path) -> None:
    def reject(message: Any) -> None:
        raise tfmq.Reject("no")

    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        with broker.admin() as admin:
            admin.create_topic("dead", partitions=1)
        bench.send("a")
        bench.run(reject, until=1, dead_letters="topic:dead")
        assert [each.tag for each in broker.sent("dead")][-1] == "keep"
        assert broker.sent(TOPIC)[0].text == "a"
