"""Steps that all faces share."""

import pytest

from tests.client.fake_broker import HOLD
from tests.client.rig import Rig
from tfmq.client.connection.requests import (
    MetadataCache,
    fetch_topics,
    get_topic,
    locate_offset,
    request,
    sleep,
    wait_for_all,
)
from tfmq.client.operation import Event
from tfmq.errors import Abandoned, TfmqError, UnknownTopic
from tfmq.protocol.commands import BY_LATEST, LocateReply, Metadata, Ping


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_request_gives_its_reply(rig: Rig) -> None:
    assert rig.run(request(rig.link, Ping())).time_ms > 0


def test_a_request_that_is_left_is_given_up(rig: Rig) -> None:
    rig.broker.plan(Ping, HOLD)
    operation = request(rig.link, Ping())
    (call,) = next(operation).futures
    operation.close()
    assert isinstance(call.error, Abandoned) and not rig.link.has_pending_requests  # type: ignore[attr-defined]


def test_all_done_waits_for_all_or_for_its_time(rig: Rig) -> None:
    flags = [Event(), Event()]
    assert rig.run(wait_for_all(flags, 0.5, rig.link)) is False
    for flag in flags:
        flag.complete()
    assert rig.run(wait_for_all(flags, 0.5, rig.link)) is True
    assert rig.run(wait_for_all([], None, rig.link)) is True


def test_sleep_lets_time_pass(rig: Rig) -> None:
    before = rig.time
    rig.run(sleep(2.0))
    assert rig.time >= before + 2.0


def test_a_topic_is_asked_for_once_and_remembered(rig: Rig) -> None:
    cluster = MetadataCache(rig.link.now)
    with pytest.raises(UnknownTopic, match="no topic orders"):
        rig.run(get_topic(rig.link, cluster, "orders"))
    made = rig.run(get_topic(rig.link, cluster, "orders", create=True))
    assert rig.run(get_topic(rig.link, cluster, "orders")) == made
    assert len([each for each in rig.broker.requests if isinstance(each, Metadata)]) == 2


def test_asking_again_forgets_what_is_gone(rig: Rig) -> None:
    cluster = MetadataCache(rig.link.now)
    rig.run(get_topic(rig.link, cluster, "orders", create=True))
    rig.broker.delete("orders")
    assert rig.run(fetch_topics(rig.link, cluster, ["orders"])) == []
    assert cluster.topic("orders") is None
    assert rig.run(fetch_topics(rig.link, cluster, None)) == []


def test_locate_passes_the_question_on(rig: Rig) -> None:
    rig.broker.locate = lambda message: LocateReply(message.by, 1, 2, 3, 4, 5, 6)  # type: ignore[attr-defined]
    topic = rig.run(get_topic(rig.link, MetadataCache(rig.link.now), "orders", create=True))
    assert rig.run(locate_offset(rig.link, topic, 0, BY_LATEST)).offset == BY_LATEST


def test_errors_pass_through(rig: Rig) -> None:
    rig.broker.plan(Ping, TfmqError("no"))
    with pytest.raises(TfmqError, match="no"):
        rig.run(request(rig.link, Ping()))
