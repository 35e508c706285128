"""The blocking face of transactions over real sockets: `with`, threads, forks, generators, checks."""

import gc
import inspect
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tests.client.drivers.test_fork import in_child
from tests.client.fake_broker import HOLD, LOSE, FakeBroker, listening
from tests.scale import scaled
from tfmq.aio import Transaction as AsyncTransaction
from tfmq.errors import Abandoned, NotAllowed, TransactionCommitted, TransactionRolledBack, TransactionState
from tfmq.producer import Producer
from tfmq.protocol.commands import Produce, Transact
from tfmq.transactions import Transaction, XAResource

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
    made = Producer(servers, timeout=5, group="shop")
    yield made
    made.close(1.0)


def until(condition: Any) -> None:
    """Wait until it holds, bounded."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def public(face: type) -> dict[str, Any]:
    found = {**vars(Transaction.__mro__[1]), **vars(face)}
    return {name: member for name, member in found.items() if not name.startswith("_")}


def test_both_api_variants_have_the_same_names_parameters_and_docs() -> None:
    ours, theirs = public(Transaction), public(AsyncTransaction)
    assert ours.keys() == theirs.keys()
    for name, member in ours.items():
        assert member.__doc__, name
        if callable(member):
            mine, other = inspect.signature(member), inspect.signature(theirs[name])
            assert list(mine.parameters.values()) == list(other.parameters.values()), name
            assert theirs[name].__doc__.startswith(member.__doc__), name


def test_leaving_with_commits(producer: Producer, broker: FakeBroker) -> None:
    with producer.transaction() as tx:
        delivery = tx.send("orders", b"1")
        tx.send("bills", "2", key="42", tag="new", properties={"n": "1"})
        many = tx.send_many("orders", [b"3", "4"])
        assert tx.state == "open" and broker.payloads("orders") == []
    assert tx.state == "committed" and tx.commit() == "committed"
    assert (broker.payloads("orders"), broker.payloads("bills")) == ([b"1", b"3", b"4"], [b"2"])
    assert delivery.result().offset == 0 and sum(each.count for each in many.result()) == 2


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt("mine"), SystemExit(3)])
def test_an_exception_rolls_back_and_stays_what_it_is(
    producer: Producer, broker: FakeBroker, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught, producer.transaction() as tx:
        delivery = tx.send("orders", b"1")
        raise error
    assert caught.value is error and tx.state == "rolled_back"
    assert isinstance(delivery.error(), TransactionRolledBack) and broker.payloads("orders") == []


def test_an_exception_after_a_prepare_is_kept_and_says_what_is_in_doubt(servers: str) -> None:
    producer = Producer(servers, timeout=5)
    with pytest.raises(KeyError, match="mine") as caught, producer.begin("order-42") as tx:
        tx.send("orders", b"1")
        tx.prepare()
        producer.close()
        raise KeyError("mine")
    assert "order-42" in caught.value.__notes__[0]


def test_with_inside_a_callback_is_refused_and_keeps_the_exception(producer: Producer, broker: FakeBroker) -> None:
    found: list[BaseException] = []

    def callback(_: object) -> None:
        try:
            with producer.transaction() as tx:
                raise KeyError("mine")
        except KeyError as error:
            found.append(error)
        try:
            with producer.transaction() as tx:
                tx.send_many("orders", [b"x"])
        except NotAllowed as error:
            found.append(error)

    producer.send("orders", b"1").add_callback(callback)
    producer.flush()
    until(lambda: len(found) == 2)
    assert "must not wait" in found[0].__notes__[0] and "must not wait" in str(found[1])


def test_two_phases_over_two_producers(producer: Producer, broker: FakeBroker, servers: str) -> None:
    tx = producer.begin(xid="order-42", timeout=60)
    tx.send("orders", b"1")
    assert (tx.prepare(), tx.xid, tx.state) == ("prepared", "order-42", "prepared")
    with Producer(servers) as other:
        found = other.resume("order-42")
        assert found.state == "prepared" and found.commit() == "committed"
    assert tx.commit() == "committed" and broker.payloads("orders") == [b"1"]


def test_transactions_nest_and_are_apart(producer: Producer, broker: FakeBroker) -> None:
    with producer.transaction() as outer:
        outer.send("orders", b"outer")
        with pytest.raises(ValueError), producer.transaction() as inner:
            inner.send("orders", b"inner")
            raise ValueError
        with producer.transaction() as inner:
            inner.send("orders", b"second")
        producer.send("orders", b"plain").result(SECONDS)
    assert broker.payloads("orders") == [b"second", b"plain", b"outer"]
    with pytest.raises(NotAllowed), outer, outer:
        pass


def test_use_after_the_end_names_the_rule(producer: Producer) -> None:
    with producer.transaction() as tx:
        tx.send("orders", b"1")
    with pytest.raises(TransactionState, match="is committed: begin another one"):
        tx.send("orders", b"2")
    with pytest.raises(TransactionState):
        tx.send_many("orders", [b"2"])
    with pytest.raises(TransactionCommitted):
        tx.rollback()


def test_waiting_for_a_delivery_inside_is_refused(producer: Producer) -> None:
    with producer.transaction() as tx:
        delivery = tx.send("orders", b"1")
        for use in (delivery.result, lambda: delivery.result(5.0)):
            with pytest.raises(NotAllowed, match="Ask for the result after the commit"):
                use()
    assert delivery.result().durability == "synced"


def test_large_ones_go_while_they_grow(producer: Producer, broker: FakeBroker) -> None:
    payload = bytes(10_000)
    with producer.transaction() as tx:
        for _ in range(500):
            tx.send("orders", payload)
        until(lambda: broker.transactions)
        assert broker.payloads("orders") == []
        tx.send_many("bills", (payload for _ in range(2000)))
    assert (len(broker.payloads("orders")), len(broker.payloads("bills"))) == (500, 2000)


def test_what_grows_goes_on_while_its_sender_is_elsewhere(producer: Producer, broker: FakeBroker) -> None:
    tx = producer.transaction()
    for turn in range(2):
        for _ in range(150):
            tx.send("orders", bytes(10_000))
        enough = 4 * (turn + 1)
        until(lambda enough=enough: sum(isinstance(each, Produce) for each in broker.requests) >= enough)
        pipeline = tx._core.requests.pipeline
        assert pipeline is not None
        until(lambda pipeline=pipeline: pipeline.unacked_bytes == 0)  # only the network thread waits for the replies
        if turn == 0:
            until(lambda: producer._driver.network_thread.sleeping)
    assert tx.commit() == "committed" and len(broker.payloads("orders")) == 300


def test_several_threads_send_in_one(producer: Producer, broker: FakeBroker) -> None:
    tx = producer.transaction()
    count = scaled(2000) + 100

    def work(number: int) -> None:
        for each in range(count):
            tx.send("orders", b"%d-%06d" % (number, each) + bytes(200))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert tx.commit() == "committed"
    found = broker.payloads("orders")
    assert len(found) == 4 * count
    for number in range(4):
        mine = [each for each in found if each.startswith(b"%d-" % number)]
        assert mine == sorted(mine)


def test_many_threads_have_transactions_at_once_beside_plain_sends(producer: Producer, broker: FakeBroker) -> None:
    count = scaled(200) + 5
    broker.plan(Transact, *([None] * 20 + [LOSE]) * 3)

    def work(number: int) -> None:
        for each in range(count):
            with producer.transaction() as tx:
                tx.send("orders", b"%d/%d/a" % (number, each))
                tx.send("orders", b"%d/%d/b" % (number, each), key="k")
            producer.send("orders", b"%d/%d/plain" % (number, each)).result(SECONDS)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS * 2)
    assert not [thread for thread in threads if thread.is_alive()]
    found = broker.payloads("orders")
    assert len(found) == len(set(found)) == 8 * count * 3
    plain = {each.producer_id for each in broker.requests if isinstance(each, Produce)}
    assert plain.isdisjoint(each.producer_id for each in broker.requests if isinstance(each, Transact))


def test_one_thread_may_wait_for_what_another_commits(producer: Producer, broker: FakeBroker) -> None:
    tx = producer.transaction()
    delivery = tx.send("orders", b"1")
    broker.plan(Transact, HOLD)
    committing = threading.Thread(target=tx.commit)
    committing.start()
    until(lambda: broker.held)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(delivery.result(SECONDS)))
    waiting.start()
    broker.release()
    committing.join(SECONDS), waiting.join(SECONDS)
    assert len(found) == 1 and tx.state == "committed"


def test_a_transaction_of_the_parent_is_dead_in_the_child(producer: Producer, broker: FakeBroker) -> None:
    tx = producer.begin("order-42")
    tx.send("orders", b"parent")
    producer.transaction().send("orders", b"gone")

    def child() -> None:
        assert tx.state == "abandoned"
        for use in (tx.commit, tx.rollback, lambda: tx.send("orders", b"child")):
            try:
                use()
            except Abandoned as error:
                assert "the parent process" in str(error)
            else:
                raise AssertionError
        with producer.transaction() as own:
            own.send("orders", b"child")
        producer.close()

    assert in_child(child) == 0
    assert tx.state == "open" and tx.commit() == "committed"
    assert broker.payloads("orders") == [b"child", b"parent"]


def test_a_fork_inside_with_leaves_the_child_without_it(producer: Producer, broker: FakeBroker) -> None:
    def child() -> None:
        try:
            tx.__exit__(None, None, None)
        except Abandoned:
            return
        raise AssertionError

    with producer.transaction() as tx:
        tx.send("orders", b"parent")
        assert in_child(child) == 0
    assert broker.payloads("orders") == [b"parent"]


def test_a_generator_that_is_thrown_away_rolls_back_without_waiting(producer: Producer, broker: FakeBroker) -> None:
    def generating() -> Iterator[None]:
        with producer.begin("order-42") as tx:
            tx.send("orders", b"1")
            pipeline = tx._core.requests.pipeline
            until(lambda: pipeline.begun)
            yield

    generator = generating()
    next(generator)
    with producer._driver.lock:  # as where the garbage collector finds it
        del generator
        gc.collect()
    until(lambda: broker.states() == ["rolled_back"])


@pytest.mark.long
def test_one_that_is_dropped_is_rolled_back(
    producer: Producer, broker: FakeBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmq.client.drivers.blocking.ACTIVE_SECONDS", 0.0)
    dropped = producer.begin("order-42")
    dropped.send("orders", b"1")
    pipeline = dropped._core.requests.pipeline
    until(lambda: pipeline.begun)  # one whose begin is not answered yet ends by its time
    driver, thread = producer._driver, producer._driver.network_thread
    # Nothing wakes it by itself within the time that the test waits for the rollback.
    until(lambda: thread.sleeping and not thread._gate.is_set() and driver.next_time() > driver.clock() + SECONDS)
    del dropped
    gc.collect()
    with caplog.at_level(logging.WARNING):
        producer.transaction()
    until(lambda: broker.states() == ["rolled_back"])
    assert "was dropped" in caplog.text


def test_closing_a_producer_logs_what_it_rolled_back(servers: str, broker: FakeBroker) -> None:
    producer = Producer(servers)
    tx = producer.begin("order-42")
    tx.send("orders", b"1")
    with pytest.raises(TransactionRolledBack, match="1 open transaction was rolled back"):
        producer.close()
    producer.close()
    assert tx.state == "rolled_back" and broker.states() == ["rolled_back"]
    with pytest.raises(TransactionRolledBack, match="The producer was closed"):
        tx.commit()


PROGRAM = """
import sys, logging, tfmq
logging.basicConfig(format="%(message)s")
producer = tfmq.Producer(sys.argv[1])
tx = producer.begin("order-42")
tx.send("orders", b"1")
"""


@pytest.mark.long
def test_a_program_that_ends_inside_rolls_back_and_says_so(servers: str, broker: FakeBroker) -> None:
    command = [sys.executable, "-c", PROGRAM, servers]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "1 open transaction was rolled back when the producer was closed" in run.stderr
    assert broker.states() == ["rolled_back"]


def test_the_check_is_asked_while_nothing_is_sent(
    producer: Producer, broker: FakeBroker, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmq.client.transaction.check_back.POLL_SECONDS", 0.02)
    asked: list[object] = []

    @producer.transaction_check
    def decide(transaction: tfmq.client.transaction.check_back.InDoubt) -> str:
        asked.append((transaction.xid, threading.current_thread() is threading.main_thread()))
        producer.send("log", transaction.xid).result(SECONDS)  # it may use the producer, and take its time
        return "commit"

    with Producer(servers) as other:
        tx = other.begin("order-42")
        tx.send("orders", b"1")
        tx.prepare()
    until(lambda: broker.parked)
    broker.ask("order-42", 1)
    until(lambda: broker.states() == ["committed"])
    assert asked == [("order-42", False)] and broker.payloads("log") == [b"order-42"]
    assert broker.payloads("orders") == [b"1"]


def test_hooks_and_codecs_work_inside(servers: str, broker: FakeBroker) -> None:
    ended: list[object] = []

    class Watch(tfmq.Hook):
        def before_send(self, topic: str, message: tfmq.Message) -> tfmq.Message:
            return message._replace(properties={"seen": topic})

        def after_send(self, topic: str, message: tfmq.Message, result: object, error: object) -> None:
            ended.append(error or message.payload)

    with Producer(servers, hooks=[Watch()], codec=tfmq.codecs.json) as producer:
        with producer.transaction() as tx:
            tx.send("orders", {"n": 1})
            tx.send_many("orders", [{"n": 2}, {"n": 3}])
            assert ended == []
        with pytest.raises(ValueError), producer.transaction() as tx:
            tx.send("orders", {"n": 4})
            raise ValueError
        producer.flush()
        until(lambda: len(ended) == 4)
    assert ended[:3] == [{"n": 1}, {"n": 2}, {"n": 3}] and isinstance(ended[3], TransactionRolledBack)
    assert broker.payloads("orders") == [b'{"n":1}', b'{"n":2}', b'{"n":3}']


@pytest.mark.parametrize("wrong", [None, "127.0.0.1:7000", tfmq.Admin])
def test_what_is_no_blocking_producer_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"tfmq\.XAResource needs a tfmq\.Producer, not"):
        tfmq.XAResource(wrong)  # type: ignore[arg-type]


def test_a_transaction_manager_drives_it_through_both_phases() -> None:
    broker = FakeBroker()
    with listening(broker) as servers, tfmq.Producer(servers, group="shop") as producer:
        resource = tfmq.XAResource(producer)
        tx = resource.start("branch-1", timeout=30)
        tx.send("orders", b"1")
        with pytest.raises(TransactionState):
            resource.prepare("branch-1")
        resource.end("branch-1")
        assert resource.start("branch-1", resume=True).send("orders", b"2") is not None
        resource.end("branch-1")
        assert resource.prepare("branch-1") == "prepared"
        assert resource.recover() == resource.recover("shop") == ["branch-1"]
        assert resource.recover("another") == []
        assert resource.commit("branch-1") == "committed"
        resource.start("branch-2").send("orders", b"3")
        resource.end("branch-2")
        assert resource.rollback("branch-2") == "rolled_back"
        assert resource.forget("branch-1") is False
    assert broker.payloads("orders") == [b"1", b"2"]


def test_a_producer_gives_one() -> None:
    producer = tfmq.Producer("127.0.0.1:1")
    assert isinstance(producer.xa(), XAResource)
    producer.close()
