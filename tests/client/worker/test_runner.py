"""Handlers that return, fail, reject, put off; ordered queues, unavailable stores, revoked partitions."""

import asyncio
import inspect
import logging
import re
import sqlite3
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tfmq
import tfmq.aio
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tfmq.client.worker import runner
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.errors import StoreFailed
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        yield made


@pytest.fixture
def bench(broker: SimulatedBroker, tmp_path: Path) -> Bench:
    return Bench(broker, tmp_path, partitions=2)


def fail_on(*texts: str, error: Exception | None = None) -> Any:
    def handler(message: Any) -> None:
        if message.text in texts:
            raise error or ValueError(f"no {message.text}")

    return handler


def lives(bench: Bench, handler: Any, **options: Any) -> bool:
    """Run it; False: it was ended from outside, as a process that is killed."""
    try:
        bench.run(handler, **options)
    except KeyboardInterrupt:
        return False
    return True


# Failing


def test_a_failing_message_is_called_again_with_growing_pauses_then_it_is_a_dead_letter(bench: Bench) -> None:
    bench.send("a", "b")
    times = []

    def handler(message: Any) -> None:
        if message.text == "a":
            times.append(bench.broker.clock.monotonic())
            raise ValueError("never")

    bench.run(handler, until=5, retries=3)
    assert bench.handled == ["a", "a", "a", "a", "b"]
    pauses = [after - before for before, after in pairwise(times)]
    assert all(expected <= pause <= 1.3 * expected for expected, pause in zip((0.1, 0.2, 0.4), pauses, strict=True))
    letter = bench.letters()["a"]
    assert (letter.state, letter.calls, len(letter.failures)) == ("dead", 4, 4)
    assert "ValueError: never" in letter.failures[-1].error and "handler" in letter.failures[-1].traceback


async def unawaited(message: Any) -> None:
    raise AssertionError("it is never awaited")


def one_generator(message: Any) -> Any:
    yield message


async def one_async_generator(message: Any) -> Any:
    yield message


async def returns_a_coroutine(message: Any) -> Any:
    return unawaited(message)


async def returns_a_generator(message: Any) -> Any:
    return one_generator(message)


BODIES_NOT_RUN = [one_generator, one_async_generator, returns_a_coroutine, returns_a_generator]


@pytest.mark.parametrize("handler", BODIES_NOT_RUN)
def test_a_handler_whose_body_did_not_run_has_failed(bench: Bench, handler: Any) -> None:
    """The call returned, and nothing was done: what it gave back is looked at."""
    bench.send("a")
    consumer = bench.open(dead_letters=None, retries=0)
    with pytest.raises(tfmq.BadRequest, match="whose body was not run"):
        consumer.run(lambda message: handler(message))
    assert bench.saved() in (None, 0)


@pytest.mark.parametrize("handler", BODIES_NOT_RUN)
@pytest.mark.parametrize("face", ["plain", "coroutine"])
def test_a_handler_whose_body_did_not_run_has_failed_in_asyncio_too(bench: Bench, handler: Any, face: str) -> None:
    async def coroutine(message: Any) -> Any:
        found = handler(message)
        return await found if inspect.iscoroutine(found) else found

    bench.send("a")
    consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(
        bench.broker.servers, topics=TOPIC, group=GROUP, dead_letters=None, retries=0
    )
    with pytest.raises(tfmq.BadRequest, match="whose body was not run"):
        asyncio.run(consumer.run(coroutine if face == "coroutine" else lambda message: handler(message)))
    assert bench.saved() in (None, 0)


def test_within_a_run_no_other_caller_is_handed_messages(bench: Bench) -> None:
    """poll() would give nothing, next() would wait without end, and a second run would hold the first."""
    bench.send("a", "b")
    refused: list[str] = []

    def handler(message: Any) -> None:
        consumer: Any = bench.consumer
        for ask in (consumer.poll, lambda: next(consumer), lambda: list(consumer), lambda: consumer.run(print)):
            with pytest.raises(tfmq.NotAllowed, match="hands out the messages of this consumer"):
                ask()
            refused.append(message.text)

    bench.run(handler, until=2)
    assert refused == ["a"] * 4 + ["b"] * 4


