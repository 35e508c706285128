"""A network that loses replies, cuts connections anywhere and delays bytes: nothing doubles, order holds."""

import threading
import time
from random import Random
from typing import Any

import pytest

import tfmq as client
from tests.e2e.reading import payloads
from tests.scale import SEED, scaled, seeded
from tools.rigs.live_server import LiveServer
from tools.rigs.proxy import Proxy, proxied

SECONDS = 60.0
CUTS = 200


class LosingOne:
    """Swallows the next piece and has its connection cut; passes everything after that."""

    def __init__(self) -> None:
        self.lost = False

    def __call__(self, data: bytes) -> bytes | None:
        if self.lost:
            return data
        self.lost = True
        return None


class Cutting:
    """Lets a random number of bytes pass, cuts inside a piece, and begins anew; safe for several pipes."""

    def __init__(self, random: Random, mean_bytes: int, cuts_max: int) -> None:
        self.random, self.mean_bytes, self.left = random, mean_bytes, cuts_max
        self.lock = threading.Lock()
        self.room = self.next_room()

    def next_room(self) -> int:
        return int(self.random.expovariate(1 / self.mean_bytes))

    def __call__(self, data: bytes) -> bytes | None:
        with self.lock:
            if not self.left:
                return data
            if len(data) <= self.room:
                self.room -= len(data)
                return data
            part, self.room = data[: self.room], self.next_room()
            self.left -= 1
            return part or None


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%07d" % number for number in range(start, start + count)]


@pytest.mark.parametrize("acks", ["synced", "written"])
def test_a_lost_reply_is_asked_for_again_and_nothing_doubles(broker: LiveServer, topic: str, acks: str) -> None:
    wanted: list[bytes] = []
    with proxied(broker.address) as proxy:
        for turn in range(max(3, scaled(50))):
            with client.Producer(proxy.address, acks=acks, timeout=SECONDS) as producer:
                producer.send(topic, b"%d first" % turn).result(SECONDS)
                before = proxy.connections
                proxy.down = LosingOne()
                results = [producer.send(topic, b"%d %d" % (turn, n)) for n in range(20)]
                offsets = [result.result(SECONDS).offset for result in results]
                assert proxy.connections > before, "the connection was cut"
                assert offsets == sorted(set(offsets))  # type: ignore[type-var]
            wanted += [b"%d first" % turn, *(b"%d %d" % (turn, n) for n in range(20))]
    assert payloads(broker.address, topic) == wanted


def test_a_repeated_send_gets_the_first_answer_again(broker: LiveServer, topic: str) -> None:
    with proxied(broker.address) as proxy, client.Producer(proxy.address, timeout=SECONDS) as producer:
        first = producer.send(topic, b"first").result(SECONDS)
        proxy.down = LosingOne()
        second = producer.send(topic, b"second").result(SECONDS)
    with client.Consumer(broker.address, topics=topic) as consumer:
        messages = consumer.poll(5.0)
    assert [(m.offset, m.id) for m in messages] == [(r.offset, r.message_id) for r in (first, second)]


