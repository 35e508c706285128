"""docs/delay.md, row by row, on a clock that the test moves: the clock, handles, what waits, what goes wrong."""

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import click
import pytest

import tfmq
from tests import paths
from tfmq.cli.main import commands
from tfmq.testing.broker import SimulatedBroker

PAGE = (paths.ROOT / "docs" / "delay.md").read_text()
HOUR = 3_600
TICK = timedelta(milliseconds=10)


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        yield made


def texts(broker: SimulatedBroker, topic: str = "t") -> list[str]:
    return [message.text for message in broker.sent(topic)]


def send_both(broker: SimulatedBroker, hours: float) -> None:
    """One by `delay`, one by `deliver_at`, for the same moment as the clock shows it now."""
    producer = broker.producer()
    producer.send("t", "delay", delay=hours * HOUR).result()
    producer.send("t", "at", deliver_at=broker.clock.now + timedelta(hours=hours)).result()


def comes(broker: SimulatedBroker, text: str, most_hours: float) -> float:
    """After how many hours from now it is there, to a second; it is not there now."""
    assert text not in texts(broker), f"{text} came early"
    began = broker.clock.monotonic()
    step = most_hours * HOUR
    while step >= 0.5:
        broker.clock.advance(step)
        found = text in texts(broker)
        assert found or step < most_hours * HOUR, f"{text} did not come in {most_hours} hours"
        if found:
            break
    return (broker.clock.monotonic() - began) / HOUR


def waits_exactly(broker: SimulatedBroker, text: str, hours: float) -> None:
    """It comes then, not a second before, and at most a tick late."""
    broker.clock.advance(hours * HOUR - 1)
    assert text not in texts(broker), f"{text} came early"
    broker.clock.advance(1 + TICK.total_seconds())
    assert text in texts(broker), f"{text} is late"


# The clock


@pytest.mark.parametrize(("text", "hours"), [("delay", 4), ("at", 4)])
def test_a_clock_set_forward_makes_nothing_early(broker: SimulatedBroker, text: str, hours: int) -> None:
    send_both(broker, 4)
    broker.clock.step(timedelta(hours=1))
    waits_exactly(broker, text, hours)


@pytest.mark.parametrize("text", ["delay", "at"])
@pytest.mark.parametrize("end", ["", "restart", "crash"])
@pytest.mark.parametrize("wait", [0, 60], ids=["", "after a checkpoint"])
def test_what_is_sent_after_a_clock_was_set_forward_is_on_time(
    broker: SimulatedBroker, text: str, end: str, wait: int
) -> None:
    """Over a start, too, where broker time takes up the clock: what was put in front for it goes back."""
    broker.clock.step(timedelta(hours=1))
    send_both(broker, 4)
    broker.clock.advance(wait)
    if end:
        getattr(broker, end)()
    # A delay loses what a start puts broker time ahead: the clock says that the time has passed.
    waits_exactly(broker, text, (3 if end and text == "delay" else 4) - wait / HOUR)


@pytest.mark.parametrize("end", ["", "restart", "crash"])
def test_what_was_sent_meanwhile_waits_for_a_clock_that_is_set_back_again(broker: SimulatedBroker, end: str) -> None:
    broker.clock.step(timedelta(hours=1))
    send_both(broker, 4)
    broker.clock.step(timedelta(hours=-1))
    if end:
        getattr(broker, end)()
    waits_exactly(broker, "at", 5)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_change_of_the_clock_is_reported(broker: SimulatedBroker, hours: int) -> None:
    broker.clock.step(timedelta(hours=hours))
    assert broker.admin().status()["delay"]["ahead_ms"] == pytest.approx(-hours * HOUR * 1000, abs=100)


def test_a_start_takes_up_a_clock_that_was_set_forward(broker: SimulatedBroker) -> None:
    send_both(broker, 4)
    broker.clock.step(timedelta(hours=1))
    broker.restart()
    waits_exactly(broker, "at", 3)


@pytest.mark.parametrize(("text", "hours"), [("delay", 4), ("at", 5)])
def test_a_clock_set_back_makes_only_times_of_day_wait_for_it(broker: SimulatedBroker, text: str, hours: int) -> None:
    send_both(broker, 4)
    broker.clock.advance(hours=1)
    broker.clock.step(timedelta(hours=-1))
    waits_exactly(broker, text, hours - 1)