def test_within_a_run_of_asyncio_no_other_caller_is_handed_messages(bench: Bench) -> None:
    bench.send("a")
    refused = 0

    async def scenario() -> None:
        consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(
            bench.broker.servers, topics=TOPIC, group=GROUP, dead_letters=None, retries=0
        )

        async def handler(message: Any) -> None:
            nonlocal refused
            for ask in (consumer.poll, consumer.__anext__, lambda: consumer.run(print)):
                with pytest.raises(tfmq.NotAllowed, match="hands out the messages of this consumer"):
                    await ask()
                refused += 1
            consumer.stop()

        await consumer.run(handler)

    asyncio.run(scenario())
    assert refused == 3


def test_item_29_too_many_retries_do_not_stop_later_ones(bench: Bench) -> None:
    bench.send("a", "b", "c", "d")
    bench.run(fail_on("a", "c"), until=6, retries=1)
    assert bench.handled == ["a", "a", "b", "c", "c", "d"]
    assert {text: each.state for text, each in bench.letters().items() if each.state == "dead"} == {
        "a": "dead",
        "c": "dead",
    }


def test_item_29_a_filter_that_raises_ends_the_run_and_loses_nothing(bench: Bench) -> None:
    bench.send("a", "b", "c")

    def where(message: Any) -> bool:
        if message.text == "b":
            raise LookupError("no such filter")
        return True

    with pytest.raises(LookupError, match="no such filter"):
        bench.run(where=where)
    assert bench.handled in ([], ["a"])
    bench.run(until=3 - len(bench.handled))
    assert bench.handled == ["a", "b", "c"]


def test_item_29_a_message_larger_than_a_fetch_is_fetched_all_the_same(bench: Bench) -> None:
    bench.send("a", "x" * 300_000, "b")
    bench.run(until=3, fetch_bytes=16 << 10, prefetch_bytes=64 << 10)
    assert [len(text) for text in bench.handled] == [1, 300_000, 1]


def test_while_one_partition_waits_the_other_goes_on(bench: Bench) -> None:
    bench.send("a1", "a2", partition=0)
    bench.send("b1", "b2", partition=1)
    failed: list[str] = []

    def handler(message: Any) -> None:
        if message.text == "a1" and not failed:
            failed.append("a1")
            raise ValueError("once")

    bench.run(handler, until=5)
    order = bench.handled
    assert sorted(order) == ["a1", "a1", "a2", "b1", "b2"]
    assert max(order.index("b1"), order.index("b2")) < len(order) - 1 - order[::-1].index("a1")
    assert order.index("a2") == 4


def test_by_key_only_those_with_its_key_wait(bench: Bench) -> None:
    bench.send("x1", key="x")
    bench.send("y1", key="y")
    bench.send("x2", key="x")
    bench.send("plain")
    failed: list[str] = []

    def handler(message: Any) -> None:
        if message.text == "x1" and not failed:
            failed.append("x1")
            raise ValueError("once")

    bench.run(handler, until=5, run={"order": "key"})
    assert bench.handled == ["x1", "y1", "plain", "x1", "x2"]


def test_without_an_order_no_message_waits(bench: Bench) -> None:
    bench.send("a", "b", "c")
    bench.run(fail_on("a"), until=4, retries=1, run={"order": "none"})
    assert bench.handled == ["a", "b", "c", "a"]


def test_a_message_that_succeeds_after_failures_is_no_dead_letter(bench: Bench) -> None:
    bench.send("a", "b")
    bench.run(lambda message: 1 / 0 if bench.handled == ["a"] else None, until=3)
    assert bench.handled == ["a", "a", "b"]
    assert bench.letters()["a"].state == "handled"


def test_also_far_after_the_start(bench: Bench) -> None:
    """Calls of the first messages are counted before they begin; these only once they failed."""
    texts = [str(number) for number in range(runner.COUNT_BEFORE_CALL_MAX + 4)]
    bench.send(*texts)
    late = texts[-2]
    bench.run(lambda message: 1 / 0 if bench.handled[-2:] == [texts[-3], late] else None, until=len(texts) + 1)
    assert bench.handled == [*texts[:-1], late, texts[-1]]
    assert bench.letters()[late].state == "handled"


