"""asyncio: whatever is cancelled, and wherever it waits, leaves a client that goes on."""

import asyncio
from collections import Counter
from typing import Any

from tests.scale import SEED, scaled, seeded
from tfmq import aio
from tools.rigs.live_server import LiveServer

TURNS = max(150, scaled(3_000))
PASSES_MAX = 15
"""Of the loop: each call waits some times before it sleeps on the socket."""
SLEEP_SECONDS = 0.004
"""About as long as the longest call takes."""
ENDS_CHANCE = 0.2
"""That nothing is cancelled after all."""
SECONDS = 60.0
POLL_SECONDS = 0.02


class Story:
    """One producer, one consumer and one admin; what was sent, what was reported of it, and what was handed out."""

    def __init__(self, servers: str, topic: str) -> None:
        self.topic, self.chance = topic, seeded("cancelling")
        self.producer = aio.Producer(servers)
        self.consumer: aio.Consumer[Any] = aio.Consumer(servers, topics=topic, group=topic, commits="manual")
        self.admin = aio.Admin(servers)
        self.sent: list[str] = []
        self.acknowledged: set[str] = set()
        self.found: list[str] = []
        self.saved: set[str] = set()
        """Of these, what will not come again."""
        self.back: Counter[str] = Counter()
        """How often a transaction with their offset was rolled back, which hands them out again."""
        self.ends: Counter[tuple[str, bool]] = Counter()

    # What may be cancelled

    async def send(self) -> None:
        text = self.text()
        await self.producer.send(self.topic, text)
        self.acknowledged.add(text)

    async def transact(self) -> None:
        texts, found = [self.text(), self.text()], set(self.found)
        tx = self.producer.transaction()
        try:
            async with tx:
                for text in texts:
                    await tx.send(self.topic, text)
                tx.commit_offsets(self.consumer)
        finally:
            if tx.state == "rolled_back":
                self.back.update(found - self.saved)
        self.acknowledged.update(texts)
        self.saved = found

    async def flush(self) -> None:
        await self.producer.flush()

    async def poll(self) -> None:
        for message in await self.consumer.poll(SECONDS if len(self.found) < len(self.acknowledged) else POLL_SECONDS):
            self.found.append(message.text or "")

    async def commit(self) -> None:
        await self.consumer.commit()
        self.saved = set(self.found)

    async def ask(self) -> None:
        await self.consumer.committed(self.topic, 0)
        await self.consumer.lag()
        await self.admin.status()

    def text(self) -> str:
        self.sent.append(f"{len(self.sent)}")
        return self.sent[-1]

    # What happens

    async def run(self) -> None:
        await self.send()
        await self.poll()
        calls = [self.send, self.transact, self.flush, self.poll, self.commit, self.ask]
        for _ in range(TURNS):
            call = self.chance.choice(calls)
            self.ends[call.__name__, await self.is_cancelled(call())] += 1
        for call in calls:  # all of them go on
            await asyncio.wait_for(call(), SECONDS)
        while not self.acknowledged <= set(self.found):
            await asyncio.wait_for(self.poll(), SECONDS)
        for client in (self.consumer, self.producer, self.admin):
            await client.close()

    async def is_cancelled(self, work: Any) -> bool:
        """Begin it, cancel it after some passes of the loop, or after a moment; whether that came in time."""
        task = asyncio.ensure_future(work)
        for _ in range(self.chance.randrange(PASSES_MAX)):
            await asyncio.sleep(0)
        rest = self.chance.random()
        if rest < ENDS_CHANCE:
            await asyncio.wait({task}, timeout=SECONDS)
        elif rest < 0.6:
            await asyncio.sleep(self.chance.random() * SLEEP_SECONDS)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False


def test_whatever_is_cancelled_wherever_it_waits_the_clients_go_on(broker: LiveServer, topic: str) -> None:
    """Nothing that was reported is lost, nothing is doubled but by a rollback; a cancelled poll has skipped nothing."""
    made: list[Story] = []

    async def whole() -> None:
        made.append(Story(broker.address, topic))
        await made[0].run()

    asyncio.run(whole())
    story = made[0]
    doubled = [text for text, times in Counter(story.found).items() if times > 1 + story.back[text]]
    assert doubled == [], SEED
    assert story.acknowledged <= set(story.found) <= set(story.sent), SEED
    for name in ("send", "transact", "poll", "commit", "ask"):
        assert story.ends[name, True] and story.ends[name, False], (name, story.ends)
