"""What "processed" means where `run` calls handlers: a sentence of docs/handling.md, a test; in all commit modes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tfmq.client.worker import runner
from tfmq.testing.broker import SimulatedBroker

SAVE_SECONDS = 5


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with SimulatedBroker() as broker:
        made = Bench(broker, tmp_path)
        made.send("a", "b", "c")
        yield made


@contextmanager
def monkeypatched_pause(seconds: float) -> Iterator[None]:
    """Between two calls of a message."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "handler_pause_seconds", lambda failures, chance: seconds)
        yield


# auto


def test_auto_a_message_is_acked_when_its_handler_returned(bench: Bench) -> None:
    seen = []

    def handler(message: Any) -> None:
        assert bench.consumer is not None
        seen.append(bench.consumer.stats()["partitions"]["orders-0"]["processed_offset"])

    bench.run(handler, until=3)
    assert seen == [bench.place("a"), bench.place("b"), bench.place("c")], "and not while it is at work"
    assert bench.saved() is not None and bench.saved() > bench.place("c")  # type: ignore[operator]


def test_auto_it_is_saved_every_few_seconds_while_handlers_work(bench: Bench) -> None:
    seen = []

    def handler(message: Any) -> None:
        bench.broker.clock.advance(seconds=SAVE_SECONDS + 1)
        seen.append(bench.saved())

    bench.run(handler, until=3, dead_letters=None)
    assert seen == [bench.place("a"), bench.place("b"), bench.place("c")]


def test_auto_an_exception_leaves_it_unacked_until_its_calls_are_used_up(bench: Bench) -> None:
    seen = []

    def handler(message: Any) -> None:
        if message.text == "b":
            bench.broker.clock.advance(seconds=SAVE_SECONDS + 1)
            seen.append(bench.saved())
            raise ValueError("never")

    bench.run(handler, until=5, retries=2)
    assert bench.handled == ["a", "b", "b", "b", "c"]
    assert seen == [bench.place("b")] * 3
    assert bench.letters()["b"].state == "dead"
    assert bench.saved() is not None and bench.saved() > bench.place("c")  # type: ignore[operator]


def test_auto_ctrl_c_in_a_handler_leaves_its_message_unacked_and_saves_those_before(bench: Bench) -> None:
    def handler(message: Any) -> None:
        if message.text == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(handler)
    assert (bench.handled, bench.saved()) == (["a", "b"], bench.place("b"))
    bench.run(until=2)
    assert bench.handled == ["a", "b", "b", "c"]


def test_auto_stop_finishes_the_message_in_work_and_begins_no_other(bench: Bench) -> None:
    bench.run(until=2)
    assert (bench.handled, bench.saved()) == (["a", "b"], bench.place("c"))
    bench.run(until=1)
    assert bench.handled == ["a", "b", "c"]


def test_auto_close_in_a_handler_ends_the_run_and_leaves_its_message_unacked(bench: Bench) -> None:
    def handler(message: Any) -> None:
        assert bench.consumer is not None
        if message.text == "b":
            bench.consumer.close()

    bench.run(handler)
    assert (bench.handled, bench.saved()) == (["a", "b"], bench.place("b"))


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, KeyboardInterrupt])
def test_auto_what_ends_a_program_ends_the_run_and_is_no_failure_of_its_message(
    bench: Bench, kind: type[BaseException]
) -> None:
    def handler(message: Any) -> None:
        if message.text == "b":
            raise kind("now")

    with pytest.raises(kind):
        bench.run(handler)
    assert (bench.handled, bench.saved()) == (["a", "b"], bench.place("b"))
    assert "b" not in bench.letters() or bench.letters()["b"].failures == ()


def test_auto_stop_waits_for_no_pause_of_a_message_that_failed(bench: Bench) -> None:
    """It is not at work: it is delivered again, to the next run."""
    times = []

    def handler(message: Any) -> None:
        times.append(bench.broker.clock.monotonic())
        raise ValueError("not now")

    with monkeypatched_pause(3600):
        bench.run(handler, until=1, retries=5)
    assert bench.broker.clock.monotonic() - times[0] < 60
    assert (bench.handled, bench.saved()) in ((["a"], None), (["a"], bench.place("a")))


