"""Many threads on one connection, large messages, senders and readers together: no thread stands still."""

import faulthandler
import threading
import time
from collections.abc import Callable

import pytest

import tfmq as client
from tests.e2e.reading import stored
from tests.scale import scaled
from tools.rigs.live_server import LiveServer

THREADS = 64
MIB = 1 << 20
GUARD_SECONDS = 90.0


def together(works: list[Callable[[], None]]) -> None:
    """Runs all at once; fails with every thread's place if one stands still."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(GUARD_SECONDS)
            work()
        except BaseException as error:  # reported below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    until = time.monotonic() + GUARD_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        raise AssertionError(f"{sum(t.is_alive() for t in threads)} threads stand still; the first error: {errors[:1]}")
    assert errors == []


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("waiting", [True, False], ids=["each waited for", "many at once"])
def test_64_threads_send_1_mib_messages_through_one_producer(broker: LiveServer, topic: str, waiting: bool) -> None:
    each = max(2, scaled(20))
    padding = bytes(MIB - 16)
    producer = client.Producer(broker.address, timeout=GUARD_SECONDS)

    def sender(number: int) -> Callable[[], None]:
        def work() -> None:
            deliveries = []
            for turn in range(each):
                delivery = producer.send(topic, b"%07d %07d " % (number, turn) + padding, partition=0)
                deliveries.append(delivery)
                if waiting:
                    assert delivery.result(GUARD_SECONDS).durability == "synced"
            for delivery in deliveries:
                delivery.result(GUARD_SECONDS)

        return work

    together([sender(number) for number in range(THREADS)])
    producer.close()
    found = [message.payload[:15] for message in stored(broker.address, topic)]
    assert len(found) == len(set(found)) == THREADS * each
    for number in range(THREADS):
        mine = [head for head in found if head.startswith(b"%07d" % number)]
        assert mine == [b"%07d %07d" % (number, turn) for turn in range(each)]
    with client.Admin(broker.address) as admin:
        admin.delete_topic(topic)


@pytest.mark.timeout(180)
def test_64_connections_send_and_read_at_the_same_time(broker: LiveServer, topic: str) -> None:
    each, senders = max(20, scaled(500)), THREADS // 2
    with client.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=8)
    wanted = {b"%d %06d" % (number, turn) for number in range(senders) for turn in range(each)}

    def sender(number: int) -> Callable[[], None]:
        def work() -> None:
            with client.Producer(broker.address, timeout=GUARD_SECONDS) as producer:
                for turn in range(each):
                    producer.send(topic, b"%d %06d" % (number, turn), key=b"%d" % number)

        return work

    def reader() -> None:
        found: list[bytes] = []
        with client.Consumer(broker.address, topics=topic) as consumer:
            while len(found) < len(wanted):
                found += [message.payload or b"" for message in consumer.poll(GUARD_SECONDS, 1_000)]
        assert len(found) == len(wanted)
        assert set(found) == wanted
        for number in range(senders):
            mine = [payload for payload in found if payload.startswith(b"%d " % number)]
            assert mine == sorted(mine), "one key, one partition, one order"

    together([sender(number) for number in range(senders)] + [reader] * (THREADS - senders))


@pytest.mark.timeout(180)
def test_64_threads_share_one_reader_and_one_administrator(broker: LiveServer, topic: str) -> None:
    wanted = [b"%06d" % number for number in range(max(20_000, scaled(50_000)))]
    with client.Producer(broker.address) as producer:
        producer.send_many(topic, wanted)
    found: list[bytes] = []
    lock = threading.Lock()
    consumer = client.Consumer(broker.address, topics=topic)
    admin = client.Admin(broker.address)

    def work() -> None:
        while True:
            assert admin.ping() > 0
            batch = consumer.poll(0.5, 50)
            with lock:
                found.extend(message.payload or b"" for message in batch)
                if len(found) >= len(wanted):
                    return

    together([work] * THREADS)
    consumer.close()
    admin.close()
    assert sorted(found) == wanted


@pytest.mark.long
@pytest.mark.timeout(180)
def test_threads_that_come_and_go_while_the_broker_restarts(broker: LiveServer, topic: str) -> None:
    each = max(20, scaled(200))
    producer = client.Producer(broker.address, timeout=GUARD_SECONDS)
    producer.send(topic, b"first").result(GUARD_SECONDS)

    def sender(number: int) -> Callable[[], None]:
        def work() -> None:
            for turn in range(each):
                producer.send(topic, b"%d %d" % (number, turn)).result(GUARD_SECONDS)

        return work

    def restarts() -> None:
        for _ in range(max(2, scaled(10))):
            time.sleep(0.2)
            broker.kill()
            broker.start()

    together([*(sender(number) for number in range(16)), restarts])
    producer.close()
    found = [message.payload for message in stored(broker.address, topic)]
    assert sorted(found) == sorted([b"first", *(b"%d %d" % (n, t) for n in range(16) for t in range(each))])
