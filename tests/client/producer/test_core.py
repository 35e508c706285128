"""A producer's arguments: checked when it is made, each refusal names its value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from inspect import signature
from typing import Any

import pytest

import tfmq
from tests.client.fake_broker import HOLD, FakeBroker
from tests.client.rig import Rig
from tfmq.client.operation import Future, Operation, Wait
from tfmq.client.producer.core import ProducerCore, send_options
from tfmq.client.producer.delivery import BlockingDeliveryOwner
from tfmq.client.send.delivery_time import DeliveryTime
from tfmq.client.send.partitioner import RoundRobin
from tfmq.codecs import json
from tfmq.errors import BadRequest, Busy, Closed, DeliveryFailed, NotSupported, TimedOut
from tfmq.message import Message
from tfmq.producer import Producer
from tfmq.protocol.commands import ACKS_WRITTEN, DUE_RELATIVE, Metadata, Produce
from tfmq.protocol.delayed_handle import decode_due_times


def arguments(**others: Any) -> dict[str, Any]:
    """The arguments of a producer, with the defaults of those that are not given."""
    given = signature(Producer).bind(**others)
    given.apply_defaults()
    return given.arguments


def test_units_are_seconds_inside() -> None:
    options = send_options(arguments(acks="written", linger_ms=20))
    assert (options.acks, options.linger_seconds, options.timeout) == (ACKS_WRITTEN, 0.02, 30.0)


def test_a_batch_is_no_larger_than_the_buffer() -> None:
    assert send_options(arguments(buffer_bytes=100)).batch_bytes == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"acks": "all"},
        {"group": "a b"},
        {"linger_ms": -1},
        {"timeout": 0},
        {"batch_bytes": 9 << 20},
        {"buffer_bytes": "1"},
        {"codec": "json"},
    ],
)
def test_what_makes_no_sense_is_refused_by_its_value(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        send_options(arguments(**wrong))
    assert str(next(iter(wrong.values()))) in caught.value.sentence


@pytest.mark.parametrize("codec", [{"orders": "json"}, {"no topic!": tfmq.codecs.json}])
def test_one_codec_by_topic_is_checked_topic_by_topic(codec: Any) -> None:
    send_options(arguments(codec={"orders": tfmq.codecs.json}))
    with pytest.raises(BadRequest, match=r"'json' is none|names 'no topic!'"):
        send_options(arguments(codec=codec))


# What both faces do, where waiting is the test's own.

DEFAULTS = arguments(servers="broker:1", batch_bytes=10_000, buffer_bytes=40_000, timeout=2.0)


class CoreRig(Rig):
    """A core whose driver is the rig."""

    def __init__(self, settings: Mapping[str, Any] = DEFAULTS, broker: FakeBroker | None = None) -> None:
        super().__init__(broker)
        self.on_fork: list[object] = []
        self.callbacks: list[object] = []
        self.lock = nullcontext()
        self.closed = False
        self.core = ProducerCore(BlockingDeliveryOwner, self._wire, settings)

    def clock(self) -> float:
        return self.time

    def wait(self, targets: Iterable[Future], seconds: float | None) -> bool:
        waited = tuple(targets)

        def once() -> Operation[None]:
            yield Wait(waited, seconds)

        self.run(once())
        return any(target.done for target in waited)

    def _wire(self, link):  # type: ignore[no-untyped-def]
        link.now = lambda: self.time
        self.link = link
        return self


def test_a_topic_is_learned_before_a_key_chooses() -> None:
    rig = CoreRig(broker=FakeBroker(4))
    message = rig.core.make_message("orders", b"x", key="k")
    assert not rig.core.can_append("orders", message)
    delivery = rig.run(rig.core.send("orders", message, rig.core.encode_payload("orders", message)))
    assert delivery[0].partition >= 0
    assert rig.core.can_append("orders", message)


def test_many_stop_at_the_first_failure() -> None:
    rig = CoreRig()
    taken = 0

    def endless():  # type: ignore[no-untyped-def]
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 1000

    rig.broker.plan(Produce, NotSupported("refused"))
    with pytest.raises(NotSupported, match="refused"):
        rig.run(rig.core.send_many("orders", endless()))
    assert taken < 5000


def test_many_wait_for_room() -> None:
    rig = CoreRig()
    rig.broker.plan(Produce, *[HOLD] * 100)
    with pytest.raises(Busy, match="was full for 2 s"):
        rig.run(rig.core.send_many("orders", [b"x" * 1000] * 1000))


def test_batches_of_many_keep_to_their_size() -> None:
    rig = CoreRig({**DEFAULTS, "buffer_bytes": 10_000_000})
    payloads = [b"x" * (number % 300) for number in range(3000)]
    deliveries = rig.run(rig.core.send_many("orders", payloads))
    rig.run(rig.core.wait_for_batches(deliveries.batches))
    assert rig.broker.payloads("orders") == payloads
    assert max(len(batch.body) for batch in rig.broker.logs["orders", 0]) <= 10_000


def test_partitions_that_are_not_returned_in_time_are_an_error_that_says_what_to_do() -> None:
    """They are asked for anew by another caller, as after a topic was forgotten, and that takes longer."""
    rig = CoreRig(DEFAULTS)
    rig.core.accumulator.topic_entry("orders").metadata_requested = True
    with pytest.raises(TimedOut, match="Try again; if that goes on, see `tfmq status`") as caught:
        rig.run(rig.core.wait_for_topic("orders"))
    assert caught.value.outcome == "not done"


def test_flush_and_close_are_bounded() -> None:
    rig = CoreRig({**DEFAULTS, "timeout": 60.0})
    message = rig.core.make_message("orders", b"x")
    delivery = rig.run(rig.core.send("orders", message, b"x"))
    rig.run(rig.core.wait_for_batches([delivery[0]]))
    rig.broker.plan(Produce, HOLD)
    rig.run(rig.core.send("orders", message, b"y"))
    with pytest.raises(TimedOut):
        rig.run(rig.core.flush(1.0))
    with pytest.raises(DeliveryFailed):
        rig.run(rig.core.close(1.0))
    with pytest.raises(Closed):
        rig.core.make_message("orders", b"z")
    rig.run(rig.core.close(1.0))


def test_a_codec_makes_payloads_but_not_tombstones() -> None:
    core = CoreRig({**DEFAULTS, "codec": json}).core
    assert core.encode_payload("orders", Message({"a": 1})) == b'{"a":1}'
    assert core.encode_payload("orders", Message(None)) is None
    assert not core.has_fast_path
    by_topic = CoreRig({**DEFAULTS, "codec": {"orders": json}}).core
    assert by_topic.encode_payload("orders", Message({"a": 1})) == b'{"a":1}'
    assert by_topic.encode_payload("bills", Message("plain")) == b"plain"
    with pytest.raises(TypeError, match="codec"):
        by_topic.encode_payload("bills", Message({"a": 1}))


def test_a_selector_of_ones_own_is_asked_and_named_ones_are_found() -> None:
    assert isinstance(CoreRig({**DEFAULTS, "selector": "round_robin"}).core.selector, RoundRobin)


def test_after_a_fork_everything_is_fresh() -> None:
    rig = CoreRig()
    message = rig.core.make_message("orders", b"x")
    delivery = rig.run(rig.core.send("orders", message, b"x"))
    sender = rig.core.accumulator
    for forget in rig.on_fork:
        forget()  # type: ignore[operator]
    assert delivery.error() is not None
    assert rig.core.accumulator is not sender and rig.core.accumulator in rig.tickers and sender not in rig.tickers


def delays_ms(rig: CoreRig) -> list[int]:
    """What was left of each delay when it went out."""
    requests = [each for each in rig.broker.requests if isinstance(each, Produce) and each.due]
    return [due - DUE_RELATIVE for each in requests for due in decode_due_times(each.due or b"")]


def test_a_delay_counts_from_the_call_however_long_the_topic_is_not_known() -> None:
    rig = CoreRig({**DEFAULTS, "timeout": 30.0}, FakeBroker(4))
    rig.broker.plan(Metadata, *[HOLD] * 2)
    message = rig.core.make_message("orders", b"x", key="k", delay=60)
    sending = rig.core.send("orders", message, b"x")
    next(sending)
    rig.advance(10)
    rig.broker.release()
    delivery = rig.run(sending)
    rig.run(rig.core.flush(30.0))
    assert delivery.error() is None
    assert delays_ms(rig) == [pytest.approx(50_000, abs=50)]


def test_a_delay_of_many_counts_from_the_moment_at_which_each_is_taken() -> None:
    rig = CoreRig()

    def slow() -> Iterator[bytes]:
        for _ in range(3):
            yield from [b"x" * 20] * 500
            rig.time += 5

    deliveries = rig.run(rig.core.send_many("orders", slow(), DeliveryTime(60)))
    rig.run(rig.core.flush(30.0))
    assert all(delivery.error is None for delivery, _, _ in deliveries.runs)
    assert len(delays_ms(rig)) == 1500 and set(delays_ms(rig)) <= set(range(54_000, 60_001))


def test_an_unknown_time_among_many_is_refused_where_it_stands() -> None:
    rig = CoreRig()
    with pytest.raises(TypeError, match="not both"):
        rig.run(rig.core.send_many("orders", [b"x", Message(b"y", delay=1, deliver_at=2)]))
    with pytest.raises(TypeError, match="not both"):
        rig.run(rig.core.send_many("orders", [b"x"], DeliveryTime(1, 2)))
    rig.run(rig.core.flush(30.0))
    assert rig.broker.payloads("orders") == [b"x"], "what was before it went"


def test_a_closed_producer_takes_nothing_back() -> None:
    rig = CoreRig()
    rig.core.closed = True
    for ask in (lambda: rig.core.cancel("d"), lambda: rig.core.reschedule("d", 5)):
        with pytest.raises(Closed):
            ask()