def test_auto_without_a_store_the_error_ends_the_run_in_front_of_its_message(bench: Bench) -> None:
    def handler(message: Any) -> None:
        if message.text == "b":
            raise ValueError("stop here")

    with pytest.raises(ValueError, match="stop here"):
        bench.run(handler, retries=1, dead_letters=None)
    assert (bench.handled, bench.saved()) == (["a", "b", "b"], bench.place("b"))


def test_auto_what_is_put_off_is_acked_since_the_store_has_it(bench: Bench) -> None:
    def handler(message: Any) -> None:
        if message.text == "a":
            raise tfmq.RetryLater(3600)

    bench.run(handler, until=3)
    assert bench.letters()["a"].state == "waiting"
    assert bench.saved() is not None and bench.saved() > bench.place("c")  # type: ignore[operator]


# manual


def test_manual_nothing_is_saved_but_what_commit_says(bench: Bench) -> None:
    bench.run(until=3, commits="manual")
    assert bench.saved() is None
    bench.run(until=3, commits="manual")
    assert bench.handled == ["a", "b", "c"] * 2


def test_manual_commit_in_a_handler_includes_its_own_message(bench: Bench) -> None:
    seen = []

    def handler(message: Any) -> None:
        assert bench.consumer is not None
        bench.consumer.commit()
        seen.append(bench.saved())

    bench.run(handler, until=2, commits="manual")
    assert seen == [bench.place("b"), bench.place("c")]


def test_manual_commit_of_a_message_saves_up_to_it_and_including_it(bench: Bench) -> None:
    def handler(message: Any) -> None:
        assert bench.consumer is not None
        if message.text == "b":
            bench.consumer.commit(message)

    bench.run(handler, until=3, commits="manual")
    assert bench.saved() == bench.place("c")


def test_manual_commit_leaves_out_what_other_handlers_are_at_work_on(bench: Bench) -> None:
    """Two tasks, and the order does not matter: the second commits while the first is at work."""
    bench.consumer = None

    async def both() -> int | None:
        first_may_end = asyncio.Event()
        seen = None
        consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(
            bench.broker.servers, topics=TOPIC, group=GROUP, commits="manual", dead_letters=None
        )

        async def handle(message: Any) -> None:
            nonlocal seen
            if message.text == "a":
                await first_may_end.wait()
            if message.text == "b":
                await consumer.commit()
                seen = bench.saved() or 0
                first_may_end.set()
                consumer.stop()

        await consumer.run(handle, workers=2, order="none", signals=False)
        return seen

    assert asyncio.run(both()) == 0


def test_manual_an_exception_is_retried_and_kept_as_ever_and_the_offset_is_not_saved(bench: Bench) -> None:
    def handler(message: Any) -> None:
        raise ValueError("never")

    bench.run(handler, until=2, retries=1, commits="manual")
    assert bench.letters()["a"].state == "dead"
    assert bench.saved() is None


# before


def test_before_the_offset_is_saved_when_its_handler_begins(bench: Bench) -> None:
    seen = []
    bench.run(lambda message: seen.append(bench.saved()), until=2, commits="before")
    assert seen == [bench.place("b"), bench.place("c")]


def test_before_ctrl_c_in_a_handler_does_not_bring_its_message_again(bench: Bench) -> None:
    def handler(message: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(handler, commits="before")
    bench.run(until=2, commits="before")
    assert bench.handled == ["a", "b", "c"]


def test_before_a_message_that_fails_is_not_called_again_but_kept(bench: Bench) -> None:
    def handler(message: Any) -> None:
        if message.text == "a":
            raise ValueError("once")

    bench.run(handler, until=3, commits="before")
    assert bench.handled == ["a", "b", "c"]
    assert bench.letters()["a"].state == "dead"


def test_before_stop_leaves_what_did_not_begin_to_the_next_one(bench: Bench) -> None:
    bench.run(until=1, commits="before")
    assert (bench.handled, bench.saved()) == (["a"], bench.place("b"))


def test_before_needs_the_order_of_partitions(bench: Bench) -> None:
    with pytest.raises(tfmq.BadRequest, match="partition"):
        bench.run(commits="before", run={"order": "key"})
