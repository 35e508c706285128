"""What "processed" means, one test a sentence, on the whole client and broker; each for the loop and for `poll`.

Whether a message was processed shows in what the next consumer of the same group is given.
"""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tfmq.testing.broker import SimulatedBroker

SAVED_EVERY = 5.0
MODES = ("auto", "manual", "before")


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        producer = made.producer()
        for number in range(6):
            producer.send("orders", str(number)).result()
        yield made


def member(broker: SimulatedBroker, commits: str = "auto", **options: Any) -> tfmq.Consumer[Any]:
    return broker.consumer("orders", group="billing", commits=commits, **options)


def rest(broker: SimulatedBroker) -> str:
    """What the next consumer of the group is given, as one text."""
    with member(broker, "manual") as consumer:
        return "".join(message.text for message in broker.drain(consumer))


def polled(consumer: tfmq.Consumer[Any], count: int) -> str:
    return "".join(message.text for message in consumer.poll(timeout=1, max_messages=count))


# A message of a loop


def test_message_n_is_acked_when_the_next_one_is_asked_for(broker: SimulatedBroker) -> None:
    consumer = member(broker)
    next(consumer), next(consumer), next(consumer)
    consumer.close()
    assert rest(broker) == "2345"


def test_it_is_acked_when_with_ends_without_an_exception(broker: SimulatedBroker) -> None:
    with member(broker) as consumer:
        next(consumer), next(consumer)
    assert rest(broker) == "2345"


def test_so_it_is_after_a_break(broker: SimulatedBroker) -> None:
    with member(broker) as consumer:
        for message in consumer:
            if message.text == "1":
                break
    assert rest(broker) == "2345"


def test_an_exception_leaves_it_unacked(broker: SimulatedBroker) -> None:
    with pytest.raises(RuntimeError, match="the handler"), member(broker) as consumer:
        for message in consumer:
            if message.text == "1":
                raise RuntimeError("the handler")
    assert rest(broker) == "12345"


def test_ctrl_c_leaves_it_unacked(broker: SimulatedBroker) -> None:
    with pytest.raises(KeyboardInterrupt), member(broker) as consumer:
        for message in consumer:
            if message.text == "1":
                signal.raise_signal(signal.SIGINT)
    assert rest(broker) == "12345"


def test_ctrl_c_while_the_next_one_is_waited_for_finds_it_acked(broker: SimulatedBroker) -> None:
    """It was asked for the next one, so the one before is done."""

    def interrupted(message: Any) -> bool:
        if message.text == "6":
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt), member(broker, where=interrupted) as consumer:
        for message in consumer:
            if message.text == "5":
                broker.producer().send("orders", "6").result()
    assert rest(broker) == "6"


def test_a_bare_close_leaves_it_unacked(broker: SimulatedBroker) -> None:
    consumer = member(broker)
    next(consumer), next(consumer)
    consumer.close()
    assert rest(broker) == "12345"


def test_stop_ends_the_loop_after_the_message_which_is_acked(broker: SimulatedBroker) -> None:
    with member(broker) as consumer:
        for message in consumer:
            if message.text == "1":
                consumer.stop()
    assert rest(broker) == "2345"


# A batch of poll


def test_a_polled_batch_is_acked_when_poll_is_called_again(broker: SimulatedBroker) -> None:
    consumer = member(broker)
    assert (polled(consumer, 2), polled(consumer, 2)) == ("01", "23")
    consumer.close()
    assert rest(broker) == "2345"


def test_also_when_the_poll_brings_nothing(broker: SimulatedBroker) -> None:
    consumer = member(broker)
    polled(consumer, 6)
    assert polled(consumer, 1) == ""
    consumer.close()
    assert rest(broker) == ""


def test_a_polled_batch_is_acked_when_with_ends_without_an_exception(broker: SimulatedBroker) -> None:
    with member(broker) as consumer:
        polled(consumer, 2)
    assert rest(broker) == "2345"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_whole_batch_unacked(broker: SimulatedBroker, error: type[BaseException]) -> None:
    with pytest.raises(error), member(broker) as consumer:
        polled(consumer, 1)
        polled(consumer, 2)
        raise error
    assert rest(broker) == "12345"


def test_a_bare_close_leaves_the_whole_batch_unacked(broker: SimulatedBroker) -> None:
    consumer = member(broker)
    polled(consumer, 2)
    consumer.close()
    assert rest(broker) == "012345"


# commit


@pytest.mark.parametrize("commits", ["auto", "manual"])
def test_commit_is_all_that_was_handed_out_the_current_one_included(broker: SimulatedBroker, commits: str) -> None:
    consumer = member(broker, commits)
    next(consumer), next(consumer)
    consumer.commit()
    consumer.close()
    assert rest(broker) == "2345"


@pytest.mark.parametrize("commits", ["auto", "manual"])
def test_commit_after_a_poll_is_the_whole_batch(broker: SimulatedBroker, commits: str) -> None:
    consumer = member(broker, commits)
    polled(consumer, 3)
    consumer.commit()
    consumer.close()
    assert rest(broker) == "345"


@pytest.mark.parametrize("commits", ["auto", "manual"])
def test_commit_of_a_message_is_up_to_it_and_it(broker: SimulatedBroker, commits: str) -> None:
    consumer = member(broker, commits)
    messages = consumer.poll(timeout=1, max_messages=4)
    consumer.commit(messages[1])
    consumer.close()
    assert rest(broker) == "2345"


