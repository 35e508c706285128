"""The asyncio driver in a simulation: real event loops, virtual time, no sockets."""

import asyncio
import inspect
import time
from collections.abc import Iterator
from typing import Any

import pyarrow
import pytest

import tfmq.aio
from tests.testing.simulation_parts import new_link, new_world
from tfmq.client.connection.requests import request
from tfmq.client.operation import Event, run_work
from tfmq.errors import NotAllowed, TimedOut
from tfmq.protocol.commands import Ping
from tfmq.testing import drivers
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.drivers import SimulatedAsyncDriver
from tfmq.testing.simulation import NothingComes, Simulation


@pytest.fixture
def world() -> Simulation:
    return new_world()


def new_driver(world: Simulation) -> SimulatedAsyncDriver:
    return SimulatedAsyncDriver(new_link(world), world)


def test_a_round_trip_takes_no_time(world: Simulation) -> None:
    driver = new_driver(world)
    before = world.clock.now
    assert asyncio.run(driver.run(request(driver.link, Ping()))).time_ms == world.clock.wall_ms()
    assert world.clock.now == before


def test_a_wait_with_an_end_lets_time_go_on_to_it_and_no_further(world: Simulation) -> None:
    driver = new_driver(world)
    before, real = world.clock.monotonic(), time.monotonic()
    assert not asyncio.run(driver.wait((Event(),), 3600))
    assert world.clock.monotonic() == pytest.approx(before + 3600, abs=2e-6)
    assert time.monotonic() - real < 60


def test_time_stands_still_while_any_task_has_something_to_do(world: Simulation) -> None:
    """A caller that waits for a second gets what another task brings at once, however often that one is put off."""
    driver = new_driver(world)
    flag = Event()

    async def busy() -> None:
        for _ in range(drivers.IDLE_TURNS - 10):
            await asyncio.sleep(0)
        flag.complete()

    async def both() -> bool:
        done, _ = await asyncio.gather(driver.wait((flag,), 1.0), busy())
        return done

    before = world.clock.now
    assert asyncio.run(both())
    assert world.clock.now == before


def test_the_nearest_of_several_ends_comes_first(world: Simulation) -> None:
    driver = new_driver(world)
    ended: list[tuple[str, float]] = []
    start = world.clock.monotonic()

    async def waits(word: str, seconds: float) -> None:
        await driver.wait((Event(),), seconds)
        ended.append((word, round(world.clock.monotonic() - start, 3)))

    async def all_of_them() -> None:
        await asyncio.gather(waits("minute", 60), waits("second", 1), waits("hour", 3600))

    asyncio.run(all_of_them())
    assert ended == [("second", 1.0), ("minute", 60.0), ("hour", 3600.0)]


def test_a_wait_that_nothing_can_end_raises(world: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "REAL_SECONDS", 0.05)
    driver = new_driver(world)
    before = world.clock.now
    with pytest.raises(NothingComes, match="wait for ever"):
        asyncio.run(driver.wait((Event(),)))
    assert world.clock.now == before


def test_it_is_not_reported_while_another_wait_goes_on(world: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "REAL_SECONDS", 0.05)
    driver = new_driver(world)
    flag = Event()

    async def another() -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + 3 * drivers.REAL_SECONDS
        while loop.time() < end:
            await driver.wait((Event(),), 10)
        flag.complete()

    async def both() -> None:
        await asyncio.gather(driver.wait((flag,)), another())

    asyncio.run(both())


def test_work_in_threads_is_waited_for_in_real_time(world: Simulation) -> None:
    driver = new_driver(world)

    def slow() -> str:
        time.sleep(0.05)
        return "done"

    async def both() -> tuple[str, bool]:
        started = asyncio.ensure_future(driver.wait((Event(),), 5))
        return await driver.run(run_work(driver.run_in_threads, slow)), started.done() and await started

    before = world.clock.now
    done, waited = asyncio.run(both())
    assert (done, waited, world.clock.now) == ("done", False, before)


def test_what_such_work_raises_arrives(world: Simulation) -> None:
    driver = new_driver(world)

    def fails() -> None:
        raise KeyError("x")

    async def does() -> None:
        await driver.run(run_work(driver.run_in_threads, fails))

    with pytest.raises(KeyError):
        asyncio.run(does())


def test_without_a_loop_nothing_of_it_is_due(world: Simulation) -> None:
    driver = new_driver(world)
    driver.timers.add(1, lambda: pytest.fail("nobody runs it"))
    assert driver.next_time() == float("inf")
    world.clock.advance(hours=1)
    assert not driver.run_due()


def test_another_loop_is_refused_while_the_first_one_runs(world: Simulation) -> None:
    driver = new_driver(world)
    asyncio.run(driver.run(request(driver.link, Ping())))
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(driver.run(request(driver.link, Ping())))
        with pytest.raises(NotAllowed, match="another event loop"):
            asyncio.run(driver.run(request(driver.link, Ping())))
    finally:
        loop.close()


CLIENTS = {
    "producer": tfmq.aio.Producer,
    "consumer": tfmq.aio.Consumer,
    "tx": tfmq.aio.Transaction,
    "xa": tfmq.aio.XAResource,
    "admin": tfmq.aio.Admin,
}
CHANGING = {"send_nowait", "transaction", "transaction_check", "commit_offsets", "end", "__anext__"}
"""Methods that change something, although they are no coroutine functions or have no public name."""
METHODS = [
    (client, name)
    for client, kind in CLIENTS.items()
    for name, method in inspect.getmembers(kind, inspect.isfunction)
    if name in CHANGING
    or (inspect.iscoroutinefunction(method) and (not name.startswith("_") or name == "__aexit__"))
    or (client, name) == ("tx", "__aenter__")
]
ARGUMENTS: dict[str, Any] = {
    "topic": "orders",
    "key": b"key",
    "name": "orders",
    "payload": b"from another loop",
    "payloads": [b"from another loop"],
    "xid": "order-1",
    "partition": 0,
    "partitions": 2,
    "offset": 1,
    "place": "earliest",
    "settings": {"retention": "1h"},
    "cron": "0 * * * *",
    "edges": [60],
    "sequence": 1,
    "run": "run-1",
    "transactions": [("order-1", 1)],
    "rows": 1,
    "function": lambda transaction: "commit",
    "kind": None,
    "error": None,
    "trace": None,
    "table": pyarrow.table({"payload": [b"from another loop"]}),
}

OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("producer", "begin"): {"xid": "order-2"},
    ("consumer", "seek"): {"offset": 0},
}


@pytest.fixture
def own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize(("client", "name"), METHODS)
def test_a_method_that_another_loop_calls_is_refused_and_changes_nothing(
    client: str, name: str, own_loop: asyncio.AbstractEventLoop
) -> None:
    run = own_loop.run_until_complete
    with SimulatedBroker() as broker:
        producer = tfmq.aio.Producer(broker.servers, group="shop")
        consumer = tfmq.aio.Consumer(broker.servers, topics="orders", group="billing", commits="manual")
        admin = tfmq.aio.Admin(broker.servers)

        async def prepare() -> tuple[tfmq.aio.Transaction, str]:
            await producer.send("orders", b"first")
            delayed = await producer.send("orders", b"delayed", delay=86400)
            tx = await producer.begin("order-1")
            await tx.send("orders", b"third")
            assert len(await consumer.poll()) == 1
            await admin.ping()
            return tx, str(delayed.delayed)

        async def broker_state() -> list[Any]:
            return [
                await admin.topics(),
                await admin.group("billing"),
                [each.state for each in await admin.transactions(["open", "prepared"])],
                await admin.delayed(),
                await admin.schedules(),
                await consumer.position("orders", 0),
                await consumer.committed("orders", 0),
            ]

        tx, handle = run(prepare())
        made = {"producer": producer, "consumer": consumer, "tx": tx, "xa": producer.xa(), "admin": admin}
        method = getattr(made[client], name)
        given = {**ARGUMENTS, "handle": handle, "consumer": consumer}
        required = [
            given[each.name] for each in inspect.signature(method).parameters.values() if each.default is each.empty
        ]

        async def call() -> None:
            result = method(*required, **OPTIONS.get((client, name), {}))
            if inspect.isawaitable(result):
                await result

        before = run(broker_state()), tx.state, len(producer._core.transactions)
        with pytest.raises(NotAllowed, match="another event loop") as refused:
            asyncio.run(call())
        assert refused.value.outcome == "not done"
        assert (run(broker_state()), tx.state, len(producer._core.transactions)) == before

        async def go_on() -> None:
            """The clients work as if the call had not been: nothing is queued, and none is closed."""
            await producer.send("orders", b"second")
            await tx.commit()
            assert (await consumer.poll())[0].payload == b"second"
            await consumer.close()
            await producer.close()
            await admin.close()

        run(go_on())
        assert [message.payload for message in broker.sent("orders")] == [b"first", b"second", b"third"]


def test_a_close_reaches_the_broker(world: Simulation) -> None:
    driver = new_driver(world)

    async def does() -> None:
        await driver.run(request(driver.link, Ping()))
        assert len(world.server._ends) == 1
        await driver.close()

    asyncio.run(does())
    assert world.server._ends == [] and world.clients == []


def test_tasks_share_one_broker() -> None:
    with SimulatedBroker() as broker:

        async def program() -> list[str]:
            async with (
                tfmq.aio.Producer(broker.servers) as producer,
                tfmq.aio.Consumer(broker.servers, topics="orders", group="billing") as consumer,
            ):
                reading = asyncio.ensure_future(consumer.poll(timeout=60))
                await asyncio.gather(*(producer.send("orders", f"order {number}") for number in range(20)))
                found = await reading
                while len(found) < 20:
                    found += await consumer.poll(timeout=1)
                async with producer.transaction() as tx:
                    await tx.send("orders", "together")
                return [message.text for message in found + await consumer.poll()]

        assert sorted(asyncio.run(program())) == sorted([*(f"order {n}" for n in range(20)), "together"])


def test_what_the_broker_never_answers_fails_at_its_time() -> None:
    with SimulatedBroker() as broker:

        async def program() -> None:
            async with tfmq.aio.Producer(broker.servers, timeout=30) as producer:
                await producer.send("orders", "first")
                broker.stop()
                with pytest.raises((TimedOut, tfmq.ConnectionFailed)):
                    await producer.send("orders", "second")

        before = broker.clock.monotonic()
        asyncio.run(program())
        assert 29 < broker.clock.monotonic() - before < 62


def test_a_coroutine_is_asked_about_a_transaction_that_was_not_ended() -> None:
    with SimulatedBroker() as broker:

        async def program() -> list[str]:
            asked: list[str] = []
            async with tfmq.aio.Producer(broker.servers, group="shop") as producer:

                @producer.transaction_check
                async def check(transaction: Any) -> str:
                    await asyncio.sleep(0)
                    asked.append(transaction.xid)
                    return "commit"

                tx = await producer.begin("order-1")
                await tx.send("orders", "x")
                await tx.prepare()
                admin = tfmq.aio.Admin(broker.servers)
                broker.clock.advance(minutes=10)
                for _ in range(1000):
                    if (await admin.transaction("order-1")).state == "committed":
                        break
                    await asyncio.sleep(0.001)
                await admin.close()
            return asked

        assert asyncio.run(program()) == ["order-1"]
        assert [message.text for message in broker.sent("orders")] == ["x"]