@pytest.mark.parametrize("text", ["delay", "at"])
@pytest.mark.parametrize("end", ["restart", "crash"])
def test_downtime_counts(broker: SimulatedBroker, text: str, end: str) -> None:
    send_both(broker, 4)
    getattr(broker, end)(down=3 * HOUR)
    waits_exactly(broker, text, 1)


def test_what_fell_due_meanwhile_comes_after_the_start_in_order(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    for number in (5, 3, 9, 1, 7):
        producer.send("t", str(number), delay=number * HOUR).result()
    broker.crash(down=8 * HOUR)
    broker.clock.advance(1)
    assert texts(broker) == ["1", "3", "5", "7"]
    broker.clock.advance(hours=1)
    assert texts(broker) == ["1", "3", "5", "7", "9"]


@pytest.mark.parametrize(("text", "hours"), [("delay", 4), ("at", 14)])
def test_a_clock_that_is_slow_at_the_start_makes_it_late_never_early(
    broker: SimulatedBroker, text: str, hours: int
) -> None:
    send_both(broker, 4)
    broker.stop()
    broker.clock.step(timedelta(hours=-10))
    broker.start()
    waits_exactly(broker, text, hours)


@pytest.mark.parametrize("text", ["delay", "at"])
def test_a_clock_that_is_ahead_at_the_start_delivers_what_seems_due(broker: SimulatedBroker, text: str) -> None:
    send_both(broker, 4)
    broker.stop()
    broker.clock.step(timedelta(hours=10))
    broker.start()
    broker.clock.advance(1)
    assert text in texts(broker)


def test_what_is_sent_after_such_a_clock_was_set_right_is_on_time(broker: SimulatedBroker) -> None:
    broker.stop()
    broker.clock.step(timedelta(days=3650))
    broker.start()
    broker.clock.advance(60)
    broker.clock.step(timedelta(days=-3650))
    for again in (False, True):
        if again:
            broker.restart()
        send_both(broker, 4)
        assert broker.admin().status()["delay"]["ahead_ms"] == pytest.approx(3650 * 86_400_000, rel=1e-6)
        broker.clock.advance(4 * HOUR - 1)
        count = 2 * again
        assert len(texts(broker)) == count
        broker.clock.advance(1 + TICK.total_seconds())
        assert sorted(texts(broker)[count:]) == ["at", "delay"]


# Handles


def pending(broker: SimulatedBroker, producer: tfmq.Producer) -> str:
    return str(producer.send("t", "x", delay=HOUR).result().delayed)


def delivered(broker: SimulatedBroker, producer: tfmq.Producer) -> str:
    handle = pending(broker, producer)
    broker.clock.advance(hours=2)
    return handle


def cancelled(broker: SimulatedBroker, producer: tfmq.Producer) -> str:
    handle = pending(broker, producer)
    producer.cancel(handle)
    return handle


def rescheduled(broker: SimulatedBroker, producer: tfmq.Producer) -> str:
    handle = pending(broker, producer)
    producer.reschedule(handle, delay=5 * HOUR)
    return handle


def of_another_broker(broker: SimulatedBroker, producer: tfmq.Producer) -> str:
    with SimulatedBroker(seed=2) as other:
        return pending(other, other.producer())


def of_a_deleted_topic(broker: SimulatedBroker, producer: tfmq.Producer) -> str:
    topic = f"gone-{broker.clock.monotonic()}"
    handle = str(producer.send(topic, "x", delay=HOUR).result().delayed)
    broker.admin().delete_topic(topic)
    broker.clock.advance(1)
    return handle


STATES = [
    (pending, "cancelled", "rescheduled"),
    (delivered, "delivered", "delivered"),
    (cancelled, "cancelled", "cancelled"),
    (rescheduled, "cancelled", "rescheduled"),
    (of_another_broker, "unknown", "unknown"),
    (of_a_deleted_topic, "unknown", "unknown"),
]
Make = Callable[[SimulatedBroker, tfmq.Producer], str]


@pytest.mark.parametrize(("make", "cancel", "reschedule"), STATES, ids=[make.__name__ for make, _, _ in STATES])
@pytest.mark.parametrize("crash", [False, True], ids=["", "over a power cut"])
def test_the_table_of_handles(broker: SimulatedBroker, make: Make, cancel: str, reschedule: str, crash: bool) -> None:
    producer = broker.producer()
    asked = [make(broker, producer) for _ in range(2)]
    if crash:
        broker.crash()
    moved = producer.reschedule(asked[0], delay=HOUR)
    assert (moved.state, moved.handle is None) == (reschedule, reschedule != "rescheduled")
    assert [producer.cancel(asked[1]) for _ in range(2)] == [cancel] * 2, "the first answer again"
    if crash:
        broker.crash()
        assert producer.cancel(asked[1]) == cancel
    broker.clock.advance(hours=6)
    count = {"delivered": 2, "rescheduled": 1}.get(reschedule, 0)
    assert len(texts(broker)) == count


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("restart", [False, True])
def test_what_was_cancelled_long_ago_is_never_brought_back(broker: SimulatedBroker, restart: bool, rounds: int) -> None:
    producer = broker.producer()
    handle = cancelled(broker, producer)
    for _ in range(rounds):
        broker.clock.advance(days=3)
        cancelled(broker, producer)
    broker.clock.advance(days=3)
    if restart:
        broker.restart()
    assert producer.reschedule(handle, delay=60).handle is None
    assert broker.admin().describe_delayed(handle).state in ("cancelled", "unknown")
    assert producer.cancel(handle) in ("cancelled", "unknown")
    broker.clock.advance(hours=2)
    assert texts(broker) == []


def test_a_program_with_the_first_handle_takes_it_back_wherever_it_waits(broker: SimulatedBroker) -> None:
    producer, admin = broker.producer(), broker.admin()
    first = pending(broker, producer)
    second = producer.reschedule(first, delay=2 * HOUR).handle
    third = producer.reschedule(str(second), deliver_at=broker.clock.now + timedelta(days=2)).handle
    reported = admin.describe_delayed(first)
    assert (reported.state, reported.details["handle_now"]) == ("pending", third)
    assert producer.cancel(first) == "cancelled"
    assert producer.cancel(str(third)) == "cancelled"
    assert admin.delayed() == []


@pytest.mark.parametrize("restart", [False, True])
def test_the_first_handle_is_good_as_long_as_its_message_waits(broker: SimulatedBroker, restart: bool) -> None:
    producer = broker.producer()
    first = pending(broker, producer)
    producer.reschedule(first, delay=timedelta(days=30))
    for _ in range(10):
        broker.clock.advance(days=1)
        producer.send("others", "x", delay=5).result()
    if restart:
        broker.restart()
    assert producer.cancel(first) == "cancelled"
    broker.clock.advance(days=40)
    assert texts(broker) == []


def test_what_is_moved_keeps_content_id_partition_and_birth(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    sent = producer.send("t", "x", key="k", tag="a", properties={"n": "1"}, delay=60).result()
    birth = broker.clock.now
    broker.clock.advance(30)
    producer.reschedule(sent.delayed, delay=90)
    broker.clock.advance(91)
    (message,) = broker.sent("t")
    assert (message.id, message.partition, message.key, message.tag) == (sent.message_id, sent.partition, "k", "a")
    assert message.born_at is not None and abs(message.born_at - birth) < timedelta(seconds=1)
    assert message.appended_at - birth >= timedelta(seconds=120)


# What goes wrong


def test_a_stopped_partition_holds_up_itself_and_the_status_says_so(broker: SimulatedBroker) -> None:
    producer, admin = broker.producer(), broker.admin()
    send = producer.send
    for topic in ("bad", "good"):
        send(topic, "before").result()
        send(topic, "later", delay=60).result()
    broker.disk.faults.fail("force", path="bad-0")
    with pytest.raises(tfmq.TfmqError):
        send("bad", "x").result()
    broker.clock.advance(minutes=2)
    assert texts(broker, "good") == ["before", "later"]
    assert "later" not in texts(broker, "bad")
    found = admin.status()["delay"]
    assert found["held"] == 1 and [target for target, _ in found["waits_for"]] == ["bad-0"]
    admin.resume("bad", 0)
    broker.clock.advance(minutes=1)
    assert texts(broker, "bad")[-1] == "later"
    assert admin.status()["delay"]["held"] == 0


def test_a_full_disk_delays_and_refuses_and_goes_on_when_there_is_space(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    handles = [producer.send("t", str(number), delay=60 + number).result().delayed for number in range(3)]
    broker.disk.space_bytes = 0
    with pytest.raises(tfmq.DiskFull) as reported:
        producer.send("t", "no", delay=1).result()
    assert reported.value.outcome == "not done"
    with pytest.raises(tfmq.DiskFull) as reported:
        producer.cancel(handles[0])
    assert reported.value.outcome == "not done"
    broker.clock.advance(minutes=5)
    assert texts(broker) == []
    broker.disk.space_bytes = None
    broker.clock.advance(minutes=5)
    assert texts(broker) == ["0", "1", "2"]


def test_what_is_more_than_may_wait_is_tried_again_and_all_else_goes_on() -> None:
    with SimulatedBroker(settings={"limits.delayed": 10}) as broker:
        producer = broker.producer(timeout=5)
        handles = [producer.send("t", "x", delay=HOUR).result().delayed for _ in range(10)]
        broker.clock.advance(1)
        began = broker.clock.now
        with pytest.raises(tfmq.Busy) as reported:
            producer.send("t", "one too many", delay=HOUR).result()
        assert reported.value.outcome == "not done" and broker.clock.now - began > timedelta(seconds=4)
        producer.send("t", "plain").result()
        assert producer.cancel(handles[0]) == "cancelled"
        broker.clock.advance(hours=2)
        assert texts(broker) == ["plain", *["x"] * 9]
        producer.send("t", "room again", delay=1).result()


def test_times_that_are_none_are_refused_in_the_call(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    for wrong in (
        {"delay": 1, "deliver_at": broker.clock.now},
        {"deliver_at": broker.clock.now.replace(tzinfo=None)},
        {"delay": "1"},
    ):
        with pytest.raises(TypeError):
            producer.send("t", "x", **wrong)
    with pytest.raises(tfmq.BadRequest):
        producer.cancel("order-42")


def test_without_an_answer_there_is_no_handle_and_the_message_comes_all_the_same(broker: SimulatedBroker) -> None:
    producer = broker.producer(acks="none")
    assert producer.send("t", "x", delay=60).result().delayed is None
    broker.settle()
    waits_exactly(broker, "x", 60 / HOUR)


def test_a_transaction_returns_the_handle_and_the_list_finds_it_by_its_key(broker: SimulatedBroker) -> None:
    with broker.producer().transaction() as tx:
        reported = tx.send("checks", "42", key="42", delay=1_800)
    (found,) = broker.admin().delayed("checks", key="42")
    assert reported.result().delayed == found.handle
    assert found.due_ms == (broker.clock.wall_ms() + 1_800_000)


# The page itself


def test_its_programs_run_as_they_are_written(broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMQ_SERVERS", broker.servers)
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 2
    names = {"tfmq": tfmq, "datetime": datetime, "ZoneInfo": ZoneInfo, "order": "one kettle"}
    for program in programs:
        exec(program, {**names, "producer": broker.producer()})
    broker.clock.advance(hours=1)
    assert texts(broker, "orders") == ["one kettle"]
    assert texts(broker, "reminders") == texts(broker, "checks") == [], "they were cancelled"
    assert [each.topic for each in broker.admin().delayed()] == ["greetings"]


def test_the_commands_of_the_page_are_there() -> None:
    lines = re.findall(r"^(?:\$ )?tfmq (.*)$", PAGE, re.MULTILINE) + re.findall(r"`tfmq ([^`]*)`", PAGE)
    assert len(lines) > 12
    for line in lines:
        words = [word for word in line.split("|")[0].split() if re.fullmatch(r"[a-z]+", word)]
        context = click.Context(commands, info_name="tfmq")
        group: click.Command = commands
        for word in words:
            if not isinstance(group, click.Group):
                break
            found = group.get_command(context, word)
            assert found is not None, line
            group = found
        options = {name for parameter in group.params for name in parameter.opts}
        given = re.findall(r"(?<!\S)(--[a-z]+|-[a-z])(?!\S)", line.split("|")[0])
        assert set(given) <= options, line


def test_its_names_are_those_of_the_code() -> None:
    for name in re.findall(r"`producer\.(\w+)\(", PAGE):
        assert hasattr(tfmq.Producer, name), name
    for name in ("delayed", "describe_delayed", "delayed_histogram", "cancel", "reschedule"):
        assert f"`{name}(" in PAGE and hasattr(tfmq.Admin, name)
