"""Every peer beside tfmq at the same durability: batches, consumption, one send, 64 clients; in turn, with ratios.

The 64 clients are connections of one Python process (threads, or tasks where the peer's client has only these), so
for tfmq they are 64 producers in threads too. Kafka's and RocketMQ's work outside the interpreter's lock, so beside
them tfmq's are the load generator of the row `clients`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import tfmq
from tools.bench.broker import Broker, broker
from tools.bench.consume import payloads, polled
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.load import Client, messages_per_second
from tools.bench.peers import brokers
from tools.bench.peers.brokers import Peer, PeerMissing
from tools.bench.single import send_seconds

CLIENTS = 64
CLIENT_SECONDS = 4.0
PAYLOAD = b"x" * 100
OWN_COUNT = 1_000_000
ACKS: dict[bool, Literal["synced", "written"]] = {True: "synced", False: "written"}


class Contest(NamedTuple):
    """One peer at one durability. `messages` are produced and consumed, `singles` sent one after the other."""

    name: str
    start: Callable[[bool], AbstractContextManager[Peer]]
    forced: bool
    messages: int
    singles: int
    each: int
    interpreted: bool = True
    """Whether its 64 clients share the interpreter's lock."""

    @property
    def who(self) -> str:
        return f"{self.name}, {'forced' if self.forced else 'unforced'}"


CONTESTS = (
    Contest("Kafka, confluent-kafka", brokers.kafka, False, 1_000_000, 2_000, 100, interpreted=False),
    Contest("Kafka, confluent-kafka", brokers.kafka, True, 1_000_000, 1_000, 60, interpreted=False),
    Contest("RocketMQ, Java", brokers.rocketmq, False, 400_000, 2_000, 200, interpreted=False),
    Contest("RocketMQ, Java", brokers.rocketmq, True, 400_000, 1_000, 100, interpreted=False),
    Contest("Redis streams, redis-py", brokers.redis, False, 200_000, 2_000, 200),
    Contest("Redis streams, redis-py", brokers.redis, True, 200_000, 1_000, 100),
    Contest("NATS JetStream, nats-py", brokers.nats, False, 50_000, 2_000, 100),
    Contest("RabbitMQ quorum queue, pika", brokers.rabbitmq_quorum, True, 20_000, 500, 20),
    Contest("RabbitMQ stream, rstream", brokers.rabbitmq_stream, False, 200_000, 1_000, 50),
    Contest("beanstalkd, greenstalk", brokers.beanstalkd, False, 20_000, 2_000, 200),
    Contest("beanstalkd, greenstalk", brokers.beanstalkd, True, 5_000, 1_000, 50),
)


class Own:
    """tfmq's side of a contest."""

    def __init__(self, server: Broker, forced: bool) -> None:
        self._server = server
        self._acks = ACKS[forced]
        self._topics = 0

    def produce(self) -> float:
        self._topics += 1
        with tfmq.Producer(self._server.address, acks=self._acks) as producer:
            producer.send(f"t{self._topics}", PAYLOAD).result()
            begun = time.perf_counter()
            results = producer.send_many(f"t{self._topics}", [PAYLOAD] * OWN_COUNT).result(120)
            seconds = time.perf_counter() - begun
        if any(each.durability != self._acks for each in results):
            raise RuntimeError(f"not every message was answered as {self._acks}")
        return OWN_COUNT / seconds

    def consume(self) -> float:
        """Of the last topic produced to, which is deleted."""
        found = polled(self._server, f"t{self._topics}", OWN_COUNT, payloads)
        with tfmq.Admin(self._server.address) as admin:
            admin.delete_topic(f"t{self._topics}")
        return found

    def single(self) -> float:
        return send_seconds(self._server.address, self._acks)

    def clients(self, contest: Contest) -> float:
        if not contest.interpreted:
            code = 2 if contest.forced else 1
            return messages_per_second(self._server.address, "clients", CLIENTS, 1, CLIENT_SECONDS, code)
        producers = [tfmq.Producer(self._server.address, acks=self._acks) for _ in range(CLIENTS)]
        done = [0] * CLIENTS
        until = time.perf_counter() + CLIENT_SECONDS

        def work(number: int) -> None:
            while time.perf_counter() < until:
                producers[number].send("clients", PAYLOAD).result()
                done[number] += 1

        for producer in producers:
            producer.send("clients", PAYLOAD).result()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
        begun = time.perf_counter()
        until = begun + CLIENT_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
        for producer in producers:
            producer.close()
        return sum(done) / seconds


def measure(runs: int, peers: bool) -> list[Figure]:
    """Nothing without `peers`. A peer that is not installed, or cannot do it, is a row that says so."""
    rows: list[Figure] = []
    for contest in CONTESTS if peers else ():
        try:
            with broker() as server, contest.start(contest.forced) as peer:
                client = Client(server.address)
                client.call(11, "clients", 1, {})
                client.close()
                rows += contested(contest, Own(server, contest.forced), peer, runs)
        except PeerMissing as missing:
            rows.append(Figure("peers", contest.who, float("nan"), "", note=str(missing)))
    return rows


def contested(contest: Contest, own: Own, peer: Peer, runs: int) -> list[Figure]:
    topics = iter(range(1_000_000))
    topic = ""

    def produce() -> float:
        nonlocal topic
        topic = f"t{next(topics)}"
        return peer.rate("produce", topic, contest.messages)

    programs: tuple[Callable[[], float], ...] = (
        own.produce,
        produce,
        own.consume,
        lambda: peer.rate("consume", topic, contest.messages),
        own.single,
        lambda: peer.rate("one_at_a_time", "single", contest.singles),
        lambda: own.clients(contest),
        lambda: peer.rate("clients", "clients", CLIENTS, contest.each),
    )
    values = alternately(runs, *programs)
    rows = []
    for number, (row, unit) in enumerate(
        (("produce", "msg/s"), ("consume", "msg/s"), ("one send, p50", "us"), (f"{CLIENTS} clients", "msg/s"))
    ):
        ours, theirs = values[2 * number], values[2 * number + 1]
        if unit == "us":
            ours, theirs = [value * 1e6 for value in ours], [value * 1e6 for value in theirs]
        ratios = [b / a if unit == "us" else a / b for a, b in zip(ours, theirs, strict=True)]
        name = f"{row}, {ACKS[contest.forced]}, 100 B"
        rows += [
            Figure(name, "tfmq", median(ours), unit, note=spread(ours)),
            Figure(name, contest.who, median(theirs), unit, note=spread(theirs)),
            Figure(name, f"tfmq ahead of {contest.who}", median(ratios), "x", 1.0, note=spread(ratios)),
        ]
    return rows
