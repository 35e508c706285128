"""What a run is made of: arguments that are refused, and the store that is opened."""

import logging
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.client.handling_rig import TOPIC, Bench
from tfmq.client.consumer_options import OWN_STORE
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
    with SimulatedBroker() as broker, caplog.at_level(logging.INFO):
        bench = Bench(broker, tmp_path)
        bench.send("a")
        bench.run(until=1, dead_letters=OWN_STORE)
    assert (tmp_path / "tfmq" / "billing.db").exists()
    assert f"Dead letters of group billing are kept in {tmp_path}" in caplog.text


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
