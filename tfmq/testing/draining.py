"""A consumer that takes everything there is: how a test lets its consuming side catch up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.consumer import Consumer
from tfmq.errors import TimedOut
from tfmq.testing.clock import VirtualClock

LOOKS: Final = 2
"""So many looks in a row find nothing when there is nothing: the first one of a consumer only asks."""
STEP_SECONDS: Final = 0.05
"""How far time goes on between two looks at a consumer that cannot read yet."""
POLL_MESSAGES: Final = 500

Handler = Callable[[ReceivedMessage[Any]], object]


def drain(
    clock: VirtualClock,
    settle: Callable[[], None],
    there: Callable[[str], bool],
    consumer: Consumer[Any],
    handler: Handler | None,
    timeout: float,
) -> list[ReceivedMessage[Any]]:
    """See `SimulatedBroker.drain`. `settle` has everybody do what is to be done now, `there` says whether the broker
    has a topic.
    """
    if not isinstance(consumer, Consumer):
        raise TypeError(
            f"drain() takes a tfmq.Consumer, not {type(consumer).__name__}: with asyncio await consumer.poll(timeout=0)"
            " until it gives nothing."
        )
    found: list[ReceivedMessage[Any]] = []
    until = clock.monotonic() + timeout
    looks = 0
    while True:
        settle()
        messages = consumer.poll(timeout=0, max_messages=POLL_MESSAGES if handler is None else 1)
        for message in messages:
            if handler is not None:
                handler(message)
        found += messages
        if messages or reads(consumer, there):
            looks = 0 if messages else looks + 1
            if looks == LOOKS:
                return found
            continue
        if clock.monotonic() >= until:
            raise TimedOut(
                f"The consumer could not read everything within {timeout:g} s of the test's clock; it took"
                f" {len(found)} messages. Its log (tfmq.consumer) says what it waits for."
            )
        clock.advance(min(STEP_SECONDS, until - clock.monotonic()))


def reads(consumer: Consumer[Any], there: Callable[[str], bool]) -> bool:
    """Whether it is connected, knows its partitions, and none of them is to be tried again. It does not know those of a
    topic that was made behind its last look for it.
    """
    core = consumer._core
    if any(there(name) for name in core.options.subscription.missing(core.assignment.wanted)):
        return False
    return core.link.state == "ready" and core.assignment.looked and core.fetcher.next_retry() is None
