"""`tfmq delay` against a broker of the test's own; tests/e2e/test_delay_cli.py has the same on a real one."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from tests.cli.conftest import Cli, Ran
from tests.cli.delayed_broker import LOG_ID, NOW_MS, STORE_ID, DelayedBroker, Waiting
from tests.client.fake_broker import CUT, LOSE, FakeBroker, listening
from tfmq.cli.delay import CONCURRENT_CHANGES, UNKNOWN_HANDLE, change_all, split_counts
from tfmq.cli.delay_view import TIME_MAX
from tfmq.cli.output import Output
from tfmq.errors import ConnectionFailed, NotSupported, StorageStopped, UnknownTopic
from tfmq.protocol import commands
from tfmq.protocol.delayed_handle import Handle, format_handle

SECOND, HOUR = 1_000, 3_600_000
STRANGER = format_handle(Handle(STORE_ID + 1, LOG_ID, NOW_MS, 1))


class Rig:
    """A broker with delayed messages, and the command line connected to it."""

    def __init__(self, broker: DelayedBroker, offline: Cli) -> None:
        self.broker = broker
        self._offline = offline

    def __call__(self, *arguments: str) -> Ran:
        return self._offline("delay", *arguments)

    def put(self, *after_ms: int, **fields: object) -> list[str]:
        """Messages that are due so long after now; their handles."""
        new = [Waiting(NOW_MS + each, **fields) for each in after_ms]  # type: ignore[arg-type]
        self.broker.rows += new
        return [each.handle for each in new]

    @property
    def waiting(self) -> int:
        return sum(each.state == "pending" for each in self.broker.rows)

    @property
    def asked(self) -> list[object]:
        return [each for each in self.broker.requests if not isinstance(each, commands.Hello)]


@pytest.fixture
def rig(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    broker = DelayedBroker()
    with listening(broker) as servers:
        monkeypatch.setenv("TFMQ_SERVERS", servers)
        yield Rig(broker, offline)


def iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).isoformat()


# Looking


def test_the_list_goes_by_due_time_with_topic_key_and_distance(rig: Rig) -> None:
    late, early = rig.put(2 * HOUR, 90 * SECOND, topic="reminders", key="42", tag="mail")
    ran = rig("list")
    table = ran.out.decode()
    assert ran.code == 0
    assert table.index(early) < table.index(late)
    for words in ("in 1 min 30 s", "in 2 h", "reminders", "42", "mail", "2.0 KiB"):
        assert words in table
    rows = rig("list", "--json").json
    assert [each["handle"] for each in rows] == [early, late]
    assert rows[0]["due_ms"] == NOW_MS + 90 * SECOND and rows[0]["size_bytes"] == 2_048
    assert datetime.fromisoformat(rows[0]["due"]).timestamp() * 1_000 == NOW_MS + 90 * SECOND


def test_an_empty_list_is_said_in_words_or_an_empty_array(rig: Rig) -> None:
    ran = rig("list")
    assert (ran.code, ran.out, ran.err) == (0, b"", "no delayed messages\n")
    assert rig("list", "--topic", "orders").err == "no delayed messages for orders\n"
    assert rig("list", "--json").out == b"[]\n"
    assert rig("list", "--quiet") == (0, b"", "")


def test_topic_partition_key_and_time_choose(rig: Rig) -> None:
    (plain,) = rig.put(SECOND)
    (other,) = rig.put(2 * SECOND, topic="mails", partition=3, key="k")
    (binary,) = rig.put(3 * SECOND, topic="mails", key=b"k")
    assert [each["handle"] for each in rig("list", "--topic", "mails", "--json").json] == [other, binary]
    found = rig("list", "--topic", "mails", "--partition", "3", "--json").json
    assert [each["handle"] for each in found] == [other]
    assert len(rig("list", "--key", "k", "--json").json) == 2
    window = ["--from", iso(NOW_MS + 2 * SECOND), "--to", iso(NOW_MS + 3 * SECOND)]
    assert [each["handle"] for each in rig("list", *window, "--json").json] == [other]
    assert plain not in rig("list", *window).out.decode()


def test_a_choice_that_fits_nothing_does_not_say_that_nothing_waits(rig: Rig) -> None:
    rig.put(SECOND)
    for choice in (["--key", "zzz"], ["--from", "2090-01-01"], ["--topic", "orders", "--to", "2001-01-01"]):
        assert "match the options" in rig("list", *choice).err


@pytest.mark.long
def test_a_table_ends_after_a_page_and_says_how_to_go_on(rig: Rig) -> None:
    handles = rig.put(*range(SECOND, 2_501 * SECOND, SECOND))
    first = rig("list")
    assert handles[99] in first.out.decode() and handles[100] not in first.out.decode()
    assert f"--after {handles[99]}" in first.err
    assert handles[100] in rig("list", "--after", handles[99], "-n", "1").out.decode()
    assert [each["handle"] for each in rig("list", "--json").json] == handles, "a program gets all"
    assert len(rig("list", "--json", "-n", "3").json) == 3
    assert "there are more" not in rig("list", "-n", "2500").err


def test_rare_ones_are_found_after_pages_that_have_none(rig: Rig) -> None:
    rig.put(*range(SECOND, 2_000 * SECOND, SECOND))
    (rare,) = rig.put(HOUR, key="needle")
    assert [each["handle"] for each in rig("list", "--key", "needle", "--json").json] == [rare]


def test_one_is_shown_with_its_times(rig: Rig) -> None:
    (handle,) = rig.put(2 * HOUR, topic="reminders", key="42", note_of_ours=5)
    shown = rig("show", handle).out.decode()
    for words in ("pending", "in 2 h", "reminders", "42", "2.0 KiB", "born", "note of ours"):
        assert words in shown
    assert rig("show", handle, "--json").json["state"] == "pending"


def test_what_became_of_it_is_shown(rig: Rig) -> None:
    (handle,) = rig.put(SECOND)
    for state in ("delivered", "cancelled"):
        rig.broker.rows[0].state = state
        ran = rig("show", handle)
        assert ran.code == 0 and state in ran.out.decode() and "in 1 s" not in ran.out.decode()
    stranger = rig("show", STRANGER)
    assert stranger.code == 1 and "knows no message of this handle" in stranger.err
    assert rig("show", STRANGER, "--json").json["state"] == "unknown"


# Taking back, and another time


def test_what_is_cancelled_in_time_is_reported_and_what_is_not_is_code_1(rig: Rig) -> None:
    first, second, late = rig.put(SECOND, 2 * SECOND, 3 * SECOND)
    ran = rig("cancel", first, second)
    assert (ran.code, ran.out) == (0, b"")
    assert ran.err == f"{first}: cancelled\n{second}: cancelled\n2 cancelled\n"
    assert rig.waiting == 1
    assert rig("cancel", first).code == 0, "the first answer again"
    rig.broker.rows[-1].state = "delivered"
    ran = rig("cancel", late)
    assert (ran.code, ran.err) == (1, f"{late}: delivered: it was delivered already\n")
    ran = rig("cancel", STRANGER, "--json")
    assert (ran.code, ran.json) == (1, [{"handle": STRANGER, "state": "unknown"}])


def test_a_typo_cancels_nothing_not_even_the_others(rig: Rig) -> None:
    (handle,) = rig.put(SECOND)
    wrong = handle[:-1] + ("a" if handle[-1] != "a" else "b")
    for command in (["cancel"], ["reschedule", "--delay", "1h"]):
        ran = rig(*command, handle, wrong)
        assert (ran.code, ran.out) == (2, b"")
        assert "This is no handle" in ran.err and len(ran.err.splitlines()) == 1
        assert ran.err.endswith("The others were not changed.\n")
    for command in (["show"], ["list", "--after"]):
        assert rig(*command, wrong).code == 2
    assert rig.waiting == 1 and rig.asked == []


def test_an_answer_that_was_lost_is_asked_for_again(rig: Rig) -> None:
    (handle,) = rig.put(SECOND)
    rig.broker.plan(commands.CancelDelayed, LOSE)
    assert rig("cancel", handle).err.endswith(f"{handle}: cancelled\n")
    (handle,) = rig.put(SECOND)
    rig.broker.plan(commands.RescheduleDelayed, CUT)
    assert rig("reschedule", handle, "--delay", "1h").code == 0


def test_one_that_cannot_be_done_does_not_keep_the_others(rig: Rig) -> None:
    first, second = rig.put(SECOND, 2 * SECOND)
    rig.broker.plan(commands.CancelDelayed, StorageStopped("The log of delayed messages has stopped."))
    ran = rig("cancel", first, second, "--json")
    assert ran.code == 1
    assert ran.json == [{"handle": second, "state": "cancelled"}]
    assert ran.err == f"tfmq: {first}: The log of delayed messages has stopped.\n"


def test_many_are_cancelled_together_and_answered_in_order(rig: Rig) -> None:
    handles = rig.put(*range(SECOND, 501 * SECOND, SECOND))
    ran = rig("cancel", *handles, "--json")
    assert ran.code == 0 and [each["handle"] for each in ran.json] == handles
    assert rig.waiting == 0
    assert rig("cancel", *handles[:30], STRANGER).err.splitlines() == [
        f"{STRANGER}: unknown: {UNKNOWN_HANDLE}",
        "30 cancelled, 1 unknown",
    ]


def test_what_was_done_before_the_broker_went_away_is_reported(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    async def change(admin: object, handle: str) -> dict[str, object]:
        if handle != "first":
            raise ConnectionFailed("gone")
        return {"handle": handle, "state": "cancelled"}

    given = ["first", *["later"] * CONCURRENT_CHANGES, "never asked"]
    with pytest.raises(ConnectionFailed):
        asyncio.run(change_all(Output(None, json=True, quiet=False), given, change, "cancelled"))
    assert json.loads(capsysbinary.readouterr().out) == [{"handle": "first", "state": "cancelled"}]


def test_another_time_gives_another_handle_on_standard_output(rig: Rig) -> None:
    (handle,) = rig.put(SECOND, topic="reminders")
    ran = rig("reschedule", handle, "--delay", "1h")
    new = rig.broker.rows[-1]
    assert (ran.code, ran.lines) == (0, [new.handle])
    assert NOW_MS + HOUR // 2 < new.due_ms <= NOW_MS + HOUR, "less what it took to ask"
    assert new.topic == "reminders"
    assert f"{handle}: due " in ran.err
    (row,) = rig("reschedule", new.handle, "--at", "2027-01-01T09:00+01:00", "--json").json
    assert row["before"] == new.handle and row["state"] == "rescheduled"
    assert row["due_ms"] == datetime(2027, 1, 1, 8, tzinfo=UTC).timestamp() * 1_000
    assert row["handle"] == rig.broker.rows[-1].handle


def test_what_cannot_have_another_time_is_reported_and_code_1(rig: Rig) -> None:
    (handle,) = rig.put(SECOND)
    rig.broker.rows[0].state = "delivered"
    ran = rig("reschedule", handle, "--delay", "5m")
    assert (ran.code, ran.out) == (1, b"")
    assert "delivered already" in ran.err
    assert rig("reschedule", STRANGER, "--delay", "5m", "--json").json == [
        {"handle": None, "state": "unknown", "before": STRANGER, "due_ms": None, "due": None}
    ]


# Counting


def test_the_histogram_draws_how_many_are_due_when(rig: Rig) -> None:
    rig.put(*range(0, HOUR, 5 * SECOND))
    ran = rig("histogram")
    lines = ran.out.decode().splitlines()
    assert ran.code == 0
    assert sum("█" in line for line in lines) >= 12
    assert "720 messages in these ranges" in ran.err
    found = rig("histogram", "--json").json
    assert found["pending"] == 720 == sum(each["count"] for each in found["ranges"])
    assert found["before"] == found["behind"] == 0


def test_ranges_can_be_chosen(rig: Rig) -> None:
    rig.put(*range(0, HOUR, 5 * SECOND))
    rig.put(10 * SECOND, topic="mails")
    window = ["--from", iso(NOW_MS), "--to", iso(NOW_MS + HOUR // 2), "--json"]
    found = rig("histogram", *window, "--every", "10m").json
    assert [each["end_ms"] - each["first_ms"] for each in found["ranges"]][1:-1] == [600_000, 600_000]
    assert sum(each["count"] for each in found["ranges"]) == 361
    assert found["behind"] == 360 and found["before"] == 0
    mails = rig("histogram", "--topic", "mails", "--json").json
    assert sum(each["count"] for each in mails["ranges"]) == 1


def test_ranges_of_a_chosen_length_begin_at_round_times(rig: Rig) -> None:
    rig.put(39 * 24 * HOUR)
    (row,) = [each for each in rig("histogram", "--every", "7d", "--json").json["ranges"] if each["count"]]
    begin = datetime.fromtimestamp(row["first_ms"] / 1000)
    assert (begin.strftime("%a %H:%M:%S"), begin.microsecond) == ("Mon 00:00:00", 0)
    first = rig("histogram", "--every", "7d", "--json").json["ranges"][0]
    assert datetime.fromtimestamp(first["first_ms"] / 1000).strftime("%a %H:%M:%S") == "Mon 00:00:00"


def test_what_lies_far_out_is_reported_beside_the_bars(rig: Rig) -> None:
    rig.put(*range(0, HOUR, 5 * SECOND), 1_000 * 24 * HOUR)
    ran = rig("histogram")
    assert "1 message later" in ran.err
    assert rig("histogram", "--json").json["behind"] == 1


def test_nothing_to_count_is_said(rig: Rig) -> None:
    assert rig("histogram") == (0, b"", "no delayed messages\n")
    assert rig("histogram", "--json").json == {"pending": 0, "before": 0, "behind": 0, "ranges": []}
    rig.put(SECOND)
    assert rig("histogram", "--from", "2090-01-01").err == "no delayed messages in this time\n"


def test_more_ranges_than_can_be_counted_are_refused(rig: Rig) -> None:
    rig.put(0, 10_000 * HOUR)
    ran = rig("histogram", "--every", "1s")
    assert ran.code == 2 and "say longer ones" in ran.err


def test_counts_are_distinguished() -> None:
    assert split_counts([1, 2, 3, 4], [10, 20, 30]) == (1, [2, 3])
    assert split_counts([2, 3], [0, 20, TIME_MAX]) == (0, [2, 3])
    assert split_counts([7], []) == (7, ())


# Wrong words


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["cancel"],
        ["show", ""],
        ["show", "order-42"],
        ["cancel", "d" * 59],
        ["cancel", "\udcff"],
        ["reschedule", STRANGER],
        ["reschedule", STRANGER, "--delay", "1h", "--at", "2027-01-01"],
        ["reschedule", STRANGER, "--delay", "soon"],
        ["reschedule", STRANGER, "--delay", "-1h"],
        ["reschedule", STRANGER, STRANGER, "--delay", "999999999999w"],
        ["reschedule", STRANGER, "--at", "tomorrow"],
        ["list", "--from", "yesterday"],
        ["list", "--from", "2027-01-02", "--to", "2027-01-01"],
        ["list", "--partition", "0"],
        ["list", "--topic", "orders", "--partition", "-1"],
        ["list", "-n", "0"],
        ["list", "--after", "42"],
        ["list", "--after", ""],
        ["list", "--topic", ""],
        ["histogram", "--every", "0x"],
        ["histogram", "--every", "0s"],
        ["histogram", "--from", "2027-01-02", "--to", "2027-01-01"],
        ["snooze", STRANGER],
    ],
)
def test_wrong_usage_is_code_2_and_asks_nothing(rig: Rig, arguments: list[str]) -> None:
    ran = rig(*arguments)
    assert (ran.code, ran.out) == (2, b"")
    assert "Traceback" not in ran.err
    assert rig.asked == []


@pytest.mark.parametrize("command", ["list", "show", "cancel", "reschedule", "histogram"])
def test_every_command_has_help_with_an_example(offline: Cli, command: str) -> None:
    ran = offline("delay", command, "--help")
    assert ran.code == 0 and "Example" in ran.out.decode()
    assert "--json" in ran.out.decode() and "--quiet" in ran.out.decode()


def test_help_says_what_a_time_without_a_zone_means(offline: Cli) -> None:
    for arguments in (("send",), ("delay", "reschedule"), ("delay", "list"), ("delay", "histogram")):
        words = " ".join(offline(*arguments, "--help").out.decode().split())
        assert "ithout a zone" in words and "local" in words


def test_keys_of_strangers_cannot_steer_the_terminal(rig: Rig) -> None:
    (handle,) = rig.put(SECOND, key="a\x1b[2Jb\n", tag="x\x07")
    for ran in (rig("list"), rig("show", handle)):
        assert ran.code == 0
        assert "\x1b" not in ran.out.decode() + ran.err and "\x07" not in ran.out.decode()


def test_a_wrong_topic_gets_the_likely_one(rig: Rig) -> None:
    rig.broker.incarnations["reminders"] = 7
    for command in ("list", "histogram"):
        for request in (commands.ListDelayed, commands.DelayedHistogram):
            rig.broker.plan(request, UnknownTopic())
        rig.broker.plan(commands.DescribeTopic, UnknownTopic())
        ran = rig(command, "--topic", "reminder")
        assert (ran.code, ran.out) == (1, b"")
        assert ran.err == "tfmq: There is no topic 'reminder'. Did you mean 'reminders'?\n"
        rig.broker.plans.clear()


def test_no_broker_is_code_3(offline: Cli) -> None:
    assert offline("delay", "list").code == 3


def test_a_broker_of_an_earlier_release_is_reported_as_such(offline: Cli) -> None:
    broker = FakeBroker()
    broker.plan(commands.ListDelayed, NotSupported("This release of the broker has no delayed delivery yet."))
    with listening(broker) as servers:
        ran = offline("delay", "list", "--servers", servers)
    assert (ran.code, ran.err) == (1, "tfmq: This release of the broker has no delayed delivery yet.\n")


def test_json_stays_json_whatever_the_key(rig: Rig) -> None:
    rig.put(SECOND, key=b"\xff\x00", topic="orders")
    assert json.loads(rig("list", "--json").out)[0]["key"]