def test_there_too_it_is_dead_when_its_calls_are_used_up_and_not_called_again(bench: Bench) -> None:
    texts = [str(number) for number in range(runner.COUNT_BEFORE_CALL_MAX + 4)]
    bench.send(*texts)
    late = texts[-2]
    bench.run(fail_on(late), until=len(texts) + 1, retries=1)
    assert bench.handled == [*texts[:-1], late, texts[-1]]
    assert bench.letters()[late].state == "dead"


def test_reject_makes_it_a_dead_letter_at_once(bench: Bench) -> None:
    bench.send("a", "b")
    bench.run(fail_on("a", error=tfmq.Reject("not ours")), until=2)
    assert bench.handled == ["a", "b"]
    letter = bench.letters()["a"]
    assert letter.state == "dead" and letter.error.endswith("Reject: not ours")


def test_what_cannot_be_decoded_is_a_dead_letter_at_once(bench: Bench) -> None:
    bench.send("{", "2")
    values = []

    def handler(message: Any) -> None:
        values.append(message.value)

    bench.run(handler, until=2, codec=tfmq.codecs.json)
    assert (bench.handled, values) == (["{", "2"], [2])
    assert bench.letters()["{"].state == "dead"


def test_each_topic_may_have_a_codec_of_its_own_also_when_it_is_handled_again(bench: Bench) -> None:
    with bench.broker.producer(codec={TOPIC: tfmq.codecs.json}) as producer:
        producer.send(TOPIC, {"number": 1}).result()
        producer.send("notes", "plain").result()
        with pytest.raises(TypeError, match="codec"):
            producer.send("bills", {"number": 2})
    seen: list[Any] = []

    def handler(message: Any) -> None:
        seen.append(message.value)
        if seen.count({"number": 1}) == 1 and message.topic == TOPIC:
            raise tfmq.RetryLater(1)

    bench.run(handler, until=3, topics=[TOPIC, "notes"], codec={TOPIC: tfmq.codecs.json})
    assert seen.count({"number": 1}) == 2 and seen.count(b"plain") == 1
    with pytest.raises(tfmq.BadRequest, match="does not read"):
        bench.open(codec={"oders": tfmq.codecs.json})
    with pytest.raises(tfmq.BadRequest, match="one for each"):
        bench.open(codec={TOPIC: "json"})


def test_retry_later_lets_the_queue_go_on_and_brings_it_again_at_its_time(bench: Bench) -> None:
    bench.send("a", "b")
    times = []

    def handler(message: Any) -> None:
        times.append(bench.broker.clock.monotonic())
        if bench.handled == ["a"]:
            raise tfmq.RetryLater(600)

    bench.run(handler, until=3)
    assert bench.handled == ["a", "b", "a"]
    assert 600 <= times[2] - times[0] < 610
    assert bench.letters()["a"].state == "handled"


def two_brokers(tmp_path: Path) -> tuple[SimulatedBroker, Bench, SimulatedBroker, Bench]:
    """With a topic, messages at the same places, a group and a store of dead letters that are called alike."""
    first, second = SimulatedBroker(seed=1), SimulatedBroker(seed=2)
    benches = Bench(first, tmp_path), Bench(second, tmp_path)
    second.clock.advance(3)
    for bench in benches:
        bench.send("a", "b")
    return first, benches[0], second, benches[1]


def put_off(message: Any) -> None:
    if message.text == "a":
        raise tfmq.RetryLater(3)


def test_what_waits_is_handled_by_consumers_of_its_own_broker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, ours, second, theirs = two_brokers(tmp_path)
    with first, second:
        ours.run(put_off, until=2)
        theirs.run(until=2)
        second.clock.advance(3600)
        theirs.send("c")

        def go_on(message: Any) -> None:
            if message.text == "c":
                second.clock.advance(600)
                theirs.send("d")

        theirs.run(go_on, until=2)
        assert theirs.handled == ["a", "b", "c", "d"]
        (letter,) = (each for each in ours.letters().values() if each.state == "waiting")
        assert f"they belong to the broker {letter.broker}, and this one is" in caplog.text
        first.clock.advance(10)
        ours.run(until=1)
        assert ours.handled == ["a", "b", "a"]
        assert ours.letters()["a"].state == "handled"


