"""`tfmq.twisted` against a broker that is killed and started again: nothing is lost, nothing is there twice."""

from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet.defer import Deferred, DeferredList, ensureDeferred
from twisted.internet.threads import deferToThreadPool

from tests import reactor as rig
from tests.e2e.reading import payloads
from tests.scale import scaled
from tfmq import twisted
from tools.rigs.live_server import LiveServer

SECONDS = 120.0
KILLS = max(2, scaled(20))
MESSAGES = 50 * KILLS


@pytest.mark.long
def test_sends_transactions_and_readers_go_on_over_kills_of_the_broker(broker: LiveServer, topic: str) -> None:
    """Each message is sent while the broker dies, read in a group, and sent on with its offset in one transaction."""
    topic = topic[:40]
    read: list[str] = []

    async def send(producer: twisted.Producer, reactor: Any) -> None:
        sent = []
        for number in range(MESSAGES):
            sent.append(producer.send(topic, f"{number}"))
            if number % 10 == 0:
                await rig.pause(reactor, 0.001)
        results = await DeferredList(sent, fireOnOneErrback=True, consumeErrors=True)
        assert all(result.durability == "synced" for _, result in results)

    async def pipe(producer: twisted.Producer, reactor: Any) -> None:
        made: twisted.Consumer[Any] = twisted.Consumer(
            broker.address, topics=topic, group=topic, commits="manual", timeout=SECONDS, reactor=reactor
        )
        async with made as consumer:
            async for message in consumer:
                async with producer.transaction() as tx:
                    await tx.send(f"{topic}-on", message.payload)
                    tx.commit_offsets(consumer)
                read.append(message.text)
                if len(read) == MESSAGES:
                    consumer.stop()

    async def kill(reactor: Any) -> None:
        def at_once() -> None:
            broker.kill()
            broker.start()

        for number in range(KILLS):
            while len(read) < (number + 0.5) * MESSAGES / KILLS:
                await rig.pause(reactor, 0.002)
            await deferToThreadPool(reactor, reactor.getThreadPool(), at_once)

    async def story(reactor: Any) -> None:
        async with (
            twisted.Producer(broker.address, timeout=SECONDS, reactor=reactor) as producer,
            twisted.Admin(broker.address, timeout=SECONDS, reactor=reactor) as admin,
        ):
            await admin.create_topic(topic)
            works: list[Callable[[], Any]] = [
                lambda: send(producer, reactor),
                lambda: pipe(producer, reactor),
                lambda: kill(reactor),
            ]
            running: list[Deferred[None]] = [ensureDeferred(work()) for work in works]
            await DeferredList(running, fireOnOneErrback=True, consumeErrors=True)
            assert (await admin.status())["listen"] == broker.address

    rig.play(story, seconds=SECONDS)
    wanted = [b"%d" % number for number in range(MESSAGES)]
    assert payloads(broker.address, topic) == wanted
    assert payloads(broker.address, f"{topic}-on") == wanted
    assert read == [text.decode() for text in wanted]
