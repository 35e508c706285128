"""The Twisted face of transactions over real sockets: `async with`, callbacks, cancellation, checks, offsets."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, gatherResults, inlineCallbacks

import tfmq
from tests import reactor as rig
from tests.client.fake_broker import HOLD, LOSE, FakeBroker, listening
from tests.client.handling_rig import Bench
from tests.reactor import SECONDS, pause
from tests.scale import scaled
from tests.transaction_stories import commit_by_leaving, drive_through_both_phases, send_in_transactions_and_plainly
from tfmq import twisted
from tfmq.client.transaction.check_back import InDoubt
from tfmq.errors import TransactionRolledBack, TransactionState
from tfmq.protocol.commands import Transact
from tfmq.testing.broker import SimulatedBroker
from tfmq.twisted import checked_in

Story = Callable[[twisted.Producer, FakeBroker, Any], Coroutine[Any, Any, Any]]


def play(story: Story, **arguments: Any) -> FakeBroker:
    broker = FakeBroker()
    with listening(broker) as servers:

        async def whole(reactor: Any) -> None:
            async with twisted.Producer(servers, reactor=reactor, **arguments) as made:
                await story(made, broker, reactor)

        rig.play(whole)
    return broker


async def until(reactor: Any, condition: Callable[[], Any]) -> None:
    """Wait until it holds, bounded."""
    for _ in range(int(SECONDS / 0.005)):
        if condition():
            return
        await pause(reactor, 0.005)
    raise AssertionError("it never came")


def test_a_plain_with_says_what_to_write() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        sentence = r"write `async with producer\.transaction\(\) as tx:`, not `with`"
        with pytest.raises(TypeError, match=sentence), made.transaction():
            raise AssertionError("not entered")

    play(story)


def test_leaving_with_commits_and_gives_handles() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        await commit_by_leaving(made, broker)

    assert play(story).payloads("orders") == [b"1", b"2", b"3"]


def test_callbacks_go_through_both_phases() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        def send(tx: twisted.Transaction) -> Deferred[str]:
            return tx.send("orders", b"1").addCallback(lambda _: tx.prepare())

        assert await made.begin(xid="order-42", timeout=60).addCallback(send) == "prepared"
        found = await made.resume("order-42")
        assert (found.xid, found.state) == ("order-42", "prepared")
        assert await found.commit() == "committed"
        with pytest.raises(TransactionState):
            await found.send("orders", b"2")

    assert play(story).payloads("orders") == [b"1"]


def test_an_exception_rolls_back() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        with pytest.raises(KeyError):
            async with made.transaction() as tx:
                delivery = await tx.send("orders", b"1")
                raise KeyError("mine")
        assert tx.state == "rolled_back"
        assert isinstance(delivery.error(), TransactionRolledBack)

    assert play(story).payloads("orders") == []


def test_a_cancelled_deferred_rolls_back_what_it_had_begun() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        async def work() -> None:
            async with await made.begin("order-42") as tx:
                await tx.send("orders", b"1")
                await Deferred()

        working = ensureDeferred(work())
        await until(reactor, lambda: broker.transactions)
        await pause(reactor, 0.02)
        working.cancel()
        with pytest.raises(CancelledError):
            await working
        assert broker.states() == ["rolled_back"]

    play(story)


def test_a_commit_that_is_cancelled_is_unknown_and_can_go_on() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        tx = made.transaction()
        await tx.send("orders", b"1")
        broker.plan(Transact, HOLD)
        committing = tx.commit()
        await until(reactor, lambda: broker.held)
        committing.cancel()
        with pytest.raises(CancelledError):
            await committing
        assert tx.state == "unknown"
        assert await tx.commit() == "committed"

    assert play(story).payloads("orders") == [b"1"]


def test_many_callers_have_transactions_at_once_beside_plain_sends() -> None:
    count = scaled(200) + 5

    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        broker.plan(Transact, *([None] * 20 + [LOSE]) * 3)

        await gatherResults(
            [ensureDeferred(send_in_transactions_and_plainly(made, number, count)) for number in range(8)]
        )

    found = play(story).payloads("orders")
    assert len(found) == len(set(found)) == 8 * count * 2


@pytest.mark.parametrize("kind", ["coroutine", "inline callbacks", "plain"])
def test_the_check_may_run_in_the_reactor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.client.transaction.check_back.POLL_SECONDS", 0.02)

    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        async def later(transaction: InDoubt) -> str:
            await made.send("log", transaction.xid)
            return "commit"

        @inlineCallbacks  # type: ignore[untyped-decorator]
        def inline(transaction: InDoubt) -> Any:
            yield made.send("log", transaction.xid)
            return "commit"

        def at_once(transaction: InDoubt) -> str:
            return "commit"

        check: Any = {"coroutine": later, "inline callbacks": inline, "plain": at_once}[kind]
        assert made.transaction_check(check) is check
        tx = await made.begin("order-42")
        await tx.send("orders", b"1")
        await tx.prepare()
        await until(reactor, lambda: broker.parked)
        broker.ask("order-42", 1)
        await until(reactor, lambda: broker.states() == ["committed"])

    broker = play(story, group="shop")
    assert broker.payloads("orders") == [b"1"]
    assert broker.payloads("log") == ([] if kind == "plain" else [b"order-42"])


def test_a_plain_function_is_asked_as_it_is() -> None:
    def check(transaction: InDoubt) -> None:
        return None

    assert checked_in(twisted.Producer()._driver, check) is check


def test_offsets_are_committed_with_the_messages(tmp_path: Path) -> None:
    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send("a", "b")

        async def story(reactor: Any) -> None:
            producer = twisted.Producer(broker.servers, reactor=reactor)
            consumer = twisted.Consumer(
                broker.servers, topics="orders", group="billing", commits="manual", reactor=reactor
            )
            (message,) = await consumer.poll(max_messages=1)
            async with producer.transaction() as tx:
                await tx.send("bills", message.payload)
                tx.commit_offsets(consumer)
            await consumer.close()
            await producer.close()

        rig.play(story)
        assert [message.text for message in broker.sent("bills")] == ["a"]
        assert bench.saved() == bench.place("b")


@pytest.mark.parametrize("wrong", [None, tfmq.Producer])
def test_what_is_no_producer_of_twisted_is_refused_by_name(wrong: Any) -> None:
    given = wrong and wrong("127.0.0.1:1")
    with pytest.raises(TypeError, match=r"tfmq\.twisted\.XAResource needs a tfmq\.twisted\.Producer, not"):
        twisted.XAResource(given)
    if given:
        given.close()


def test_a_transaction_manager_drives_it_through_both_phases() -> None:
    async def story(reactor: Any) -> None:
        async with twisted.Producer(servers, reactor=reactor) as producer:
            await drive_through_both_phases(producer, twisted.XAResource)

    broker = FakeBroker()
    with listening(broker) as servers:
        rig.play(story)
    assert broker.payloads("orders") == [b"1"]
