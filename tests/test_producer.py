"""The blocking producer over real sockets: results, batches, back pressure, failures, threads, the end of a program."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import tfmq
from tests.client.fake_broker import CUT, HOLD, LOSE, FakeBroker, listening
from tests.client.fake_delays import NOW_MS
from tests.scale import scaled
from tfmq.client.send.batch import Delivery
from tfmq.errors import (
    BadRequest,
    Busy,
    Closed,
    ConnectionFailed,
    DeliveryFailed,
    DiskFull,
    MessageTooLarge,
    NotAllowed,
    TimedOut,
)
from tfmq.message import Message
from tfmq.producer import Producer
from tfmq.protocol.commands import Produce
from tfmq.protocol.delayed_handle import parse_handle

SECONDS = 20.0


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def servers(broker: FakeBroker) -> Iterator[str]:
    with listening(broker) as address:
        yield address


@pytest.fixture
def producer(servers: str) -> Iterator[Producer]:
    made = Producer(servers)
    yield made
    made.close(1.0)


def test_a_send_gives_its_place(producer: Producer, broker: FakeBroker) -> None:
    result = producer.send("orders", b"hello", key="42", tag="new", properties={"n": "1"}).result(SECONDS)
    assert (result.topic, result.partition, result.offset, result.durability) == ("orders", 0, 0, "synced")
    assert broker.payloads("orders") == [b"hello"]


@pytest.mark.parametrize(
    ("payload", "stored"),
    [(b"b", b"b"), ("Zürich", "Zürich".encode()), (bytearray(b"a"), b"a"), (memoryview(b"m"), b"m"), (None, b"")],
)
def test_payloads_of_every_kind(producer: Producer, broker: FakeBroker, payload: object, stored: bytes) -> None:
    producer.send("orders", payload).result(SECONDS)
    assert broker.payloads("orders") == [stored]


def test_a_buffer_may_be_changed_after_send(producer: Producer, broker: FakeBroker) -> None:
    data = bytearray(b"before")
    delivery = producer.send("orders", data)
    data[:] = b"after!"
    delivery.result(SECONDS)
    assert broker.payloads("orders") == [b"before"]


def test_other_payloads_need_a_codec(producer: Producer, servers: str, broker: FakeBroker) -> None:
    with pytest.raises(TypeError, match=r"tfmq\.codecs\.json"):
        producer.send("orders", {"n": 1})
    with Producer(servers, codec=tfmq.codecs.json) as coded:
        coded.send("orders", {"n": 1}).result(SECONDS)
    assert broker.payloads("orders") == [b'{"n":1}']


def test_many_at_once_keep_their_order_and_give_one_entry_a_batch(producer: Producer, broker: FakeBroker) -> None:
    payloads = [b"%06d" % number for number in range(20_000)]
    results = producer.send_many("orders", iter(payloads)).result(SECONDS)
    assert sum(each.count for each in results) == 20_000 and len(results) > 1
    assert broker.payloads("orders") == payloads
    offsets = [each.offset for each in results]
    assert offsets == sorted(offsets, key=lambda offset: offset or 0)


def test_many_may_be_of_any_kind(producer: Producer, broker: FakeBroker) -> None:
    mixed = [b"a", "b", Message(b"c", key="k"), Message("d", tag="t"), bytearray(b"e"), None]
    assert sum(each.count for each in producer.send_many("orders", mixed).result(SECONDS)) == 6
    assert broker.payloads("orders") == [b"a", b"b", b"c", b"d", b"e", b""]


def test_none_at_all_is_fine(producer: Producer) -> None:
    assert producer.send_many("orders", []).result(SECONDS) == []
    producer.flush()


def test_sizes_from_nothing_to_megabytes(producer: Producer, broker: FakeBroker) -> None:
    sizes = [0, 1, 100, 65_536, 300_000, 2_000_000, 7, 0]
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    producer.send_many("orders", payloads).result(SECONDS)
    for payload in payloads:
        producer.send("orders", payload)
    producer.flush(SECONDS)
    assert broker.payloads("orders") == payloads * 2


def test_a_lingering_batch_goes_by_itself(servers: str, broker: FakeBroker) -> None:
    with Producer(servers, linger_ms=20) as producer:
        delivery = producer.send("orders", b"x")
        until = time.monotonic() + SECONDS
        while not delivery.done() and time.monotonic() < until:
            time.sleep(0.005)
        assert delivery.done()


def test_callbacks_come_and_must_not_wait(producer: Producer) -> None:
    heard: list[object] = []
    refused = threading.Event()

    def callback(delivery: Delivery) -> None:
        heard.append(delivery.result().offset)
        try:
            producer.flush()
        except NotAllowed:
            refused.set()

    producer.send("orders", b"x").add_callback(callback)
    assert refused.wait(SECONDS)
    assert heard == [0]


def test_back_pressure_waits_and_then_says_busy(servers: str, broker: FakeBroker) -> None:
    broker.plan(Produce, *[HOLD] * 1000)
    with Producer(servers, buffer_bytes=100_000, batch_bytes=10_000, timeout=0.5) as producer:
        # Batches that expire make space: only `send` is to give up in the time of this test.
        producer._core.accumulator.timeout = 2 * SECONDS
        with pytest.raises(Busy, match=r"100000 bytes was full for 0\.5 s"):
            for _ in range(1000):
                producer.send("orders", b"x" * 900)
        broker.plans.clear()
        broker.release()
        producer.close(SECONDS)


def test_room_that_is_made_in_time_is_used(servers: str, broker: FakeBroker) -> None:
    with Producer(servers, buffer_bytes=50_000, batch_bytes=10_000) as producer:
        broker.plan(Produce, *[HOLD] * 4)
        threading.Timer(0.2, broker.release).start()
        for number in range(500):
            producer.send("orders", b"%0900d" % number)
        producer.flush(SECONDS)
    assert broker.payloads("orders") == [b"%0900d" % number for number in range(500)]


def test_unread_failures_are_raised_by_flush_once(producer: Producer, broker: FakeBroker) -> None:
    producer.send("orders", b"a").result(SECONDS)
    broker.plan(Produce, DiskFull("no space"), DiskFull("no space"))
    seen = producer.send("orders", b"b")
    with pytest.raises(DiskFull, match="no space"):
        seen.result(SECONDS)
    unseen = producer.send("orders", b"c")
    with pytest.raises(DeliveryFailed, match="1 message could not be delivered") as caught:
        producer.flush(SECONDS)
    assert caught.value.deliveries == [unseen]
    producer.flush(SECONDS)
    producer.send("orders", b"d").result(SECONDS)
    assert broker.payloads("orders") == [b"a", b"d"]


def test_leaving_with_raises_unread_failures_but_hides_no_other_error(servers: str, broker: FakeBroker) -> None:
    broker.plan(Produce, DiskFull("no space"))
    with pytest.raises(DeliveryFailed), Producer(servers) as producer:
        producer.send("orders", b"a")
    broker.plan(Produce, DiskFull("no space"))
    with pytest.raises(KeyError) as caught, Producer(servers) as producer:
        producer.send("orders", b"a")
        raise KeyError("mine")
    assert "could not be delivered" in caught.value.__notes__[0]


def test_a_closed_producer_says_so(producer: Producer) -> None:
    producer.send("orders", b"a")
    producer.close()
    producer.close()
    for use in (lambda: producer.send("orders", b"b"), lambda: producer.send_many("orders", [b"b"])):
        with pytest.raises(Closed):
            use()


def test_close_is_bounded_when_the_broker_is_silent(servers: str, broker: FakeBroker) -> None:
    producer = Producer(servers)
    producer.send("orders", b"a").result(SECONDS)
    broker.plan(Produce, HOLD)
    stuck = producer.send("orders", b"b")
    started = time.monotonic()
    with pytest.raises(DeliveryFailed):
        producer.close(0.3)
    assert time.monotonic() - started < SECONDS / 2
    with pytest.raises(TimedOut) as caught:
        stuck.result()
    assert caught.value.outcome == "unknown"


def test_a_result_may_be_waited_for_in_turns(producer: Producer, broker: FakeBroker) -> None:
    producer.send("orders", b"a").result(SECONDS)
    broker.plan(Produce, HOLD)
    delivery = producer.send("orders", b"b")
    with pytest.raises(TimedOut, match="still being sent"):
        delivery.result(0.1)
    broker.release()
    assert delivery.result(SECONDS).offset


def test_a_delayed_message_has_a_handle_to_cancel_and_to_reschedule_it_by(
    producer: Producer, broker: FakeBroker
) -> None:
    result = producer.send("orders", "x", key="42", delay=timedelta(minutes=30)).result(SECONDS)
    assert result.offset is None and 0 <= NOW_MS + 1_800_000 - parse_handle(result.delayed).due < 10_000
    moved = producer.reschedule(result.delayed, deliver_at=datetime(2030, 1, 1, tzinfo=UTC))
    assert moved.state == "rescheduled" and moved.handle == broker.waiting[0].handle
    assert producer.cancel(moved.handle) == "cancelled" and producer.cancel(moved.handle) == "cancelled"
    assert producer.reschedule(moved.handle, 5).state == "cancelled" and not broker.waiting


def test_many_may_be_delayed_together_and_each_may_have_its_own_time(producer: Producer, broker: FakeBroker) -> None:
    (entry,) = producer.send_many("orders", [b"a", "b", b"c"], delay=5).result(SECONDS)
    assert entry.offset is None and [parse_handle(each).number for each in entry.delayed] == [0, 1, 2]
    mixed = [Message(b"own", delay=60), b"common", Message("at", deliver_at=1_900_000_000)]
    producer.send_many("orders", mixed, delay=5).result(SECONDS)
    assert broker.delayed_payloads() == [b"a", b"b", b"c", b"own", b"common", b"at"]
    dues = [each.due - NOW_MS for each in broker.waiting]
    for due, wanted in zip(dues, [5000, 5000, 5000, 60_000, 5000, 1_900_000_000_000 - NOW_MS], strict=True):
        assert wanted - 1000 < due <= wanted
    producer.send_many("orders", [b"now", Message("then", delay=1)]).result(SECONDS)
    assert broker.payloads("orders") == [b"now"] and broker.delayed_payloads()[-1] == b"then"


def test_a_time_that_is_none_is_refused_before_anything_is_sent(producer: Producer, broker: FakeBroker) -> None:
    naive = datetime(2030, 1, 1)
    for wrong in ({"delay": "5s"}, {"deliver_at": naive}, {"delay": 5, "deliver_at": 5}):
        with pytest.raises(TypeError):
            producer.send("orders", b"x", **wrong)
        with pytest.raises(TypeError):
            producer.send_many("orders", [b"x"], **wrong)
        with pytest.raises(TypeError):
            producer.send("orders", Message(b"x", **wrong))
    with pytest.raises(TypeError, match="not beside it"):
        producer.send("orders", Message(b"x"), delay=5)
    with pytest.raises(BadRequest):
        producer.send("orders", b"x", delay=1e300)
    with pytest.raises(BadRequest, match="no handle"):
        producer.cancel("order-42")
    assert not broker.requests


def test_delayed_messages_count_for_flush_and_for_back_pressure(servers: str, broker: FakeBroker) -> None:
    broker.plan(Produce, DiskFull())
    with Producer(servers, linger_ms=60_000) as made:
        made.send("orders", b"x", delay=5)
        with pytest.raises(DeliveryFailed, match="1 message could"):
            made.flush(SECONDS)
    broker.plan(Produce, *[HOLD] * 10)
    full = Producer(servers, buffer_bytes=2000, batch_bytes=500, timeout=0.2)
    with pytest.raises(Busy):
        for _ in range(50):
            full.send("orders", b"x" * 400, delay=5)
    with pytest.raises(DeliveryFailed):
        full.close(0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"acks": "all"},
        {"linger_ms": -1},
        {"batch_bytes": 0},
        {"buffer_bytes": 0},
        {"timeout": 0},
        {"timeout": "soon"},
        {"group": "no spaces"},
        {"selector": "nobody"},
        {"servers": "http://x"},
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        Producer(**arguments)  # type: ignore[arg-type]


def test_topics_and_sizes_are_checked_here(producer: Producer) -> None:
    with pytest.raises(BadRequest, match="cannot be a topic"):
        producer.send("../etc", b"x")
    with pytest.raises(BadRequest, match=r"\['orders'\] cannot be a topic"):
        producer.send(["orders"], b"x")  # type: ignore[arg-type]
    for send in (producer.send, lambda topic, text: producer.send_many(topic, [text])):
        with pytest.raises(UnicodeEncodeError, match="sent as UTF-8: give bytes"):
            send("orders", "a\ud800b")
    with pytest.raises(BadRequest, match="linger_ms must be 0 or more, not -1"):
        Producer(linger_ms=-1)
    with pytest.raises(BadRequest):
        producer.send_many("a b", [b"x"])
    with pytest.raises(MessageTooLarge):
        producer.send("orders", b"x" * (9 << 20))
    with pytest.raises(TypeError, match="key"):
        producer.send("orders", b"x", key=5)  # type: ignore[arg-type]


def test_making_one_touches_no_network() -> None:
    producer = Producer("192.0.2.1:9")
    assert producer.stats()["connected"] is False
    producer.close()


@pytest.mark.usefixtures("impatient_clients")
def test_no_broker_is_reported_in_a_sentence() -> None:
    producer = Producer("127.0.0.1:1")
    with pytest.raises(ConnectionFailed, match="start tfmq-server"):
        producer.send("orders", b"x").result(SECONDS)
    with pytest.raises(ConnectionFailed):
        producer.send_many("orders", [b"x"])
    producer.close()


def test_stats_count(producer: Producer) -> None:
    producer.send_many("orders", [b"x"] * 10).result(SECONDS)
    stats = producer.stats()
    assert (stats["messages"], stats["failed_messages"], stats["connections"]) == (10, 0, 1)
    assert stats["connected"] is True and stats["buffered_bytes"] == 0


def test_hooks_see_every_message_and_its_end(servers: str, broker: FakeBroker) -> None:
    class Watch(tfmq.Hook):
        def __init__(self) -> None:
            self.ends: list[object] = []

        def before_send(self, topic: str, message: Message) -> Message:
            return message._replace(payload=message.payload + b"!")

        def after_send(self, topic: str, message: Message, result: object, error: object) -> None:
            self.ends.append(error or message.payload)

    watch = Watch()
    broker.plan(Produce, None, DiskFull())
    with pytest.raises(DeliveryFailed), Producer(servers, hooks=[watch]) as producer:
        producer.send("orders", b"a").result(SECONDS)
        producer.send("orders", b"b")
    assert watch.ends[0] == b"a!" and isinstance(watch.ends[1], DiskFull)
    assert broker.payloads("orders") == [b"a!"]


def test_a_stubborn_network_doubles_and_loses_nothing(servers: str, broker: FakeBroker) -> None:
    broker.plan(Produce, None, LOSE, None, CUT, None, None, LOSE, LOSE, CUT)
    with Producer(servers, batch_bytes=2000) as producer:
        for number in range(2000):
            producer.send("orders", b"%06d" % number)
    assert broker.payloads("orders") == [b"%06d" % number for number in range(2000)]


def test_64_threads_with_megabytes_on_one_connection_never_stand_still(producer: Producer, broker: FakeBroker) -> None:
    payload = bytes(1 << 20)
    results: list[int | None] = []

    def work() -> None:
        for _ in range(scaled(2)):
            results.append(producer.send("orders", payload).result(SECONDS * 3).offset)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(64)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS * 3
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert not [thread for thread in threads if thread.is_alive()]
    assert len(set(results)) == 64 * scaled(2)
    assert len(broker.sessions) == 1


PROGRAM = """
import sys, logging, tfmq
logging.basicConfig(format="%(message)s")
producer = tfmq.Producer(sys.argv[1], linger_ms=60000, timeout=30)
for number in range(10):
    producer.send("orders", b"%d" % number)
"""


def run_program(servers: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, servers]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def test_a_program_that_forgets_to_close_delivers_all_the_same(servers: str, broker: FakeBroker) -> None:
    assert run_program(servers).stderr == ""
    assert broker.payloads("orders") == [b"%d" % number for number in range(10)]


def test_a_program_that_cannot_deliver_ends_soon_and_says_what_was_lost() -> None:
    started = time.monotonic()
    said = run_program("127.0.0.1:1").stderr
    assert "10 messages were not delivered when the program ended" in said
    assert time.monotonic() - started < 30


def test_item_29_a_send_that_is_interrupted_is_stored_once_and_the_producer_goes_on(
    producer: Producer, broker: FakeBroker
) -> None:
    broker.plan(Produce, HOLD)
    delivery = producer.send("orders", b"first")

    def interrupt() -> None:
        until = time.monotonic() + SECONDS
        while not broker.held and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        thread = threading.Thread(target=interrupt)
        thread.start()
        delivery.result(SECONDS)
    thread.join()
    broker.release()
    assert producer.send("orders", b"second").result(SECONDS).durability == "synced"
    assert delivery.result(SECONDS).offset == 0
    assert broker.payloads("orders") == [b"first", b"second"]
