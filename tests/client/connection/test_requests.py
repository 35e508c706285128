"""A question that is asked again for a passing failure, and never for another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.fake_broker import HOLD, LOSE, SWALLOW
from tests.client.rig import Rig, sleep
from tests.client.scripted_broker import Broker, Script
from tfmq.client.connection.requests import (
    REFRESH_SECONDS,
    MetadataCache,
    fetch_topics,
    get_topic,
    request,
    request_until_not_busy,
    request_with_retries,
    wait_for_all,
)
from tfmq.client.operation import Event
from tfmq.errors import Abandoned, BadRequest, Busy, ConnectionFailed, DiskFull, TfmqError, TimedOut, UnknownTopic
from tfmq.protocol.commands import Metadata, MetadataReply, PartitionRow, Ping, TopicRow


def asked(broker: Broker, seconds: float = 10.0, **options: Any) -> Any:
    script = Script(broker)
    script.link.connection_count = 0 if broker.down else 1
    return script.run(request_with_retries(script.link, Metadata(None), script.link.now() + seconds, **options))


def test_a_passing_failure_is_asked_again() -> None:
    broker = Broker()
    broker.fail[Metadata] = [Busy(), ConnectionFailed(), Busy()]
    assert asked(broker) == MetadataReply([])
    assert len(broker.requests) == 4


def test_busy_may_be_reported_at_once_too() -> None:
    broker = Broker()
    broker.fail[Metadata] = [ConnectionFailed(), Busy()]
    with pytest.raises(Busy):
        asked(broker, while_busy=False)
    assert len(broker.requests) == 2


@pytest.mark.parametrize("send", [request_with_retries, request_until_not_busy])
def test_a_request_waits_as_long_as_the_broker_asks_for_within_its_time(send: Any) -> None:
    rig = Rig()
    rig.broker.plan(Ping, Busy(wait_ms=3000))
    rig.run(request(rig.link, Metadata([])))
    begun = rig.time
    rig.run(send(rig.link, Ping(), until=begun + 10))
    assert 3.0 <= rig.time - begun < 3.1
    begun, count = rig.time, len(rig.broker.requests)
    rig.broker.plan(Ping, Busy(wait_ms=3000))
    with pytest.raises(Busy):
        found = rig.run(send(rig.link, Ping(), until=begun + 2))
        found.result()
    assert rig.time == begun and len(rig.broker.requests) == count + 1  # no attempt can be in time


def test_any_other_failure_is_reported_at_once() -> None:
    broker = Broker()
    broker.fail[Metadata] = [BadRequest(), Busy()]
    with pytest.raises(BadRequest):
        asked(broker)
    assert len(broker.requests) == 1


def test_a_failure_that_does_not_pass_is_reported_when_the_time_is_over() -> None:
    broker = Broker()
    broker.fail[Metadata] = [Busy() for _ in range(1000)]
    with pytest.raises(Busy):
        asked(broker)
    assert 5 < len(broker.requests) < 20


def test_a_broker_that_was_never_reached_is_reported_at_once() -> None:
    broker = Broker()
    broker.down = True
    with pytest.raises(ConnectionFailed):
        asked(broker)
    assert len(broker.requests) == 1


class Watch:
    """What is known of topics."""

    time = 0.0

    def __call__(self) -> float:
        return self.time


def row(name: str, incarnation: int = 5, partitions: int = 2) -> TopicRow:
    backwards = [PartitionRow(number, "open") for number in reversed(range(partitions))]
    return TopicRow(name, incarnation, backwards, {"a": 1})


def test_what_was_learned_is_known_until_it_is_forgotten() -> None:
    cluster = MetadataCache(Watch())
    assert cluster.topic("a") is None
    (topic,) = cluster.update([row("a")])
    assert cluster.topic("a") == topic
    assert (topic.incarnation, [each.number for each in topic.partitions]) == (5, [0, 1])
    cluster.invalidate("a")
    cluster.invalidate("a")
    assert cluster.topic("a") is None
    cluster.update([row("a"), row("b")])
    cluster.clear()
    assert cluster.topic("b") is None


def test_after_a_while_it_is_worth_another_look() -> None:
    watch = Watch()
    cluster = MetadataCache(watch)
    assert cluster.is_stale("a")
    cluster.update([row("a")])
    assert not cluster.is_stale("a")
    watch.time = REFRESH_SECONDS
    assert cluster.is_stale("a") and cluster.topic("a") is not None


# Steps that all faces share.


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


def test_errors_pass_through(rig: Rig) -> None:
    rig.broker.plan(Ping, TfmqError("no"))
    with pytest.raises(TfmqError, match="no"):
        rig.run(request(rig.link, Ping()))


# A request that is asked again while the broker is busy.


def test_a_busy_broker_is_left_alone_longer_and_longer() -> None:
    rig = Rig()
    rig.broker.plan(Ping, *[Busy()] * 5)
    begun = rig.time
    call = rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 10))
    assert call.error is None and 0.3 < rig.time - begun < 1


def test_other_errors_come_back_at_once() -> None:
    rig = Rig()
    rig.broker.plan(Ping, DiskFull())
    call = rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 10))
    assert isinstance(call.error, DiskFull) and len(rig.broker.requests) == 2


def test_the_end_of_the_time_is_the_end() -> None:
    rig = Rig()
    rig.broker.plan(Ping, *[Busy()] * 100)
    assert isinstance(rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 1)).error, Busy)
    rig.broker.plans.clear()
    rig.broker.plan(Ping, SWALLOW)
    assert isinstance(rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 1)).error, TimedOut)


@pytest.mark.parametrize(("repeat", "error"), [(True, type(None)), (False, ConnectionFailed)])
def test_what_must_not_be_repeated_is_not(repeat: bool, error: type) -> None:
    rig = Rig()
    rig.broker.plan(Ping, LOSE)
    call = rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 1, repeat=repeat))
    assert isinstance(call.error, error)


def test_a_caller_that_leaves_early_cancels_the_call() -> None:
    rig = Rig()
    rig.broker.plan(Ping, SWALLOW)
    asking = request_until_not_busy(rig.link, Ping(), until=rig.time + 10)
    next(asking)
    rig.exchange()
    asking.close()
    assert not rig.link.has_pending_requests