def test_what_an_earlier_release_kept_is_handled_where_its_message_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That release did not say of which broker a letter is; the other broker has another message at the same place."""
    first, ours, second, theirs = two_brokers(tmp_path)
    with first, second, caplog.at_level(logging.INFO):
        ours.run(put_off, until=2)
        with closing(sqlite3.connect(ours.store)) as database, database:
            database.execute("UPDATE tfmq_dead_letters SET broker = ''")
        second.clock.advance(3600)
        theirs.run(lambda message: second.clock.advance(600), until=2)
        assert theirs.handled == ["a", "b"] and "their messages are at this broker" not in caplog.text
        assert "to the broker with an unknown id" in caplog.text
        first.clock.advance(10)
        ours.run(until=1)
        assert ours.handled == ["a", "b", "a"]
        assert caplog.text.count("had no broker id, and their messages are at this broker") == 1


def test_a_retried_dead_letter_that_fails_waits_longer_and_is_dead_in_the_end(bench: Bench) -> None:
    bench.send("a")

    def handler(message: Any) -> None:
        if bench.handled == ["a"]:
            raise tfmq.RetryLater(1)
        raise ValueError("never")

    bench.run(handler, until=4, retries=2)
    assert bench.letters()["a"].state == "dead"
    assert bench.letters()["a"].calls == 4, "putting it off cost none of the three"


def test_one_that_is_put_off_after_each_start_is_dead_in_the_end_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offset is never saved, as where each consumer is killed soon; three calls may fail, no more."""
    monkeypatch.setattr(runner, "COUNT_BEFORE_CALL_MAX", 0)
    bench.send("a")

    def handler(message: Any) -> None:
        raise tfmq.RetryLater(1) if len(bench.handled) % 2 else ValueError("never")

    for runs in range(3):
        assert runs == 0 or bench.letters()["a"].state == "waiting"
        bench.run(handler, until=2, retries=2, commits="manual")
    letter = bench.letters()["a"]
    assert (letter.state, letter.calls) == ("dead", 6)


@pytest.mark.parametrize("error", [tfmq.Reject("no"), tfmq.RetryLater(5)])
def test_without_a_store_it_ends_the_run(bench: Bench, error: Exception) -> None:
    bench.send("a")
    with pytest.raises(type(error)):
        bench.run(fail_on("a", error=error), dead_letters=None)
    assert bench.handled == ["a"]


def test_without_a_store_a_message_is_called_again_as_often_and_then_its_error_ends_the_run(bench: Bench) -> None:
    bench.send("a", "b")
    with pytest.raises(ValueError, match="no a"):
        bench.run(fail_on("a"), dead_letters=None, retries=2)
    assert bench.handled == ["a"] * 3
    assert bench.saved() in (None, bench.place("a"))


def test_calls_are_counted_over_a_consumer_that_dies(bench: Bench) -> None:
    """Two calls of three are noted, and the third was begun; the next consumer has none left."""
    bench.send("a", "b")

    def handler(message: Any) -> None:
        if len(bench.handled) == 3:
            raise KeyboardInterrupt
        raise ValueError("never")

    with pytest.raises(KeyboardInterrupt):
        bench.run(handler, retries=2)
    bench.run(fail_on("a"), until=1, retries=2)
    assert bench.handled == ["a", "a", "a", "b"]
    assert bench.letters()["a"].state == "dead"


def test_what_ends_its_process_each_time_is_not_called_without_end(bench: Bench) -> None:
    bench.send("a", "b")

    def handler(message: Any) -> None:
        if message.text == "a":
            raise KeyboardInterrupt  # as a process that ends: nothing is noted of the call
        assert bench.consumer is not None
        bench.consumer.stop()

    while not lives(bench, handler, retries=2) and len(bench.handled) < 10:
        pass
    assert bench.handled == ["a", "a", "a", "b"]
    assert "process ended" in bench.letters()["a"].error


def test_calls_far_after_the_start_are_noted_over_a_kill_too(bench: Bench) -> None:
    """Two of three calls are noted; the third dies uncounted: one more a kill, and no more."""
    texts = [str(number) for number in range(runner.COUNT_BEFORE_CALL_MAX + 2)]
    bench.send(*texts)
    late = texts[-1]

    def handler(message: Any) -> None:
        if bench.handled.count(late) == 3:
            raise KeyboardInterrupt
        if message.text == late:
            raise ValueError("never")
        if message.text == "end":
            assert bench.consumer is not None
            bench.consumer.stop()

    assert not lives(bench, handler, retries=2)
    bench.send("end")
    assert lives(bench, handler, retries=2)
    assert bench.handled.count(late) == 4
    assert bench.letters()[late].state == "dead"


