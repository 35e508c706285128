"""What a run is made of: arguments that are refused, and the store that is opened."""

import asyncio
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import tfmq
import tfmq.aio
import tfmq.twisted
from tests import reactor as rig
from tests.client.handling_rig import TOPIC, Bench
from tests.dead_letters.helpers import finished
from tfmq.client.consumer.options import DEFAULT_STORE
from tfmq.client.operation import run_inline
from tfmq.dead_letters import default_path
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.protocol.commands import HelloReply
from tfmq.testing.broker import SimulatedBroker


@pytest.mark.parametrize("face", [tfmq.Consumer, tfmq.aio.Consumer])
@pytest.mark.parametrize(
    ("options", "arguments", "sentence"),
    [
        ({}, {"workers": 0}, "workers=0"),
        ({}, {"workers": True}, "workers=True"),
        ({}, {"order": "time"}, 'it takes "partition", "key", "none"'),
        ({"commits": "before"}, {"order": "none"}, 'needs order="partition"'),
    ],
)
def test_wrong_arguments_are_refused_before_anything_happens(
    face: Any, options: dict[str, Any], arguments: dict[str, Any], sentence: str
) -> None:
    consumer = face("127.0.0.1:1", topics="orders", **{"group": "g", **options})
    with pytest.raises(tfmq.BadRequest, match=sentence):
        run = consumer.run(print, **arguments)
        run.send(None)


def generator(message: Any) -> Any:
    yield message


async def async_generator(message: Any) -> Any:
    yield message


def nothing() -> None: ...


@pytest.mark.parametrize("face", [tfmq.Consumer, tfmq.aio.Consumer, tfmq.twisted.Consumer])
@pytest.mark.parametrize("listener", [generator, async_generator, nothing])
def test_a_listener_that_would_do_nothing_is_refused_by_on_and_by_run(face: Any, listener: Any) -> None:
    consumer = face("127.0.0.1:1", topics="orders", group="g", dead_letters=None)
    with pytest.raises(tfmq.BadRequest, match="The listener"):
        consumer.on("orders")(listener)
    with pytest.raises(tfmq.BadRequest, match="The listener"):
        ended(consumer.run(listener))


@pytest.mark.parametrize("face", [tfmq.Consumer, tfmq.aio.Consumer, tfmq.twisted.Consumer])
def test_a_listener_for_a_topic_that_is_not_read_is_refused(face: Any) -> None:
    consumer = face("127.0.0.1:1", topics="orders", group="g", dead_letters=None)
    consumer.on("other")(print)
    with pytest.raises(tfmq.BadRequest, match="which this consumer does not read"):
        ended(consumer.run(print))


def ended(run: Any) -> None:
    """What a call of run() gave, to its first step. Raises what that raises."""
    if hasattr(run, "addErrback"):
        failures: list[Any] = []
        run.addErrback(failures.append)
        failures[0].raiseException()
    run.send(None)


@pytest.mark.parametrize("sent", [[], ["a", "b"]])
@pytest.mark.parametrize("where", ["no-database", "no-database/dead.db", "."])
@pytest.mark.parametrize("face", ["blocking", "asyncio", "twisted"])
def test_a_store_that_can_keep_nothing_ends_the_run_before_any_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, face: str, where: str, sent: list[str]
) -> None:
    (tmp_path / "no-database").write_bytes(b"not one " * 1000)
    handled: list[Any] = []
    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send(*sent)
        reported: dict[str, Any] = {"topics": TOPIC, "group": "g", "dead_letters": str(tmp_path / where)}

        async def awaiting() -> None:
            await tfmq.aio.Consumer(broker.servers, **reported).run(handled.append, signals=False)

        async def story(reactor: Any) -> None:
            await tfmq.twisted.Consumer(broker.servers, reactor=reactor, **reported).run(handled.append, signals=False)

        with pytest.raises(tfmq.StoreFailed, match="No dead letters can be stored at"):
            if face == "blocking":
                tfmq.Consumer(broker.servers, **reported).run(handled.append, signals=False)
            elif face == "asyncio":
                asyncio.run(awaiting())
            else:
                rig.play(story)
    assert handled == []
    assert "waits" not in caplog.text and "wait:" not in caplog.text


def test_while_a_store_does_not_answer_it_is_not_said_that_a_message_was_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apply, refused = BlockingSqlStore.apply, iter([True])

    def failing(self: BlockingSqlStore, steps: Any) -> Any:
        if next(refused, False):
            raise tfmq.StoreFailed("the disk is full")
        return apply(self, steps)

    monkeypatch.setattr(BlockingSqlStore, "apply", failing)
    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send("a")
        bench.run(until=1)
    assert bench.handled == ["a"]
    assert "A message waits to be handled, and its store is tried again" in caplog.text
    assert "A handled message waits" not in caplog.text


def test_the_store_is_the_groups_own_unless_configured_and_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    consumer: Any = tfmq.Consumer("127.0.0.1:1", topics="orders", group="billing")
    with caplog.at_level(logging.INFO):
        consumer._executor = run_inline
        running = consumer._create_run(print, 1, "key", True)
    assert running.store is not None and running.store.address == str(tmp_path / "tfmq" / "NODE" / "billing.db")
    assert "are kept in" not in caplog.text and list(tmp_path.iterdir()) == [], "the broker's id is not known"
    consumer._core.link.hello = HelloReply(1, "tfmq", "0b1c", {}, 2, [])
    with caplog.at_level(logging.INFO):
        assert finished(running.store.lease_next()) is None
    path = tmp_path / "tfmq" / "0b1c" / "billing.db"
    assert f"Dead letters of group billing are kept in {path}" in caplog.text and path.exists()


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
        bench.run(reject, until=1, dead_letters=DEFAULT_STORE)
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
