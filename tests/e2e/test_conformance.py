"""The ancestor's checklist, end to end: the items that say something about a whole broker with its clients."""

import re
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import tfmq as client
from tests.e2e.reading import payloads, stored
from tests.e2e.test_many_threads import together
from tests.e2e.tracing import ThreadedServer, injected
from tests.scale import scaled
from tests.server.wire import Wire
from tfmq.protocol import commands, frames
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
WRITERS, MESSAGES = 80, 1_000


def wire(broker: LiveServer) -> Wire:
    host, _, port = broker.address.rpartition(":")
    return Wire((host, int(port)))


def test_item_01_offsets_follow_each_other_and_say_where_the_next_begins(broker: LiveServer, topic: str) -> None:
    with client.Producer(broker.address) as producer:
        results = [producer.send(topic, bytes(size)).result(SECONDS) for size in (0, 1, 100, 70_000, 5)]
    messages = stored(broker.address, topic)
    assert [message.offset for message in messages] == [result.offset for result in results]
    assert [message.ordinal for message in messages] == [0, 1, 2, 3, 4]
    assert messages[0].offset == 0
    for before, message in pairwise(messages):
        assert before.offset < before.next_offset <= message.offset


@pytest.mark.long
def test_items_03_and_04_files_have_exact_names_and_are_found_again(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", "log.segment_bytes=65536")
    server.start()
    with client.Producer(server.address, batch_bytes=20_000) as producer:
        wanted = [b"%05d" % number + bytes(1_000) for number in range(400)]
        for payload in wanted:
            producer.send("orders", payload)
    names = sorted(path.name for path in (server.data / "orders-0").glob("*.zxQueue"))
    assert len(names) > 5
    sizes = [(server.data / "orders-0" / name).stat().st_size for name in names]
    assert max(sizes) <= 65_536
    assert names == [f"{sum(sizes[:n]):032}.zxQueue" for n in range(len(names))]
    with client.Admin(server.address) as admin:
        before = admin.topic("orders")
    for end in (server.stop, server.kill):
        end()
        server.start()
        with client.Admin(server.address) as admin:
            after = admin.topic("orders")
        assert after.messages == before.messages == 400
        assert after.size_bytes == before.size_bytes == sum(sizes)
        assert payloads(server.address, "orders") == wanted
    server.stop()


@pytest.mark.timeout(300)
def test_item_08_80_writers_of_1000_messages_each_are_all_counted(broker: LiveServer, topic: str) -> None:
    each = max(30, scaled(MESSAGES))
    with client.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=4)

    def write(writer: int) -> None:
        with client.Producer(broker.address, timeout=SECONDS) as producer:
            for number in range(each):
                producer.send(topic, b"%d:%d" % (writer, number), partition=writer % 4)

    together([lambda writer=writer: write(writer) for writer in range(WRITERS)])  # type: ignore[misc]
    messages = stored(broker.address, topic)
    counts = Counter(message.text.split(":")[0] for message in messages)
    assert counts == {str(writer): each for writer in range(WRITERS)}
    assert len({message.id for message in messages}) == WRITERS * each
    with client.Admin(broker.address) as admin:
        assert admin.topic(topic).messages == WRITERS * each


def test_item_10_topics_by_pattern_under_parallel_load(broker: LiveServer, topic: str) -> None:
    names = [f"{topic}.{number}" for number in range(8)]
    each = max(50, scaled(1_000))
    found: list[tuple[str, bytes]] = []

    def write(name: str) -> None:
        with client.Producer(broker.address) as producer:
            for number in range(each):
                producer.send(name, b"%d" % number)

    def read() -> None:
        pattern = re.compile(re.escape(topic) + r"\.[0-9]+")
        with client.Consumer(broker.address, topics=pattern, refresh_every=0.1) as consumer:
            until = time.monotonic() + SECONDS
            while len(found) < len(names) * each and time.monotonic() < until:
                found.extend((message.topic, message.payload or b"") for message in consumer.poll(1.0, 1_000))

    together([read, *(lambda name=name: write(name) for name in names)])
    for name in names:
        assert [payload for where, payload in found if where == name] == [b"%d" % n for n in range(each)]


def test_item_11_a_request_in_single_bytes_is_waited_for(broker: LiveServer, topic: str) -> None:
    slow = wire(broker)
    request = b"".join(frames.encode([commands.BY_REQUEST[commands.CreateTopic].code, 5, topic, 1, {}]))
    for position in range(len(request)):
        slow.socket.sendall(request[position : position + 1])
        if position % 10 == 0:
            time.sleep(0.002)
    assert slow.receive().header[:2] == [0, 5]
    slow.close()


