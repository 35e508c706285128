"""Transactions on a live server: both faces, lost answers, killed clients, a consumer's offsets.

What must hold, whatever the network and kill -9 of clients do:
 1. what was answered as committed is there, whole, once, and in the order in which it was sent;
 2. nothing is there of what was answered as rolled back, or of what a client left unprepared;
 3. what is unknown, because no reply came, is all there or not there at all, and a repeated commit says which;
 4. what was prepared waits, however its client ended, for the client that takes it up;
 5. consume, transform, produce: each result is there once, over kills and takeovers;
 6. plain sends beside transactions of the same producer never meet their sequences.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tfmq
from tests.e2e.reading import payloads
from tests.e2e.test_lost_replies import Cutting, LosingOne
from tests.e2e.workers import Worker
from tests.scale import SEED, scaled, seeded
from tfmq import aio
from tools.rigs.live_server import LiveServer
from tools.rigs.proxy import Proxy, proxied

SECONDS = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A live broker that asks about prepared transactions soon."""
    server = LiveServer(tmp_path_factory.mktemp("broker") / "data", "transaction.check_seconds=1")
    server.start()
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def producer(broker: LiveServer) -> Iterator[tfmq.Producer]:
    with tfmq.Producer(broker.address, timeout=SECONDS) as made:
        yield made


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


# Both faces


def test_all_or_nothing(broker: LiveServer, producer: tfmq.Producer, topic: str) -> None:
    with producer.transaction() as tx:
        deliveries = [tx.send(f"{topic}.{name}", name, key="k") for name in "ab"]
        tx.send_many(f"{topic}.a", [b"1", b"2"])
    with pytest.raises(ValueError), producer.transaction() as dropped:
        dropped.send(f"{topic}.a", b"no")
        raise ValueError
    assert (tx.state, dropped.state) == ("committed", "rolled_back")
    assert payloads(broker.address, f"{topic}.a") == [b"a", b"1", b"2"]
    assert payloads(broker.address, f"{topic}.b") == [b"b"]
    with tfmq.Consumer(broker.address, topics=f"{topic}.b") as consumer:
        (message,) = consumer.poll(10.0)
    assert (message.id, message.key) == (deliveries[1].result().message_id, "k")


def test_the_asyncio_variant(broker: LiveServer, topic: str) -> None:
    async def story() -> None:
        async with aio.Producer(broker.address, timeout=SECONDS) as producer:
            async with producer.transaction() as tx:
                await tx.send(topic, b"1")
                await tx.send_many(topic, [b"2"] * 3)
            with pytest.raises(asyncio.CancelledError):
                async with producer.transaction() as dropped:
                    await dropped.send(topic, b"no")
                    raise asyncio.CancelledError
            named = await producer.begin(topic, timeout=60)
            await named.send(topic, b"3")
            assert await named.prepare() == "prepared"
            assert await (await producer.resume(topic)).commit() == "committed"
            assert await named.commit() == tx.state == "committed"

    asyncio.run(asyncio.wait_for(story(), SECONDS))
    assert payloads(broker.address, topic) == [b"1", b"2", b"2", b"2", b"3"]


def test_a_large_one_is_there_at_once_and_in_order(broker: LiveServer, producer: tfmq.Producer, topic: str) -> None:
    wanted = [b"%07d" % number + bytes(500) for number in range(20_000)]
    with producer.transaction() as tx:
        handle = tx.send_many(topic, iter(wanted))
        assert payloads(broker.address, topic) == []
    assert tx.state == "committed"
    assert sum(each.count for each in handle.result()) == len(wanted)
    assert payloads(broker.address, topic) == wanted


def test_a_transaction_manager_finds_and_ends_branches(broker: LiveServer, producer: tfmq.Producer, topic: str) -> None:
    resource = tfmq.XAResource(producer)
    for branch in (f"{topic}.1", f"{topic}.2", f"{topic}.3"):
        resource.start(branch).send(topic, branch)
        resource.end(branch)
    assert [resource.prepare(f"{topic}.{number}") for number in (1, 2)] == ["prepared"] * 2
    with tfmq.Producer(broker.address) as another:
        other = another.xa()
        assert {f"{topic}.1", f"{topic}.2"} <= set(other.recover())
        with pytest.raises(tfmq.TransactionState):
            other.commit(f"{topic}.3")
        assert other.commit(f"{topic}.1") == "committed" and other.rollback(f"{topic}.2") == "rolled_back"
    assert resource.commit(f"{topic}.3", one_phase=True) == "committed"
    assert resource.commit(f"{topic}.1") == "committed"
    assert payloads(broker.address, topic) == [f"{topic}.{number}".encode() for number in (1, 3)]


# A network that loses answers


