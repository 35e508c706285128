"""The asyncio face of transactions over real sockets: `async with`, tasks, cancellation, checks."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import tfmq
from tests.client.fake_broker import HOLD, LOSE, FakeBroker, listening
from tests.scale import scaled
from tests.transaction_stories import commit_by_leaving, drive_through_both_phases, send_in_transactions_and_plainly
from tfmq import aio, transactions
from tfmq.aio import checked_in
from tfmq.client.transaction.check_back import InDoubt
from tfmq.errors import TransactionRolledBack, TransactionState
from tfmq.protocol.commands import Produce, Transact

SECONDS = 20.0


def play(story: Callable[[aio.Producer, FakeBroker], Awaitable[Any]], **arguments: Any) -> FakeBroker:
    broker = FakeBroker()
    with listening(broker) as servers:

        async def bounded() -> None:
            async with aio.Producer(servers, **arguments) as made:
                await asyncio.wait_for(story(made, broker), SECONDS)

        asyncio.run(bounded())
    return broker


async def until(condition: Callable[[], Any]) -> None:
    """Wait until it holds, bounded."""
    for _ in range(int(SECONDS / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")


def test_a_plain_with_says_what_to_write() -> None:
    async def story(producer: aio.Producer, broker: FakeBroker) -> None:
        sentence = r"write `async with producer\.transaction\(\) as tx:`, not `with`"
        with pytest.raises(TypeError, match=sentence), producer.transaction():
            raise AssertionError("not entered")

    play(story)


def test_leaving_with_commits_and_gives_handles() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        await commit_by_leaving(made, broker)

    assert play(story).payloads("orders") == [b"1", b"2", b"3"]


@pytest.mark.parametrize("error", [KeyError("mine"), asyncio.CancelledError("mine")])
def test_an_exception_rolls_back(error: BaseException) -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        with pytest.raises(type(error)) as caught:
            async with made.transaction() as tx:
                delivery = await tx.send("orders", b"1")
                raise error
        assert caught.value is error and tx.state == "rolled_back"
        assert isinstance(delivery.error(), TransactionRolledBack)

    assert play(story).payloads("orders") == []


def test_a_cancelled_task_rolls_back_what_it_had_begun() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        async def work() -> None:
            async with await made.begin("order-42") as tx:
                await tx.send("orders", b"1")
                await asyncio.sleep(SECONDS)

        task = asyncio.create_task(work())
        await until(lambda: broker.transactions)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert broker.states() == ["rolled_back"]

    play(story)


def test_a_commit_that_is_cancelled_is_unknown_and_can_go_on() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        tx = made.transaction()
        await tx.send("orders", b"1")
        broker.plan(Transact, HOLD)
        task = asyncio.create_task(tx.commit())
        await until(lambda: broker.held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tx.state == "unknown"
        assert await tx.commit() == "committed"

    assert play(story).payloads("orders") == [b"1"]


def test_two_phases() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        tx = await made.begin(xid="order-42", timeout=60)
        await tx.send("orders", b"1")
        assert await tx.prepare() == "prepared"
        found = await made.resume("order-42")
        assert (found.xid, found.state) == ("order-42", "prepared")
        assert await found.commit() == await tx.commit() == "committed"
        with pytest.raises(TransactionState):
            await tx.send("orders", b"2")

    assert play(story).payloads("orders") == [b"1"]


def test_many_tasks_have_transactions_at_once_beside_plain_sends() -> None:
    count = scaled(200) + 5

    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        broker.plan(Transact, *([None] * 20 + [LOSE]) * 3)

        await asyncio.gather(*[send_in_transactions_and_plainly(made, number, count) for number in range(8)])

    broker = play(story)
    found = broker.payloads("orders")
    assert len(found) == len(set(found)) == 8 * count * 2
    plain = {each.producer_id for each in broker.requests if isinstance(each, Produce)}
    assert plain.isdisjoint(each.producer_id for each in broker.requests if isinstance(each, Transact))


def test_large_ones_go_while_they_grow_and_wait_for_room() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        async with made.transaction() as tx:
            await tx.send_many("orders", (bytes(10_000) for _ in range(3000)))
            assert broker.transactions and broker.payloads("orders") == []

    assert len(play(story).payloads("orders")) == 3000


def test_what_grows_goes_while_its_task_is_elsewhere() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        async with made.transaction() as tx:
            for _ in range(150):
                await tx.send("orders", bytes(10_000))
            await until(lambda: sum(isinstance(each, Produce) for each in broker.requests) >= 4)
            for _ in range(60):
                await tx.send("orders", bytes(10_000))
            await until(lambda: sum(isinstance(each, Produce) for each in broker.requests) >= 6)

    assert len(play(story).payloads("orders")) == 210


def test_what_a_loop_left_open_is_given_up() -> None:
    broker = FakeBroker()
    with listening(broker) as servers:

        async def story() -> aio.Producer:
            made = aio.Producer(servers)
            tx = made.transaction()
            await tx.send("orders", b"1")
            kept.append(tx)
            return made

        kept: list[aio.Transaction] = []
        made = asyncio.run(story())
        made._core.owner.close_at_exit(1.0)
        assert kept[0].state == "rolled_back"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_check_may_be_a_coroutine_function(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.client.transaction.check_back.POLL_SECONDS", 0.02)

    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        async def later(transaction: InDoubt) -> str:
            await made.send("log", transaction.xid)
            return "commit"

        def at_once(transaction: InDoubt) -> str:
            return "commit"

        check = later if asynchronous else at_once
        assert made.transaction_check(check) is check
        tx = await made.begin("order-42")
        await tx.send("orders", b"1")
        await tx.prepare()
        await until(lambda: broker.parked)
        broker.ask("order-42", 1)
        await until(lambda: broker.states() == ["committed"])

    broker = play(story, group="shop")
    assert broker.payloads("orders") == [b"1"]
    assert broker.payloads("log") == ([b"order-42"] if asynchronous else [])


def test_a_plain_function_is_asked_as_it_is() -> None:
    def check(transaction: InDoubt) -> None:
        return None

    assert checked_in(aio.Producer()._driver, check) is check


def test_an_asynchronous_generator_that_is_thrown_away_rolls_back() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        async def generating() -> AsyncIterator[None]:
            async with await made.begin("order-42") as tx:
                await tx.send("orders", b"1")
                yield

        generator = generating()
        await anext(generator)
        await generator.aclose()  # type: ignore[attr-defined]
        await until(lambda: broker.states() == ["rolled_back"])

    play(story)


def test_closing_logs_what_it_rolled_back() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        tx = await made.begin("order-42")
        await tx.send("orders", b"1")
        with pytest.raises(TransactionRolledBack):
            await made.close()
        assert tx.state == "rolled_back"

    assert play(story).states() == ["rolled_back"]


def test_both_api_variants_have_the_same_names_parameters_and_docs() -> None:
    ours = {name: each for name, each in vars(transactions.XAResource).items() if not name.startswith("_")}
    theirs = {name: each for name, each in vars(aio.XAResource).items() if not name.startswith("_")}
    assert ours.keys() == theirs.keys()
    for name, member in ours.items():
        mine, other = inspect.signature(member), inspect.signature(theirs[name])
        assert list(mine.parameters.values()) == list(other.parameters.values()), name
        assert theirs[name].__doc__ == member.__doc__, name


@pytest.mark.parametrize("wrong", [None, tfmq.Producer])
def test_what_is_no_asynchronous_producer_is_refused_by_name(wrong: Any) -> None:
    with listening(FakeBroker()) as servers:
        given = wrong and wrong(servers)
        with pytest.raises(TypeError, match=r"tfmq\.aio\.XAResource needs a tfmq\.aio\.Producer, not"):
            aio.XAResource(given)
        if given:
            given.close()


def test_a_transaction_manager_drives_it_through_both_phases() -> None:
    async def story(servers: str) -> None:
        async with aio.Producer(servers) as producer:
            await drive_through_both_phases(producer, aio.XAResource)

    broker = FakeBroker()
    with listening(broker) as servers:
        asyncio.run(asyncio.wait_for(story(servers), 20))
    assert broker.payloads("orders") == [b"1"]
