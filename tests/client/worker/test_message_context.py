"""`with message.handling():` gives a loop what run has: calls again, rejects, dead letters."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.client.blocks import INCARNATION
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tfmq.client.consumer.message import Origin, make_message
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.errors import NotAllowed
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with SimulatedBroker() as broker:
        made = Bench(broker, tmp_path)
        made.send("a", "b", "c")
        yield made


def loop(bench: Bench, body: Any, **options: Any) -> list[str]:
    """Until "c" was handled."""
    seen: list[str] = []
    with bench.open(**options) as consumer:
        for message in consumer:
            with message.handling():
                seen.append(message.text)
                body(message.text, seen)
            if message.text == "c":
                break
    return seen


def fails_twice(text: str, seen: list[str]) -> None:
    if text == "b" and seen.count("b") < 3:
        raise ValueError("not yet")


def test_a_message_whose_body_raises_comes_again_and_then_the_next(bench: Bench) -> None:
    before = bench.broker.clock.monotonic()
    assert loop(bench, fails_twice) == ["a", "b", "b", "b", "c"]
    assert bench.broker.clock.monotonic() - before >= 0.3
    assert bench.letters()["b"].state == "handled"
    assert (bench.saved() or 0) > bench.place("c")


def test_its_calls_used_up_it_is_a_dead_letter(bench: Bench) -> None:
    assert loop(bench, fails_twice, retries=1) == ["a", "b", "b", "c"]
    assert bench.letters()["b"].state == "dead"


def test_reject_makes_it_one_at_once(bench: Bench) -> None:
    def body(text: str, seen: list[str]) -> None:
        if text == "b":
            raise tfmq.Reject("no")

    assert loop(bench, body) == ["a", "b", "c"]
    assert bench.letters()["b"].state == "dead"


def test_without_a_store_the_error_leaves_the_loop_when_its_calls_are_used_up(bench: Bench) -> None:
    assert loop(bench, fails_twice, dead_letters=None) == ["a", "b", "b", "b", "c"]
    called: list[str] = []

    def never(text: str, seen: list[str]) -> None:
        called.append(text)
        raise ValueError("never")

    with pytest.raises(ValueError, match="never"):
        loop(bench, never, dead_letters=None, retries=1, group="other")
    assert called == ["a", "a"]


def test_ctrl_c_leaves_it_unacked(bench: Bench) -> None:
    def body(text: str, seen: list[str]) -> None:
        if text == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(bench, body)
    assert bench.saved() == bench.place("b")


def test_retry_later_belongs_to_run(bench: Bench) -> None:
    def body(text: str, seen: list[str]) -> None:
        raise tfmq.RetryLater(5)

    with pytest.raises(NotAllowed, match="belongs to run"):
        loop(bench, body)


def test_a_polled_message_that_fails_is_a_dead_letter_at_once(bench: Bench) -> None:
    with bench.open() as consumer:
        messages = consumer.poll(5)
        for message in messages:
            with message.handling():
                if message.text == "b":
                    raise ValueError("no")
        assert consumer.poll(0) == []
    assert bench.letters()["b"].state == "dead"
    assert (bench.saved() or 0) > bench.place("c")


def test_with_asyncio_it_is_async_with(bench: Bench) -> None:
    async def scenario() -> list[str]:
        seen: list[str] = []
        async with tfmq.aio.Consumer(
            bench.broker.servers, topics=TOPIC, group=GROUP, dead_letters=bench.store
        ) as consumer:
            async for message in consumer:
                with pytest.raises(NotAllowed), message.handling():
                    pass
                async with message.handling():
                    seen.append(message.text)
                    fails_twice(message.text, seen)
                if message.text == "c":
                    return seen
        return []

    assert asyncio.run(scenario()) == ["a", "b", "b", "b", "c"]


def test_a_message_of_no_consumer_has_no_handler() -> None:
    origin = Origin(INCARNATION, 0, 0, None)
    message = make_message(b"x", "orders", 0, 0, 21, 0, 1, None, origin)
    with pytest.raises(NotAllowed, match="a consumer gave"):
        message.handling()


def test_what_ended_long_ago_is_forgotten_by_a_loop_too(bench: Bench) -> None:
    loop(bench, fails_twice)
    assert bench.letters().keys() == {"b"}
    bench.broker.clock.advance(days=31)
    bench.send("d", "c")

    def body(text: str, seen: list[str]) -> None:
        if text == "d" and seen.count("d") < 2:
            raise ValueError("not yet")

    loop(bench, body)
    assert bench.letters().keys() == {"d"}, "else each message that ever failed stays, with its payload"


def test_a_store_that_cannot_forget_stops_no_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise tfmq.StoreFailed("planted")

    monkeypatch.setattr(BlockingSqlStore, "delete_expired", refuse)
    assert loop(bench, fails_twice) == ["a", "b", "b", "b", "c"]


def test_what_the_body_raises_is_logged_with_its_traceback_unless_configured_otherwise(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    assert loop(bench, fails_twice, retries=1) == ["a", "b", "b", "c"]
    calls = [each for each in caplog.records if "orders-0 at offset" in each.message and each.exc_info]
    assert [each.message.rpartition("failed ")[2] for each in calls] == [
        "(ValueError); it is called again in 0.1 s.",
        "(ValueError).",
    ]
    (dead,) = (number for number, each in enumerate(caplog.records) if "is dead letter" in each.message)
    assert dead > caplog.records.index(calls[-1]), "first the call that failed, then what follows from it"
    caplog.clear()
    with bench.open(group="other", retries=0) as consumer:
        for message in consumer:
            with message.handling(tracebacks=False):
                raise LookupError("secret")
            break
    assert "a call of its handler failed (LookupError)." in caplog.text and "secret" not in caplog.text