@pytest.mark.parametrize("again", [0, 1], ids=["handled at once", "fails once more"])
def test_what_failed_far_after_the_start_is_handled_when_the_next_consumer_handles_it(bench: Bench, again: int) -> None:
    """The consumer that failed with it was killed in the pause before its next call; the first failed, too."""
    texts = [str(number) for number in range(runner.COUNT_BEFORE_CALL_MAX + 4)]
    bench.send(*texts)
    late = texts[-2]

    def killed(message: Any) -> None:
        if message.text == texts[-1]:
            raise KeyboardInterrupt
        if message.text in (texts[0], late):
            raise ValueError("once")

    assert not lives(bench, killed, run={"order": "none"})
    assert bench.letters()[late].state == "failing" and bench.saved() in (None, bench.place(texts[0]))
    before = len(bench.handled)

    def handler(message: Any) -> None:
        assert bench.consumer is not None
        if message.text == late and bench.handled[before:].count(late) <= again:
            raise ValueError("again")
        if message.text == texts[-1]:
            bench.consumer.stop()

    assert lives(bench, handler)
    assert bench.handled[before:] == [*texts[:-1], *[late] * again, texts[-1]]
    letter = bench.letters()[late]
    assert (letter.state, letter.calls) == ("handled", 2 + again)


def test_the_place_is_saved_before_messages_ever_further_after_a_start_begin(bench: Bench) -> None:
    """So a process that one of them ends comes back in front of it, half as far away, until its calls are counted."""
    bench.send(*(str(number) for number in range(40)))
    seen: dict[int, int] = {}

    def handler(message: Any) -> None:
        engine: Any = bench.broker._server.engine  # who asked it would give a save that is under way its time
        rows = engine.broker.catalog.state.groups[GROUP].offsets.items()
        seen[int(message.text)] = sum(place.offset for (_, partition), place in rows if partition == 0)

    bench.run(handler, until=40, save_every=3600)
    assert (seen[16], seen[31]) == (bench.place("16"), bench.place("16"))
    assert (seen[32], seen[39]) == (bench.place("32"), bench.place("32"))


