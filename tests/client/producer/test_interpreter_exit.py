"""The end of the interpreter: every open producer gets its share of the time, and losses are logged.

tests/test_producer.py ends programs.
"""

import asyncio
import logging
from collections.abc import Iterator

import pytest

import tfmq.aio
from tfmq.client.producer import interpreter_exit
from tfmq.errors import DeliveryFailed, MessageTooLarge, TfmqError, TimedOut
from tfmq.testing import SimulatedBroker


class Unclosed:
    def __init__(self, lost: int = 0, error: Exception | None = None) -> None:
        self.lost, self.error, self.seconds = lost, error, 0.0

    def close_at_exit(self, seconds: float) -> tuple[int, TfmqError | None]:
        self.seconds = seconds
        if self.error:
            raise self.error
        return self.lost, TimedOut("too late") if self.lost else None


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_exit, "open_producers", set())


def test_all_that_are_open_are_finished_in_bounded_time_and_losses_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fine, lossy, broken, closed = Unclosed(), Unclosed(3), Unclosed(error=OSError("gone")), Unclosed()
    for each in (fine, lossy, broken, closed):
        interpreter_exit.open_producers.add(each)
    interpreter_exit.open_producers.discard(closed)
    interpreter_exit._close_all_at_exit()
    assert fine.seconds == pytest.approx(interpreter_exit.EXIT_SECONDS / 3)
    assert closed.seconds == 0
    assert "3 messages were not delivered" in caplog.text
    assert "could not be flushed" in caplog.text


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        yield made


def logged_at_exit(caplog: pytest.LogCaptureFixture) -> list[str]:
    interpreter_exit._close_all_at_exit()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_messages_that_failed_before_the_end_are_logged_where_no_result_was_read(
    broker: SimulatedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    producer = broker.producer()
    broker.fail_next("send", MessageTooLarge, times=5)
    deliveries = [producer.send("orders", "x") for _ in range(5)]
    broker.clock.advance(1)
    assert [type(each.peek()) for each in deliveries] == [MessageTooLarge] * 5
    read, *unread = deliveries
    assert read.error()
    (text,) = logged_at_exit(caplog)
    assert text.startswith("4 messages were not delivered when the program ended: close producers, or use")
    assert str(unread[0].peek()) in text


def test_a_program_that_read_its_errors_gets_no_log_at_its_end(
    broker: SimulatedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    producer = broker.producer()
    broker.fail_next("send", MessageTooLarge)
    assert producer.send("orders", "x").error()
    broker.fail_next("send", MessageTooLarge)
    producer.send("orders", "x")
    with pytest.raises(DeliveryFailed):
        producer.flush()
    assert logged_at_exit(caplog) == []


def test_messages_of_an_asyncio_producer_that_failed_before_the_end_are_logged(
    broker: SimulatedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        producer = tfmq.aio.Producer(broker.servers)
        broker.fail_next("send", MessageTooLarge)
        deliveries = [producer.send_nowait("orders", "x") for _ in range(3)]
        with pytest.raises(MessageTooLarge):
            await deliveries[0]

    asyncio.run(program())
    (text,) = logged_at_exit(caplog)
    assert text.startswith("2 messages were not delivered when the program ended")