@pytest.mark.parametrize("named", [True, False])
def test_a_lost_answer_of_any_step_doubles_nothing(broker: LiveServer, topic: str, named: bool) -> None:
    wanted = []
    with proxied(broker.address) as proxy, tfmq.Producer(proxy.address, timeout=SECONDS) as producer:
        producer.send(topic, b"begin").result(SECONDS)
        for turn in range(max(3, scaled(50))):
            before = proxy.connections
            if named:
                tx = lossy(proxy, lambda turn=turn: producer.begin(f"{topic}-{turn}"))
                tx.send(topic, b"%d" % turn)
                assert lossy(proxy, tx.prepare) == "prepared"
            else:
                tx = producer.transaction()
                tx.send(topic, b"%d" % turn)
            assert lossy(proxy, tx.commit) == "committed"
            assert proxy.connections >= before + (3 if named else 1), "the connection was cut"
            wanted.append(b"%d" % turn)
    assert payloads(broker.address, topic) == [b"begin", *wanted]


def lossy(proxy: Proxy, step: Callable[[], Any]) -> Any:
    """What `step` gives, whose first answer is lost."""
    proxy.down = LosingOne()
    try:
        return step()
    finally:
        proxy.down = None


@pytest.mark.long
def test_a_large_named_one_goes_through_cuts_and_a_local_one_ends_with_them(broker: LiveServer, topic: str) -> None:
    random = seeded("large through cuts")
    wanted = [b"%07d" % number + bytes(1000) for number in range(8000)]
    with proxied(broker.address) as proxy, tfmq.Producer(proxy.address, timeout=SECONDS) as producer:
        producer.send(topic, b"begin").result(SECONDS)
        named, local = producer.begin(topic), producer.transaction()
        local.send_many(topic, wanted)
        wait_until(lambda: local.xid)
        proxy.up = Cutting(random, 500_000, 8)
        named.send_many(topic, wanted)
        assert named.commit() == "committed", f"seed {SEED}"
        assert proxy.connections > 2, f"seed {SEED}"
        proxy.up = None
        with pytest.raises(tfmq.TfmqError) as caught:
            local.send_many(topic, wanted)
            local.commit()
        assert caught.value.outcome == "not done" and local.rollback() == "rolled_back"
    assert payloads(broker.address, topic) == [b"begin", *wanted]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_cuts_anywhere_tear_and_double_nothing_and_plain_sends_go_on(broker: LiveServer, topic: str) -> None:
    """Threads with transactions, local, named, rolled back, and plain sends, all of one producer."""
    random = seeded("cuts anywhere")
    cuts = max(10, scaled(300))
    story = Story(topic)
    with proxied(broker.address) as proxy:
        with tfmq.Producer(proxy.address, timeout=SECONDS) as producer:
            producer.send(topic, b"begin").result(SECONDS)
            up, down = Cutting(random, 10_000, cuts // 2), Cutting(random, 1_500, cuts - cuts // 2)
            proxy.up, proxy.down = up, down
            threads = [
                threading.Thread(target=story.play, args=(producer, number, lambda: up.left + down.left))
                for number in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
            assert not [each for each in threads if each.is_alive()], f"seed {SEED}"
        assert producer.stats()["lost_messages"] == 0
    assert story.failures == [], f"seed {SEED}"
    found = payloads(broker.address, topic)
    assert len(found) == len(set(found)), f"seed {SEED}: doubled"
    assert set(found) == {b"begin", *story.wanted}, f"seed {SEED}"
    assert len(story.wanted) > 20


class Story:
    """What several threads sent, and what must be there."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.wanted: list[bytes] = []
        self.failures: list[str] = []

    def play(self, producer: tfmq.Producer, number: int, going_on: Callable[[], int]) -> None:
        turn = 0
        while (going_on() or turn < 10) and turn < 3000:
            self.turn(producer, number, turn)
            turn += 1

    def turn(self, producer: tfmq.Producer, number: int, turn: int) -> None:
        name = f"{number}-{turn:05d}"
        mine = [f"{name}-{each}".encode() for each in range(3)]
        kind = turn % 4
        try:
            if kind == 0:
                self.wanted += [producer_sent(producer, self.topic, mine[0])]
                return
            tx = producer.begin(f"{self.topic}-{name}") if kind == 1 else producer.transaction()
            for each in mine:
                tx.send(self.topic, each)
            if kind == 2:
                tx.rollback()
                return
            if kind == 1 and turn % 8 == 1:
                tx.prepare()
            tx.commit()
            self.wanted += mine
        except tfmq.TfmqError as error:
            if not isinstance(error, tfmq.TransactionRolledBack):
                self.failures.append(f"{name}: {error!r}")


def producer_sent(producer: tfmq.Producer, topic: str, payload: bytes) -> bytes:
    producer.send(topic, payload).result(SECONDS)
    return payload


def test_a_rollback_leaves_no_gap_that_blocks(broker: LiveServer, producer: tfmq.Producer, topic: str) -> None:
    wanted = []
    for turn in range(20):
        tx = producer.begin(f"{topic}-{turn}") if turn % 2 else producer.transaction()
        tx.send_many(topic, [b"%d-%d" % (turn, each) + bytes(60_000 * (turn % 3)) for each in range(20)])
        if turn % 5 == 3:
            tx.commit()
            wanted += [b"%d-%d" % (turn, each) for each in range(20)]
        else:
            tx.rollback()
        wanted.append(producer_sent(producer, topic, b"%d plain" % turn))
    assert [each.rstrip(b"\0") for each in payloads(broker.address, topic)] == wanted


# Clients that are killed

STEPS = """
import sys, tfmq
address, topic, last = sys.argv[1:]
producer = tfmq.Producer(address, timeout=30, group=topic)
tx = producer.begin(topic, timeout=60)
def say(step):
    print(step, flush=True)
    if step == last:
        sys.stdin.read()
say("begun")
tx.send(topic, b"1")
tx.send_many(topic, [b"2" * 1000] * 3000)
say("sent")
tx.prepare()
say("prepared")
tx.commit()
say("committed")
"""


@pytest.mark.long
@pytest.mark.parametrize("last", ["begun", "sent", "prepared", "committed"])
def test_a_client_killed_between_steps_leaves_what_its_last_step_says(
    broker: LiveServer, producer: tfmq.Producer, topic: str, last: str
) -> None:
    with Worker(STEPS, broker.address, topic, last) as worker:
        worker.wait_for(last)
        worker.kill()
    found = producer.resume(topic)
    if last in ("prepared", "committed"):
        assert found.state == last
        assert found.commit() == "committed"
        assert len(payloads(broker.address, topic)) == 3001
    else:
        assert found.state == "open" and found.rollback() == "rolled_back"
        producer.send(topic, b"after").result(SECONDS)
        assert payloads(broker.address, topic) == [b"after"]


def test_a_local_one_of_a_killed_client_is_gone_at_once(
    broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    program = STEPS.replace("producer.begin(topic, timeout=60)", "producer.begin()").replace(
        'say("sent")', 'print(tx.xid, flush=True); say("sent")'
    )
    with Worker(program, broker.address, topic, "sent") as worker:
        worker.wait_for("sent")
        name = worker.lines[-2]
        worker.kill()

    def gone() -> bool:
        try:
            return producer.resume(name).state == "rolled_back"
        except tfmq.UnknownTransaction:
            return True

    wait_until(gone, 10)


@pytest.mark.long
def test_the_group_is_asked_what_becomes_of_a_killed_clients_transaction(broker: LiveServer, topic: str) -> None:
    for name in ("a", "b"):
        with Worker(
            STEPS.replace("begin(topic", f"begin(topic + {name!r}"), broker.address, topic, "prepared"
        ) as worker:
            worker.wait_for("prepared")
            worker.kill()
    asked: list[str] = []
    with tfmq.Producer(broker.address, group=topic) as producer:

        @producer.transaction_check
        def decide(transaction: Any) -> str | None:
            asked.append(transaction.xid)
            if asked.count(transaction.xid) == 1:
                return None
            return "commit" if transaction.xid.endswith("a") else "rollback"

        states = [producer.resume(topic + name) for name in ("a", "b")]
        assert [each.state for each in states] == ["prepared"] * 2
        wait_until(lambda: producer.resume(topic + "a").state == "committed")
        wait_until(lambda: producer.resume(topic + "b").state == "rolled_back")
    assert len(payloads(broker.address, topic)) == 3001


# Offsets

TRANSFORM = """
import sys, tfmq
address, source, target, group, slowly = sys.argv[1:]
producer = tfmq.Producer(address, timeout=30)
while True:
    with tfmq.Consumer(address, topics=source, group=group, commits="manual", session=1.0) as consumer:
        try:
            while True:
                messages = consumer.poll(1.0, 7)
                if not messages:
                    print("idle", flush=True)
                    continue
                with producer.transaction() as tx:
                    for message in messages:
                        tx.send(target, b"<" + message.payload + b">")
                    tx.commit_offsets(consumer)
                    if slowly == "slowly":
                        print("handed", flush=True)
                        sys.stdin.readline()
                print("done", flush=True)
        except tfmq.NotAllowed:
            continue  # another member lives
        except tfmq.Fenced as error:
            print("fenced", flush=True)
            sys.stdin.read()
        except tfmq.TfmqError as error:
            print("failed", error, flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("broker_too", [False, True])
def test_consume_transform_produce_is_exactly_once_over_kills(
    broker: LiveServer, producer: tfmq.Producer, topic: str, broker_too: bool
) -> None:
    random = seeded("consume transform produce")
    source, target = f"{topic}.in", f"{topic}.out"
    count = 400
    producer.send_many(source, [b"%05d" % number for number in range(count)]).result(SECONDS)
    for _ in range(max(3, scaled(40))):
        with Worker(TRANSFORM, broker.address, source, target, topic, "fast") as worker:
            worker.wait_for("done", "idle")
            time.sleep(random.random() * 0.03)
            if broker_too:
                broker.kill()
                broker.start()
                worker.wait_for("done", "idle")
                time.sleep(random.random() * 0.03)
            worker.kill()
    with Worker(TRANSFORM, broker.address, source, target, topic, "fast") as worker:
        worker.wait_for("idle")
        worker.kill()
    wanted = [b"<%05d>" % number for number in range(count)]
    assert payloads(broker.address, target) == wanted, f"seed {SEED}"


@pytest.mark.long
def test_a_member_that_was_replaced_cannot_commit(broker: LiveServer, producer: tfmq.Producer, topic: str) -> None:
    source, target = f"{topic}.in", f"{topic}.out"
    producer.send_many(source, [b"%d" % number for number in range(20)]).result(SECONDS)
    with Worker(TRANSFORM, broker.address, source, target, topic, "slowly") as zombie:
        zombie.wait_for("handed")
        zombie.stand_still()
        with Worker(TRANSFORM, broker.address, source, target, topic, "fast") as heir:
            heir.wait_for("idle")
            zombie.go_on()
            zombie.say("")
            zombie.wait_for("fenced")
    assert payloads(broker.address, target) == [b"<%d>" % number for number in range(20)]


def test_the_consumers_own_commit_goes_on_after_a_transaction(
    broker: LiveServer, producer: tfmq.Producer, topic: str
) -> None:
    producer.send_many(topic, [b"%d" % number for number in range(10)]).result(SECONDS)
    options: dict[str, Any] = {"topics": topic, "group": topic, "commits": "manual"}
    with tfmq.Consumer(broker.address, **options) as consumer:
        first = consumer.poll(10.0, 4)
        with producer.transaction() as tx:
            tx.send(f"{topic}.out", b"x")
            tx.commit_offsets(consumer)
        wait_until(lambda: consumer.committed(topic, 0) == first[-1].next_offset, 10)
        consumer.poll(10.0, 3)
        consumer.commit()
        with pytest.raises(ValueError), producer.transaction() as dropped:
            consumer.poll(10.0, 2)
            dropped.commit_offsets(consumer)
            raise ValueError
    with tfmq.Consumer(broker.address, **options) as consumer:
        assert [each.payload for each in consumer.poll(10.0)] == [b"7", b"8", b"9"]


def test_offsets_of_a_prepared_one_are_locked_until_its_end(
    broker: LiveServer, producer: tfmq.Producer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmq.client.consumer.offset_commit.READ_SECONDS", 1.0)
    producer.send_many(topic, [b"%d" % number for number in range(10)]).result(SECONDS)
    with tfmq.Consumer(broker.address, topics=topic, group=topic, commits="manual", session=2.0) as consumer:
        consumer.poll(10.0, 4)
        tx = producer.begin(topic)
        tx.commit_offsets(consumer)
        assert tx.prepare() == "prepared"
        with pytest.raises(tfmq.Busy, match=topic):
            consumer.committed(topic, 0)
    with tfmq.Consumer(broker.address, topics=topic, group=topic, commits="manual") as heir:
        assert heir.poll(1.0) == [], "nobody knows yet where it goes on"
        assert tx.commit() == "committed"
        assert [each.payload for each in heir.poll(10.0, 2)] == [b"4", b"5"]


# Memory

GROWING = """
import resource, sys, tfmq
address, topic, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
producer = tfmq.Producer(address, timeout=60)
with producer.transaction() as tx:
    tx.send_many(topic, [bytes(100)] * 50_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with producer.transaction() as tx:
    tx.send_many(topic, (bytes(1000) for _ in range(size // 1000)))
    for _ in range(10_000):
        tx.send(topic, bytes(1000))
print("grew", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_clients_memory_does_not_grow_with_the_transaction(broker: LiveServer, topic: str) -> None:
    size = max(60 << 20, scaled(2 << 30))
    with Worker(GROWING, broker.address, topic, str(size)) as worker:
        worker.wait_for("grew", seconds=SECONDS * 10)
    grew_kib = int(worker.lines[-1].split()[1])
    assert grew_kib < 48 << 10, f"{size} bytes sent, {grew_kib} KiB more"
    with tfmq.Admin(broker.address) as admin:
        admin.delete_topic(topic)
