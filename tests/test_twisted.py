"""The Twisted faces: the blocking ones' names and promises, with Deferreds."""

import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, gatherResults, inlineCallbacks

import tfmq
from tests import reactor as rig
from tests.client.fake_broker import CUT, HOLD, LOSE, FakeBroker, listening
from tests.reactor import pause
from tests.test_aio import CALLS, broker
from tfmq import twisted
from tfmq.errors import Busy, Closed, ConnectionFailed, DeliveryFailed, DiskFull, NotAllowed
from tfmq.message import Message
from tfmq.protocol.commands import Produce

Story = Callable[[twisted.Producer, FakeBroker, Any], Coroutine[Any, Any, Any]]


def play(story: Story, **arguments: Any) -> FakeBroker:
    broker = FakeBroker(arguments.pop("partitions", 1))
    with listening(broker) as servers:

        async def whole(reactor: Any) -> None:
            async with twisted.Producer(servers, reactor=reactor, **arguments) as made:
                await story(made, broker, reactor)

        rig.play(whole)
    return broker


def test_a_send_is_acknowledged() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        sent = made.send("orders", b"hello", key="42")
        assert isinstance(sent, Deferred)
        result = await sent
        assert (result.offset, result.durability) == (0, "synced")

    assert play(story).payloads("orders") == [b"hello"]


def test_callbacks_get_the_result() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        offset = await made.send("orders", b"hello").addCallback(lambda result: result.offset)
        assert offset == 0

    play(story)


def test_it_is_waited_for_in_inline_callbacks() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        @inlineCallbacks  # type: ignore[untyped-decorator]
        def two() -> Any:
            first = yield made.send("orders", b"a")
            second = yield made.send("orders", b"b")
            return first.offset, second.offset

        first, second = await two()
        assert first < second

    play(story)


def test_sends_of_many_callers_share_batches() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        await made.send("orders", b"first")
        results = await gatherResults([made.send("orders", b"%d" % n) for n in range(1000)])
        assert len({each.offset for each in results}) == 1000
        assert len(broker.logs["orders", 0]) < 20

    broker = play(story, linger_ms=60_000)
    assert broker.payloads("orders")[1:] == [b"%d" % n for n in range(1000)]


def test_send_nowait_gives_an_awaitable_handle() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        delivery = made.send_nowait("orders", b"a", key="k")
        with pytest.raises(NotAllowed, match="await"):
            delivery.result()
        assert (await delivery).offset == 0
        heard: Deferred[Any] = Deferred()
        made.send_nowait("orders", Message(b"b")).add_callback(heard.callback)
        assert (await heard).done()

    assert play(story).payloads("orders") == [b"a", b"b"]


def test_a_full_buffer_is_busy_at_once_or_waited_for() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        await made.send("orders", b"x")
        broker.plan(Produce, *[HOLD] * 20)
        with pytest.raises(Busy, match="wait for something first"):
            for _ in range(1000):
                made.send_nowait("orders", b"x" * 900)
        waiting = made.send("orders", b"last")
        await pause(reactor, 0.05)
        assert not waiting.called
        broker.plans.clear()
        broker.release()
        await waiting

    assert play(story, buffer_bytes=50_000, batch_bytes=10_000).payloads("orders")[-1] == b"last"


def test_many_at_once() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        results = await made.send_many("orders", (b"%d" % n for n in range(10_000)))
        assert sum(each.count for each in results) == 10_000

    assert play(story).payloads("orders") == [b"%d" % n for n in range(10_000)]


def test_a_cancelled_send_leaves_the_producer_usable_and_is_stored_once() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        await made.send("orders", b"a")
        broker.plan(Produce, HOLD)
        sent = made.send("orders", b"b")
        await pause(reactor, 0.05)
        sent.cancel()
        with pytest.raises(CancelledError):
            await sent
        broker.release()
        await made.send("orders", b"c")

    assert play(story).payloads("orders") == [b"a", b"b", b"c"]


def test_a_lost_answer_doubles_nothing() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        broker.plan(Produce, LOSE, None, LOSE)
        for number in range(5):
            await made.send("orders", b"%d" % number)

    assert play(story).payloads("orders") == [b"%d" % n for n in range(5)]


def test_what_is_wrong_with_arguments_fails_the_deferred() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        for wrong in (made.send("orders", 7), made.send("orders", b"x", partition="1")):  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                await wrong

    play(story)


def test_flush_and_close_raise_unread_failures() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        await made.send("orders", b"a")
        broker.plan(Produce, DiskFull("full", outcome="not done"))
        made.send_nowait("orders", b"b")
        with pytest.raises(DeliveryFailed, match="1 message could not be delivered"):
            await made.flush()
        await made.close()
        with pytest.raises(Closed):
            await made.send("orders", b"c")

    play(story)


def test_a_broker_that_is_not_there_is_an_error_with_a_sentence() -> None:
    async def story(reactor: Any) -> None:
        admin = twisted.Admin("127.0.0.1:1", timeout=0.5, reactor=reactor)
        with pytest.raises(ConnectionFailed, match="start tfmq-server"):
            await admin.ping()
        await admin.close()

    rig.play(story)


def test_a_connection_that_the_broker_ends_is_made_again() -> None:
    async def story(made: twisted.Producer, broker: FakeBroker, reactor: Any) -> None:
        await made.send("orders", b"a")
        broker.plan(Produce, CUT)
        await made.send("orders", b"b")
        assert made.stats()["connections"] == 2

    assert play(story).payloads("orders") == [b"a", b"b"]


@pytest.mark.long
def test_a_producer_that_was_not_closed_is_dropped_at_the_end_with_a_log() -> None:
    broker = FakeBroker()
    broker.plan(Produce, HOLD)
    program = (
        "import sys, tfmq.twisted as t\n"
        "from twisted.internet.task import deferLater, react\n"
        "async def main(reactor):\n"
        "    made = t.Producer(sys.argv[1], timeout=20)\n"
        "    made.send_nowait('orders', b'x')\n"
        "    await deferLater(reactor, 0.3)\n"
        "react(main)\n"
    )
    with listening(broker) as servers:
        ended = subprocess.run([sys.executable, "-c", program, servers], capture_output=True, text=True, timeout=60)
    assert "1 message was not delivered when the program ended" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_making_one_needs_no_reactor_and_installs_none() -> None:
    program = (
        "import sys, tfmq.twisted as t\n"
        "t.Producer(), t.Consumer(topics='orders'), t.Admin()\n"
        "assert 'twisted.internet.reactor' not in sys.modules\n"
        "assert 'twisted.internet.epollreactor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_each_method_asks_the_same_and_gives_the_same_as_the_blocking_one() -> None:
    one, other = broker(), broker()
    with listening(one) as servers, tfmq.Admin(servers) as admin:
        expected = [getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    async def ask(reactor: Any) -> list[Any]:
        async with twisted.Admin(servers, reactor=reactor) as admin:
            return [await getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    with listening(other) as servers:
        found = rig.play(ask)
    assert found == expected
    assert other.requests[1:] == one.requests[1:], "behind hello"