def test_an_error_of_any_size_is_a_dead_letter_of_a_few_lines(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A recursion without an end; words as long as a payload, of which some cannot be written. The log is bounded."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def handler(message: Any) -> None:
        if message.text == "deep":
            handler(message)
        if message.text == "long":
            raise ValueError("x" * 1_000_000 + "\0\udc80")
        raise Unspeakable

    bench.send("deep", "long", "mute")
    bench.run(handler, until=3, retries=0)
    found = {text: each.failures[-1] for text, each in bench.letters().items()}
    assert {text: each.error.partition(":")[0].rpartition(".")[2] for text, each in found.items()} == {
        "deep": "RecursionError",
        "long": "ValueError",
        "mute": "Unspeakable",
    }
    assert all(len(each.error) <= 1000 and len(each.traceback) <= 8000 for each in found.values())
    logged = [logging.Formatter().format(record) for record in caplog.records if "failed" in record.msg % record.args]
    assert len(logged) == 3 and all(len(each.encode()) < 9000 for each in logged)
    assert [each for each in logged if "\\udc80" in each] and all("in handler" in each for each in logged[:1])


# The store


def test_a_store_that_another_process_locks_is_waited_for_and_no_handler_is_called_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tfmq.dead_letters.sql_store.BUSY_SECONDS", 0.01)
    bench.send("a", "b")
    bench.run(fail_on("a", error=tfmq.Reject("no")), until=1)
    other = sqlite3.connect(bench.store, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    pauses = []

    def pause(tries: int, chance: float) -> float:
        pauses.append(tries)
        if tries == 3:
            other.execute("ROLLBACK")
        return 0.1

    monkeypatch.setattr(runner, "handler_pause_seconds", pause)
    bench.run(fail_on("b", error=tfmq.Reject("no")), until=1)
    assert bench.handled == ["a", "b"] and pauses == [1, 2, 3]
    assert {text: each.state for text, each in bench.letters().items()} == {"a": "dead", "b": "dead"}
    assert "locked" in caplog.text
    other.close()


def test_a_store_that_fails_holds_the_offset_and_calls_no_handler_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Offsets are saved meanwhile, more often than the store is tried: that of the message before the failed one."""
    bench.send("before", "a", "b")
    apply = BlockingSqlStore.apply
    refused: list[int | None] = []

    def failing(self: BlockingSqlStore, steps: Any) -> Any:
        if bench.handled == ["before", "a"] and len(refused) < 3:
            refused.append(bench.saved())
            raise StoreFailed("the disk is full")
        return apply(self, steps)

    monkeypatch.setattr(BlockingSqlStore, "apply", failing)
    bench.run(fail_on("a", error=tfmq.Reject("no")), until=3, save_every=0.05)
    assert (bench.handled, len(refused)) == (["before", "a", "b"], 3)
    assert set(refused) <= {None, bench.place("a")} and refused[-1] == bench.place("a")
    assert bench.letters()["a"].state == "dead"
    assert "the disk is full" in caplog.text


def test_due_dead_letters_are_handled_while_the_broker_is_down(bench: Bench) -> None:
    bench.send("a")
    bench.run(fail_on("a", error=tfmq.RetryLater(30)), until=1)

    def handler(message: Any) -> None:
        if message.text == "b":
            bench.broker.stop()
        else:
            assert bench.consumer is not None
            bench.broker.start()

    bench.send("b")
    bench.run(handler, until=2)
    assert bench.handled == ["a", "b", "a"]
    assert bench.letters()["a"].state == "handled"


def test_without_a_group_there_is_no_store_and_one_that_is_named_is_refused(bench: Bench) -> None:
    bench.send("a")
    with pytest.raises(ValueError, match="no a"):
        bench.run(fail_on("a"), group=None, dead_letters=running_default(), retries=0)
    with pytest.raises(tfmq.BadRequest, match="group"):
        bench.run(group=None)


def running_default() -> str:
    from tfmq.client.consumer.options import DEFAULT_STORE as OWN_STORE

    return OWN_STORE


# Ordered queues and the offset


def test_a_partition_with_a_blocked_message_is_read_no_further_than_its_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "UNACKED_BYTES_MAX", 1000)
    for _ in range(8):
        bench.send(*(f"{number:0200}" for number in range(20)))
    failed = []

    def handler(message: Any) -> None:
        assert bench.consumer is not None
        ledger = bench.consumer._core.positions.ack_trackers.get(tfmq.client.consumer.positions.PartitionName(TOPIC, 0))
        assert ledger is not None
        failed.append(ledger.unacked_bytes)
        if len(failed) < 4:
            raise ValueError("stuck")

    bench.run(handler, until=8 * 20 + 3, fetch_bytes=2000, prefetch_bytes=16 << 10)
    assert max(failed) < 1000 + 2 * 16 * 1024
    assert len(bench.handled) == 8 * 20 + 3


def test_the_offset_is_the_lowest_unfinished_one_with_many_workers(bench: Bench) -> None:
    async def scenario() -> int | None:
        consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(
            bench.broker.servers, topics=TOPIC, group=GROUP, dead_letters=None
        )
        others = asyncio.Event()
        done: list[str] = []

        async def handle(message: Any) -> None:
            if message.text == "b":
                await others.wait()
                raise ValueError("at last")
            done.append(message.text)
            if len(done) == 3:
                others.set()

        with pytest.raises(ValueError, match="at last"):
            async with consumer:
                await consumer.run(handle, workers=4, order="none", signals=False)
        return bench.saved()

    bench.send("a", "b", "c", "d")
    assert asyncio.run(retried_never(scenario)) == bench.place("b")


async def retried_never(scenario: Any) -> Any:
    return await scenario()


# Who handles


def test_listeners_by_topic_and_one_for_the_rest(bench: Bench) -> None:
    bench.send("a")
    with bench.broker.producer() as producer:
        producer.send("bills", "b").result()
    consumer = bench.open(topics=[TOPIC, "bills"])
    seen = []

    @consumer.on("bills")
    def bills(message: Any) -> None:
        seen.append(("bills", message.text))
        if len(seen) == 2:
            consumer.stop()

    def rest(message: Any) -> None:
        seen.append(("rest", message.text))
        if len(seen) == 2:
            consumer.stop()

    assert bills is not None
    consumer.run(rest)
    assert sorted(seen) == [("bills", "b"), ("rest", "a")]


def test_a_topic_without_a_handler_is_refused_before_anything_is_read(bench: Bench) -> None:
    consumer = bench.open(topics=[TOPIC, "bills"])
    consumer.on("bills")(print)
    with pytest.raises(tfmq.BadRequest, match="register one"):
        consumer.run()
    with pytest.raises(tfmq.BadRequest, match="needs a listener"):
        bench.open(topics=re.compile("o.*")).run()


def test_a_coroutine_function_is_awaited_by_the_blocking_consumer(bench: Bench) -> None:
    bench.send("a", "b")
    consumer, seen = bench.open(), []

    async def handle(message: Any) -> None:
        await asyncio.sleep(0)
        seen.append(message.text)
        if message.text == "b":
            consumer.stop()

    consumer.run(handle)
    assert seen == ["a", "b"]


def test_what_a_hook_raises_before_is_the_handlers_failure_and_after_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a")
    reported = []

    class Told(tfmq.Hook):
        def before_handle(self, message: Any) -> None:
            reported.append("before")
            if len(reported) == 1:
                raise ValueError("not yet")

        def after_handle(self, message: Any, error: BaseException | None) -> None:
            reported.append(type(error).__name__)
            raise RuntimeError("after")

    consumer = bench.open(hooks=[Told()])
    consumer.run(lambda message: consumer.stop())
    assert reported == ["before", "before", "NoneType"]
    assert "after_handle of Told raised" in caplog.text


# Partitions that go


def test_a_handler_of_minutes_keeps_its_group_and_a_partition_that_goes_is_finished_first(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a1", "a2", partition=0)
    bench.send("b1", "b2", partition=1)
    with caplog.at_level(logging.INFO):
        got: list[str] = []
        other = bench.broker.consumer(TOPIC, group=GROUP, commits="manual")

        def handler(message: Any) -> None:
            if len(bench.handled) == 1:
                got.extend(each.text for each in other.poll(0))
                bench.broker.clock.advance(minutes=5)
                got.extend(each.text for each in other.poll(1))
                assert bench.handled[0] not in got, "what is at work is not given away"

        bench.run(handler, until=2)
        for _ in range(5):
            got += [each.text for each in other.poll(30)]
    assert sorted({*bench.handled, *got}) == ["a1", "a2", "b1", "b2"]
    assert not set(bench.handled[:1]) & set(got)


def test_nothing_more_of_a_partition_that_is_to_go_begins(bench: Bench) -> None:
    """A second member gets the higher partition, of which a message is in work and two more wait."""
    bench.send("b1", "b2", "b3", partition=1)
    other = bench.broker.consumer(TOPIC, group=GROUP)

    def handler(message: Any) -> None:
        if message.text == "b1":
            assert other.poll(0) == [] and other.poll(5) == []
            assert "releases when its messages in work are finished" in other.stats()["note"]
            bench.send("a1", partition=0)

    bench.run(handler, until=2)
    assert bench.handled == ["b1", "a1"]
    got: list[str] = []
    while len(got) < 2:
        got += [each.text for each in other.poll(30)]
    assert got == ["b2", "b3"]


def test_fenced_of_a_handler_is_no_failure_of_its_message(bench: Bench) -> None:
    bench.send("a")
    bench.run(
        lambda message: fail_on("a", error=tfmq.Fenced("gone"))(message) if len(bench.handled) < 3 else None,
        until=3,
        retries=0,
    )
    assert bench.handled == ["a"] * 3
    assert bench.letters().get("a") is None or bench.letters()["a"].state == "handled"


class Secret:
    def decode(self, data: bytes) -> Any:
        raise ValueError(f"no order: {data!r}")


def test_the_traceback_of_each_failed_call_is_logged_and_begins_at_the_handler(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a")
    bench.run(fail_on("a", error=ValueError("no price")), until=2, retries=1)
    first, last = (each for each in caplog.records if "a call of its handler failed" in each.message)
    again = "orders-0 at offset 0: a call of its handler failed (ValueError); it is called again in 0.1 s."
    assert (first.message, first.name) == (again, "tfmq.consumer")
    for record in (first, last):
        assert record.exc_info is not None and str(record.exc_info[1]) == "no price"
        functions = [each.name for each in traceback.extract_tb(record.exc_info[2])]
        assert functions[0] == "handle" and "handler" in functions
    assert "is dead letter" in caplog.text
    (dead,) = (number for number, each in enumerate(caplog.records) if "is dead letter" in each.message)
    assert dead > caplog.records.index(last), "first the call that failed, then what follows from it"


def test_asyncio_logs_tracebacks_of_plain_and_of_coroutine_functions(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a", "b")

    def plain(message: Any) -> None:
        raise ValueError("plain")

    async def coroutine(message: Any) -> None:
        raise ValueError("coroutine")

    for handler in (plain, coroutine):
        consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(
            bench.broker.servers, topics=TOPIC, group=handler.__name__, dead_letters=None, retries=1
        )
        with pytest.raises(ValueError, match=handler.__name__):
            asyncio.run(consumer.run(handler))
    found = [each.exc_info for each in caplog.records if "called again" in each.message]
    shown = [traceback.extract_tb(each[2])[0].name for each in found if each]
    assert shown == ["plain", "coroutine"]


def test_without_tracebacks_only_the_class_of_an_error_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a", "b")
    bench.run(fail_on("a", error=ValueError("secret")), until=3, retries=1, run={"tracebacks": False})
    bench.run(fail_on("a", error=tfmq.Reject("secret")), until=1, run={"tracebacks": False}, group="other")
    assert "a call of its handler failed (ValueError)" in caplog.text
    assert "its handler rejected it." in caplog.text and "secret" not in caplog.text
    assert not any(each.exc_info for each in caplog.records)
    assert Failure.from_exception(ValueError("x"), 0).error == "ValueError: x"


def test_reject_and_retry_later_are_logged_with_reason_and_cause(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a", "b")

    def handler(message: Any) -> None:
        try:
            raise LookupError("the bank is closed")
        except LookupError as error:
            if message.text == "a":
                raise tfmq.RetryLater(60, "tomorrow") from error
            raise tfmq.Reject("no such account") from None

    with caplog.at_level(logging.INFO):
        bench.run(handler, until=2)
    (later,) = (each for each in caplog.records if "postponed it by 60 s: tomorrow." in each.message)
    (never,) = (each for each in caplog.records if "rejected it: no such account." in each.message)
    assert (later.levelname, never.levelname) == ("INFO", "WARNING")
    assert later.exc_info is not None and isinstance(later.exc_info[1], LookupError)
    assert not never.exc_info, "a reason needs no traceback"


def test_a_dead_letter_whose_retry_fails_is_logged_with_its_traceback(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("a")

    def handler(message: Any) -> None:
        if len(bench.handled) == 1:
            raise tfmq.RetryLater(1)
        raise ValueError("still no price")

    bench.run(handler, until=2)
    (record,) = (each for each in caplog.records if "dead letter that is handled again" in each.message)
    assert record.exc_info is not None and str(record.exc_info[1]) == "still no price"


def test_a_reason_that_may_repeat_the_words_of_a_codec_is_not_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.send("card 4711")

    def handler(message: Any) -> None:
        try:
            print(message.value)
        except tfmq.DecodeFailed as error:
            raise tfmq.Reject(f"no order: {error}") from None

    bench.run(handler, until=1, codec=Secret())
    assert "its handler rejected it." in caplog.text and "4711" not in caplog.text


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_words_of_a_codec_quote_payloads_and_are_not_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    bench.send("card 4711")

    def handler(message: Any) -> None:
        try:
            print(message.value)
        except tfmq.DecodeFailed:
            if not wrapped:
                raise
            raise RuntimeError("no order") from ExceptionGroup("all", [LookupError(), sys.exc_info()[1]])

    bench.run(handler, until=1, retries=0, codec=Secret())
    assert "a call of its handler failed" in caplog.text and "4711" not in caplog.text