@pytest.mark.parametrize("commits", ["auto", "manual"])
def test_commit_of_a_message_of_a_loop_leaves_the_current_one_out(broker: SimulatedBroker, commits: str) -> None:
    with pytest.raises(RuntimeError), member(broker, commits) as consumer:
        before = next(consumer)
        for message in consumer:
            if message.text == "3":
                consumer.commit(before)
                raise RuntimeError
            before = message
    assert rest(broker) == "345"


def test_an_exception_after_a_commit_takes_nothing_of_it_back(broker: SimulatedBroker) -> None:
    with pytest.raises(RuntimeError), member(broker) as consumer:
        next(consumer)
        consumer.commit()
        raise RuntimeError
    assert rest(broker) == "12345"


# When it is saved


def test_what_is_acked_is_saved_every_five_seconds(broker: SimulatedBroker) -> None:
    consumer = member(broker)
    polled(consumer, 2), polled(consumer, 2)
    broker.clock.advance(SAVED_EVERY - 0.5)
    assert consumer.committed("orders", 0) is None
    broker.clock.advance(1)
    assert consumer.committed("orders", 0) == consumer.stats()["partitions"]["orders-0"]["processed_offset"] > 0


def test_what_is_acked_is_saved_at_a_rebalance(broker: SimulatedBroker) -> None:
    broker.admin().grow_topic("orders", 2)
    broker.producer().send("orders", "other", partition=1).result()
    first = member(broker, strategy="range", save_every=3600)
    broker.drain(first)
    first.poll(timeout=0)
    second = member(broker, strategy="range", save_every=3600)
    for _ in range(10):
        assert second.poll(timeout=0) == []
        first.poll(timeout=0)
        broker.clock.advance(0.5)
    (given,) = second.stats()["assigned"]
    broker.producer().send("orders", "6", partition=int(given[-1])).result()
    assert polled(second, 9) == "6", "nothing that the first one had processed comes again"


def test_what_is_acked_is_saved_at_close(broker: SimulatedBroker) -> None:
    with member(broker, save_every=3600) as consumer:
        polled(consumer, 4)
    assert rest(broker) == "45"


def test_a_process_that_dies_leaves_what_it_had_acked_and_not_saved(broker: SimulatedBroker) -> None:
    """That is the window in which messages come twice: at most `save_every` seconds."""
    consumer = member(broker, session=5)
    polled(consumer, 2), polled(consumer, 2)
    broker.clock.advance(SAVED_EVERY + 0.5)
    polled(consumer, 2)
    broker._simulation.clients.remove(consumer._driver)  # type: ignore[arg-type]
    broker.clock.advance(20)
    assert rest(broker) == "2345"


# The modes


def test_manual_saves_nothing_but_what_commit_says(broker: SimulatedBroker) -> None:
    with member(broker, "manual") as consumer:
        polled(consumer, 2), polled(consumer, 2)
        consumer.commit()
        polled(consumer, 2)
        broker.clock.advance(60)
    assert rest(broker) == "45"


def test_before_saves_before_it_hands_out_so_at_most_once(broker: SimulatedBroker) -> None:
    consumer = member(broker, "before")
    next(consumer)
    broker._simulation.clients.remove(consumer._driver)  # type: ignore[arg-type]
    broker.clock.advance(60)
    assert rest(broker) == "12345", "the first one is not given again, whatever became of it"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_before_an_exception_brings_nothing_back(broker: SimulatedBroker, error: type[BaseException]) -> None:
    with pytest.raises(error), member(broker, "before") as consumer:
        polled(consumer, 3)
        raise error
    assert rest(broker) == "345"


@pytest.mark.parametrize("end", [None, RuntimeError, KeyboardInterrupt])
def test_before_whatever_ends_a_loop_its_message_does_not_come_again(
    broker: SimulatedBroker, end: type[BaseException] | None
) -> None:
    consumer = member(broker, "before")
    next(consumer), next(consumer)
    if end is None:
        consumer.close()
    else:
        with pytest.raises(end), consumer:
            raise end
    assert rest(broker) == "2345"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_manual_an_exception_and_with_save_nothing_beside_commit(
    broker: SimulatedBroker, error: type[BaseException]
) -> None:
    with pytest.raises(error), member(broker, "manual") as consumer:
        next(consumer)
        consumer.commit()
        next(consumer), next(consumer)
        raise error
    assert rest(broker) == "12345"


@pytest.mark.parametrize("commits", ["auto", "before"])
def test_offsets_in_a_transaction_need_manual(broker: SimulatedBroker, commits: str) -> None:
    consumer, producer = member(broker, commits), broker.producer()
    polled(consumer, 1)
    with pytest.raises(tfmq.BadRequest, match="manual"), producer.transaction() as tx:
        tx.commit_offsets(consumer)


def test_a_transaction_that_commits_has_saved_what_was_handed_out_and_one_that_does_not_has_not(
    broker: SimulatedBroker,
) -> None:
    producer = broker.producer()
    with member(broker, "manual") as consumer:
        polled(consumer, 2)
        with producer.transaction() as tx:
            tx.send("bills", "both")
            tx.commit_offsets(consumer)
        polled(consumer, 2)
        with pytest.raises(RuntimeError), producer.transaction() as tx:
            tx.commit_offsets(consumer)
            raise RuntimeError
    assert rest(broker) == "2345"


@pytest.mark.parametrize("commits", MODES)
def test_without_handing_out_nothing_is_acked(broker: SimulatedBroker, commits: str) -> None:
    with member(broker, commits) as consumer:
        assert consumer.lag() == 6
        broker.clock.advance(20)
    assert rest(broker) == "012345"