def test_connections_cut_at_random_places_lose_and_double_nothing(broker: LiveServer, topic: str) -> None:
    random = seeded("cut anywhere")
    cuts = max(10, scaled(CUTS))
    with proxied(broker.address) as proxy:
        up, down = Cutting(random, 40_000, cuts // 2), Cutting(random, 2_000, cuts - cuts // 2)
        with client.Producer(proxy.address, timeout=SECONDS, batch_bytes=4_000) as producer:
            producer.send(topic, b"begin").result(SECONDS)
            proxy.up, proxy.down = up, down
            deliveries: list[Any] = []
            number, until = 0, time.monotonic() + SECONDS + cuts
            while (up.left or down.left) and time.monotonic() < until:
                deliveries += [producer.send(topic, b"%07d" % n) for n in range(number, number + 50)]
                number += 50
                if random.random() < 0.3:
                    deliveries[-1].result(SECONDS)
            for delivery in deliveries:
                delivery.result(SECONDS)
        assert (up.left, down.left) == (0, 0), f"seed {SEED}: {number} messages were not enough for the cuts"
        assert proxy.connections > cuts // 2
    assert payloads(broker.address, topic) == [b"begin", *numbered(number)], f"seed {SEED}"


@pytest.mark.long
def test_a_reader_after_cuts_sees_each_message_once_and_in_order(broker: LiveServer, topic: str) -> None:
    random = seeded("reader behind cuts")
    wanted = numbered(20_000)
    with client.Producer(broker.address) as producer:
        producer.send_many(topic, wanted)
    cuts = max(5, scaled(CUTS))
    for group in (None, topic):
        with proxied(broker.address) as proxy:
            proxy.up, proxy.down = Cutting(random, 500, cuts), Cutting(random, 60_000, cuts)
            found: list[bytes] = []
            with client.Consumer(
                proxy.address, topics=topic, group=group, fetch_bytes=20_000, prefetch_bytes=20_000
            ) as consumer:
                until = time.monotonic() + SECONDS + cuts
                while len(found) < len(wanted) and time.monotonic() < until:
                    found += [message.payload or b"" for message in consumer.poll(2.0, 300)]
            assert found == wanted, f"seed {SEED}, group {group}: {len(found)}"
            assert proxy.connections > 3
    with client.Consumer(broker.address, topics=topic, group=topic) as consumer:
        assert consumer.poll(1.0) == [], "what was handed out was saved"


def test_a_slow_network_in_tiny_pieces_changes_nothing(broker: LiveServer, topic: str) -> None:
    def slowly(data: bytes) -> bytes:
        time.sleep(0.002)
        return data

    with proxied(broker.address) as proxy:
        proxy.up = proxy.down = slowly
        with client.Producer(proxy.address, timeout=SECONDS) as producer:
            for delivery in [producer.send(topic, payload) for payload in numbered(2_000)]:
                delivery.result(SECONDS)
        with client.Consumer(proxy.address, topics=topic) as consumer:
            found: list[bytes] = []
            until = time.monotonic() + SECONDS
            while len(found) < 2_000 and time.monotonic() < until:
                found += [message.payload or b"" for message in consumer.poll(2.0)]
    assert found == numbered(2_000)


def test_a_broker_that_stands_still_is_given_up_in_time(broker: LiveServer, topic: str) -> None:
    def nothing(data: bytes) -> bytes:
        return b""

    with proxied(broker.address) as proxy:
        proxy.cut_when_short = False
        producer = client.Producer(proxy.address, timeout=1.0)
        producer.send(topic, b"first").result(SECONDS)
        admin = client.Admin(proxy.address, timeout=1.0)
        admin.ping()
        proxy.down = nothing
        begun = time.monotonic()
        with pytest.raises(client.TimedOut):
            admin.ping()
        delivery = producer.send(topic, b"second")
        with pytest.raises(client.TimedOut) as late:
            delivery.result(SECONDS)
        assert late.value.outcome == "unknown"
        assert time.monotonic() - begun < 10
        proxy.down = None
        producer.close(1.0)
        admin.close()
    assert payloads(broker.address, topic)[0] == b"first"


def test_commits_through_cuts_never_go_back(broker: LiveServer, topic: str) -> None:
    random = seeded("commits through cuts")
    with client.Producer(broker.address) as producer:
        producer.send_many(topic, numbered(500))
    with proxied(broker.address) as proxy:
        cut_now_and_then(proxy, random)
        last = -1
        with client.Consumer(proxy.address, topics=topic, group=topic, commits="manual", timeout=SECONDS) as consumer:
            for _ in range(50):
                consumer.poll(10.0, 10)
                consumer.commit()
                saved = consumer.committed(topic, 0)
                assert saved is not None
                assert saved > last
                last = saved
    with client.Consumer(broker.address, topics=topic, group=topic) as consumer:
        assert consumer.poll(1.0) == []


def cut_now_and_then(proxy: Proxy, random: Random) -> None:
    proxy.down = Cutting(random, 3_000, max(5, scaled(CUTS)))