@pytest.mark.parametrize("code", [7, 19, 49, 59, 65, 75, 1_000, 1 << 31])
def test_item_12_an_unknown_command_is_refused_and_the_connection_goes_on(broker: LiveServer, code: int) -> None:
    asked = wire(broker)
    asked.socket.sendall(b"".join(frames.encode([code, 9, "what", {"is": "that"}], b"body")))
    header = asked.receive().header
    later = commands.reserved_for(code) is not None
    assert (header[1], header[2]) == (9, "not_supported" if later else "unknown_command")
    assert header[3] == "not done"
    assert asked.ask(commands.Ping())[0] > 0
    asked.close()


@pytest.mark.long
def test_item_13_every_offset_that_is_none_has_its_own_answer(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", "log.segment_bytes=65536")
    server.start()
    with client.Producer(server.address) as producer, client.Admin(server.address) as admin:
        offsets = [producer.send("orders", bytes(1_000)).result(SECONDS).offset for _ in range(200)]
        first = admin.truncate_before("orders", 0, offsets[150] or 0)
        end = admin.topic("orders").partitions[0].end_offset
        assert 0 < first <= (offsets[150] or 0)

        def begin(offset: int) -> list[client.ReceivedMessage]:
            with client.Consumer(server.address, topics="orders", start=offset) as consumer:
                return consumer.poll(1.0, 10)

        with pytest.raises(client.OffsetOutOfRange) as below:
            begin(0)
        assert (below.value.first, below.value.end) == (first, end)
        with pytest.raises(client.OffsetOutOfRange) as above:
            begin(end + 1_000_000)
        assert (above.value.first, above.value.end) == (first, end)
        with pytest.raises(client.NotARecord):
            begin((offsets[180] or 0) + 7)
        assert begin(end) == []
        assert begin(first)[0].offset == first
        assert begin(offsets[180] or 0)[0].offset == offsets[180]
    server.stop()


def test_item_14_a_filter_that_rejects_all_still_advances(broker: LiveServer, topic: str) -> None:
    with client.Producer(broker.address) as producer:
        for _ in range(20_000):
            producer.send(topic, bytes(100), tag="common")
    begun = time.monotonic()
    with client.Consumer(broker.address, topics=topic, group=topic, tags="rare") as consumer:
        with client.Admin(broker.address) as admin:
            end = admin.topic(topic).partitions[0].end_offset
        while consumer.position(topic, 0) < end:
            assert consumer.poll(0.1) == []
            assert time.monotonic() - begun < 10, "the reader does not learn that it stands at the end"
        with client.Producer(broker.address) as producer:
            producer.send(topic, b"wanted", tag="rare")
        assert [message.payload for message in consumer.poll(10.0)] == [b"wanted"]
    with client.Consumer(broker.address, topics=topic, group=topic) as consumer:
        assert consumer.poll(0.5) == [], "what was passed over is not offered again"


@pytest.mark.long
def test_item_39_a_reader_never_sees_what_is_not_fsynced(tmp_path: Path) -> None:
    server = ThreadedServer(tmp_path / "data")
    server.start()
    assert server.process is not None
    with client.Producer(server.address, acks="written") as producer:
        producer.send("orders", b"first").result(SECONDS)
        assert payloads(server.address, "orders") == [b"first"], "a reader at the mark has it forced"
        delay = int(1.5e6)
        with injected(server.process, tmp_path, f"fdatasync:delay_enter={delay}", f"syncfs:delay_enter={delay}"):
            asked = time.monotonic()
            result = producer.send("orders", b"second").result(SECONDS)
            assert result.durability == "written"
            with client.Consumer(server.address, topics="orders", start=result.offset or 0) as forced:
                with client.Consumer(server.address, topics="orders", read="written") as eager:
                    seen = [m.payload for m in eager.poll(1.0)]
                    assert seen == [b"first", b"second"], "who asks for written sees it at once"
                assert forced.poll(0.3) == []
                assert [m.payload for m in forced.poll(10.0)] == [b"second"]
                assert time.monotonic() - asked >= 1.4
    server.stop()


@pytest.mark.long
def test_item_40_large_messages_under_group_commit_are_fsynced_before_their_answer(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data")
    server.start()
    sizes = [512 << 10, (512 << 10) + 1, 1 << 20, 7 << 20]
    acknowledged: list[bytes] = []
    lock = threading.Lock()

    def send(number: int) -> None:
        with client.Producer(server.address, timeout=SECONDS) as producer:
            for turn in range(3):
                payload = b"%d:%d:" % (number, turn)
                payload += bytes(sizes[number % 4] - len(payload)) if number < 8 else b"small"
                assert producer.send("orders", payload, partition=0).result(SECONDS).durability == "synced"
                with lock:
                    acknowledged.append(payload)

    together([lambda number=number: send(number) for number in range(16)])  # type: ignore[misc]
    server.kill()
    server.start()
    assert sorted(payloads(server.address, "orders")) == sorted(acknowledged)
    with client.Admin(server.address) as admin:
        partition = admin.topic("orders").partitions[0]
    assert partition.forced_offset == partition.end_offset
    server.stop()
