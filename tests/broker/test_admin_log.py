"""Administrative acts are in the server's log: what, asked by which client, with which result. Never payloads."""

import inspect
import logging
from collections.abc import Callable

import pytest

from tests.broker.helpers import Broker, Session, after, handles
from tfmq.broker.request_handler import LOGGED_COMMANDS
from tfmq.protocol import commands
from tfmq.protocol.commands import COMMANDS, Command

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Return the acts that were logged since the last call."""
    caplog.set_level(logging.INFO, "tfmq.audit")

    def look() -> list[str]:
        found = [each.getMessage() for each in caplog.records if ", asked by " in each.getMessage()]
        caplog.clear()
        return found

    return look


def test_who_made_grew_and_deleted_a_topic_is_in_the_log(lines: Lines) -> None:
    broker, mary = Broker(), Session("mary at 10.0.0.7:5")
    broker.ask(commands.CreateTopic("orders", 2, {}), session=mary)
    broker.ask(commands.CreateTopic("orders", 2, {}), session=mary)
    broker.ask(commands.GrowTopic("orders", 3), session=mary)
    broker.ask(commands.SetTopic("orders", 0, {"flush.messages": 5}, []), session=mary)
    broker.ask(commands.Truncate("orders", broker.incarnation(), 0, 0), session=mary)
    broker.ask(commands.ResumePartition("orders", 0), session=mary)
    broker.ask(commands.DeleteTopic("orders"), session=mary)
    broker.ask(commands.DeleteTopic("orders"), session=mary)
    broker.ask(commands.Metadata(["bills"], True), session=mary)
    assert lines() == [
        "create topic orders, asked by mary at 10.0.0.7:5: done, 2 partitions",
        "create topic orders, asked by mary at 10.0.0.7:5: not done: There is a topic orders already.",
        "grow topic orders to 3 partitions, asked by mary at 10.0.0.7:5: done, 3 partitions",
        "set topic orders, asked by mary at 10.0.0.7:5: done, its own settings are {'flush.messages': 5}",
        "truncate orders-0 before offset 0, asked by mary at 10.0.0.7:5: done, it begins at offset 0",
        "resume orders-0, asked by mary at 10.0.0.7:5: it is open",
        "delete topic orders, asked by mary at 10.0.0.7:5: done",
        "delete topic orders, asked by mary at 10.0.0.7:5: not done: there is none, or not of that incarnation",
        "create topic bills on first use, asked by mary at 10.0.0.7:5: done, 1 partition",
    ]


def test_schedules_and_groups_too_and_no_payload(lines: Lines) -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0)
    lines()
    add = commands.AddSchedule("nightly", "0 3 * * *", "UTC", "orders")
    broker.ask(add, b"secret")
    broker.ask(commands.PauseSchedule("nightly"))
    broker.ask(commands.ResumeSchedule("nightly"))
    broker.ask(commands.RemoveSchedule("nightly"))
    offset = commands.GroupOffset("orders", broker.incarnation(), 0, 0)
    broker.ask(commands.ResetGroup("billing", [offset]))
    broker.ask(commands.DeleteGroup("billing"))
    found = lines()
    assert [line.partition(", asked by test: ")[::2] for line in found] == [
        ("add schedule nightly for topic orders", "done"),
        ("pause schedule nightly", "done"),
        ("resume schedule nightly", "done"),
        ("remove schedule nightly", "done"),
        ("reset group billing", "done, 1 offsets"),
        ("delete group billing", "done"),
    ]
    assert "secret" not in "".join(found)


def test_a_schedule_for_a_topic_that_is_still_to_be_made_is_not_reported_as_refused(lines: Lines) -> None:
    broker = Broker()
    broker.ask(commands.AddSchedule("nightly", "0 3 * * *", "UTC", "reports"), b"go")
    (line,) = lines()
    assert line.endswith(
        "not done: there is no topic reports yet; a client makes it, if topics.auto_create is on, and asks again"
    )
    broker.create("reports")
    lines()
    broker.ask(commands.AddSchedule("nightly", "0 3 * * *", "UTC", "reports", 9), b"go")
    (line,) = lines()
    assert "not done: The topic reports has 1 partition, no number 9" in line


def test_frequent_requests_are_logged_only_of_operators(lines: Lines) -> None:
    broker, operator = Broker(), Session("mary")
    operator.operator = True
    broker.create()
    lines()
    found = handles(broker.delay(broker.lease(), 0, [b"one", b"two"], due=after(60_000)))
    broker.cancel_delayed(found[0])
    assert lines() == []
    broker.ask(commands.CancelDelayed(found[1]), session=operator)
    broker.ask(commands.RollbackTransaction("a\nb", 7), session=operator)
    cancelled, rolled_back = lines()
    assert cancelled == f"cancel delayed message {found[1]!r}, asked by mary: cancelled"
    assert rolled_back.startswith("roll back transaction 'a\\nb' of epoch 7, asked by mary: failed, outcome unknown: ")


def test_what_a_peer_sent_forges_no_line_and_fills_no_log(lines: Lines) -> None:
    broker = Broker()
    broker.create()
    lines()
    for key in ("x\n2026-11-22 ERROR forged", "y" * 100_000):
        assert broker.ask(commands.SetTopic("orders", 0, {key: 1}, [])).code == "bad_request"
    found = lines()
    assert len(found) == 2
    assert all("\n" not in line and len(line) < 2000 for line in found)


def test_every_act_is_a_command() -> None:
    assert set(LOGGED_COMMANDS) <= set(commands.BY_REQUEST)


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if each.request.shape in LOGGED_COMMANDS], ids=lambda each: each.name
)
def test_the_result_of_an_act_is_made_of_whatever_its_reply_has(command: Command) -> None:
    """A reply that gets a field more would otherwise be a bug that ends the broker's turn."""
    inspect.signature(LOGGED_COMMANDS[command.request.shape].describe_result).bind(*command.reply.names)
