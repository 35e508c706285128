"""`tfmq delay` and `tfmq send --delay | --at` with a real server: what a person sees, also after it was killed."""

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tfmq as client
from tests.e2e.commands import PATIENCE_SECONDS, Ended
from tests.e2e.reading import payloads
from tfmq.cli import main
from tfmq.protocol.delayed_handle import Handle, format_handle, parse_handle
from tools.rigs.live_server import LiveServer


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "data")
    server.start()
    yield server
    if server in LiveServer.alive:
        server.stop()
    assert "Traceback" not in server.log.read_text()


class Rig:
    """A person with the command line, on that broker."""

    def __init__(self, broker: LiveServer, capture: pytest.CaptureFixture[bytes]) -> None:
        self.broker, self._capture = broker, capture

    def __call__(self, *arguments: str) -> Ended:
        """`tfmq ARGUMENTS`."""
        self._capture.readouterr()
        code = main.run([*arguments, "--servers", self.broker.address])
        out, err = self._capture.readouterr()
        return Ended(code, out, err.decode())

    def delay(self, *arguments: str) -> Ended:
        return self("delay", *arguments)

    def json(self, *arguments: str) -> Any:
        ran = self(*arguments, "--json")
        assert ran.code == 0, ran
        return json.loads(ran.out)

    def send(self, *arguments: str) -> str:
        """Sends one message for later; its handle."""
        return str(self.json("send", *arguments)["delayed"])

    def waiting(self, *arguments: str) -> list[str]:
        """The handles of those that wait."""
        return [each["handle"] for each in self.json("delay", "list", *arguments)]

    def arrive(self, topic: str, count: int) -> list[bytes]:
        """Waits until so many were delivered."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := payloads(self.broker.address, topic)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} were delivered"
            time.sleep(0.02)
        return found


@pytest.fixture(scope="module")
def idle_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """For those who get nothing done: it is none the wiser, and serves all of them."""
    server = LiveServer(tmp_path_factory.mktemp("idle") / "data")
    server.start()
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def rig(broker: LiveServer, capsysbinary: pytest.CaptureFixture[bytes]) -> Rig:
    return Rig(broker, capsysbinary)


def test_a_message_for_later_is_found_shown_and_taken_back(rig: Rig) -> None:
    reported = rig("send", "reminders", "pay, please", "-k", "42", "-t", "mail", "--delay", "1h")
    assert reported.code == 0 and re.search(r"sent to reminders, partition 0, due \d{4}-.* \(synced\)", reported.err)
    (row,) = rig.json("delay", "list")
    assert row["handle"] in reported.err
    assert (row["topic"], row["partition"], row["key"], row["tag"]) == ("reminders", 0, "42", "mail")
    assert row["due_ms"] == parse_handle(row["handle"]).due
    table = rig.delay("list", "--topic", "reminders", "--key", "42").out.decode()
    assert row["handle"] in table and re.search(r"in (59 min|1 h)", table)
    assert rig.waiting("--key", "43") == []
    wrong = rig.delay("list", "--topic", "reminder")
    assert wrong.code == 1 and "Did you mean 'reminders'?" in wrong.sentence
    shown = rig.delay("show", row["handle"])
    assert shown.code == 0 and "pending" in shown.out.decode() and "42" in shown.out.decode()

    assert rig.delay("cancel", row["handle"]).err == f"{row['handle']}: cancelled\n"
    assert rig.waiting() == [] and rig.delay("list").err == "no delayed messages\n"
    assert rig.json("delay", "show", row["handle"])["state"] == "cancelled"
    assert rig.delay("cancel", row["handle"]).code == 0, "the first answer again"
    assert payloads(rig.broker.address, "reminders") == []


def test_what_is_due_is_delivered_and_cannot_be_taken_back(rig: Rig) -> None:
    began = time.time()
    handle = rig.send("reminders", "now", "--delay", "400ms")
    assert rig.arrive("reminders", 1) == [b"now"]
    with client.Consumer(rig.broker.address, topics="reminders") as consumer:
        (message,) = consumer.poll(timeout=5)
    assert message.appended_at.timestamp() >= began + 0.4, "never early"
    ran = rig.delay("cancel", handle)
    assert (ran.code, ran.err) == (1, f"{handle}: delivered: it was delivered already\n")
    assert rig.json("delay", "show", handle)["state"] == "delivered"
    assert rig.delay("reschedule", handle, "--delay", "1h").code == 1
    assert rig.waiting() == []


def test_another_time_moves_it_and_the_old_handle_leads_to_it(rig: Rig) -> None:
    first = rig.send("reminders", "moved", "--delay", "30d")
    ran = rig.delay("reschedule", first, "--at", "2999-01-01T09:00+01:00")
    (second,) = ran.out.decode().split()
    assert ran.code == 0 and second != first and rig.waiting() == [second]
    assert parse_handle(second).due == datetime(2999, 1, 1, 8, tzinfo=UTC).timestamp() * 1_000
    shown = rig.json("delay", "show", first)
    assert (shown["state"], shown["handle_now"]) == ("pending", second)
    (row,) = json.loads(rig.delay("reschedule", second, "--delay", "50ms", "--json").out)
    assert (row["state"], row["before"]) == ("rescheduled", second)
    assert rig.arrive("reminders", 1) == [b"moved"]
    assert rig.delay("cancel", first).code == 1, "it was delivered under its third handle"
    assert payloads(rig.broker.address, "reminders") == [b"moved"]


def test_times_have_a_zone_or_are_local_and_what_is_over_comes_at_once(rig: Rig) -> None:
    zoned = rig.send("t", "x", "--at", "2998-06-01T12:00+02:00")
    assert parse_handle(zoned).due == datetime(2998, 6, 1, 10, tzinfo=UTC).timestamp() * 1_000
    local = rig.send("t", "x", "--at", "2998-06-01T12:00")
    assert parse_handle(local).due == datetime(2998, 6, 1, 12).timestamp() * 1_000
    over = datetime.now(UTC) - timedelta(hours=1)
    rig.send("past", "late", "--at", over.isoformat())
    assert rig.arrive("past", 1) == [b"late"]


@pytest.mark.long
def test_lines_wait_too_and_are_counted_by_their_time(rig: Rig, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\n" for number in range(1_500)))
    assert "tfmq delay list --topic many" in rig("send", "many", "--lines", str(lines), "--delay", "2h").err
    with client.Producer(rig.broker.address) as producer:
        first = time.time() + 3_600
        for number in range(600):
            producer.send("spread", b"x", deliver_at=first + 6 * number)
    assert len(rig.waiting()) == 2_100 == len(set(rig.waiting()))
    table = rig.delay("list")
    assert "there are more" in table.err
    dues = [parse_handle(handle).due for handle in rig.waiting()]
    assert dues == sorted(dues)
    found = rig.json("delay", "histogram", "--topic", "spread", "--every", "10m")
    counts = [each["count"] for each in found["ranges"]]
    assert sum(counts) + found["before"] + found["behind"] == 600
    assert max(counts) == 100 and 6 <= len(counts) <= 8
    drawn = rig.delay("histogram").out.decode()
    assert sum("█" in line for line in drawn.splitlines()) >= 5
    window = [datetime.fromtimestamp(dues[0] / 1_000 + each, UTC).isoformat() for each in (57, 117)]
    assert len(rig.waiting("--from", window[0], "--to", window[1])) == 10


@pytest.mark.long
def test_what_waits_and_what_was_said_survives_kill_9(rig: Rig) -> None:
    handles = [rig.send("t", f"m{number}", "--delay", f"{number + 1}h", "-k", f"k{number}") for number in range(4)]
    soon = rig.send("soon", "x", "--delay", "1s")
    assert rig.delay("cancel", handles[0]).code == 0
    (moved,) = rig.delay("reschedule", handles[1], "--delay", "9h").out.decode().split()
    before = {each["handle"]: each for each in rig.json("delay", "list", "--topic", "t")}
    assert list(before) == [handles[2], handles[3], moved]
    rig.broker.kill()
    rig.broker.start()
    after = {each["handle"]: each for each in rig.json("delay", "list", "--topic", "t")}
    assert after == before
    assert [each["key"] for each in after.values()] == ["k2", "k3", "k1"]
    assert rig.json("delay", "show", handles[0])["state"] == "cancelled"
    assert rig.json("delay", "show", handles[1])["handle_now"] == moved
    assert rig.arrive("soon", 1) == [b"x"]
    assert rig.delay("cancel", soon).code == 1
    rig.broker.kill()
    rig.broker.start()
    assert rig.json("delay", "show", soon)["state"] == "delivered"
    assert payloads(rig.broker.address, "soon") == [b"x"]


def test_a_wrong_handle_is_one_sentence_and_does_nothing(rig: Rig) -> None:
    handle = rig.send("t", "x", "--delay", "1h")
    typo = handle[:-2] + handle[-1] + handle[-2] if handle[-1] != handle[-2] else handle[:-1] + "7"
    for arguments in (["show", typo], ["cancel", handle, typo], ["reschedule", typo, "--delay", "1s"]):
        ran = rig.delay(*arguments)
        assert ran.code == 2 and "This is no handle of a delayed message" in ran.sentence
    assert rig.waiting() == [handle]
    stranger = format_handle(Handle(*parse_handle(handle)._replace(store_id=77)))
    assert rig.delay("show", stranger).code == 1
    assert json.loads(rig.delay("cancel", stranger, "--json").out) == [{"handle": stranger, "state": "unknown"}]
    assert rig.delay("reschedule", stranger, "--delay", "1s").code == 1


def test_a_deleted_topic_takes_its_messages_along(rig: Rig) -> None:
    handle = rig.send("going", "x", "--delay", "1s")
    kept = rig.send("staying", "x", "--delay", "1h")
    assert rig("topic", "delete", "going", "--yes").code == 0
    assert rig("topic", "create", "going").code == 0
    assert rig.waiting() == [kept]
    assert json.loads(rig.delay("show", handle, "--json").out)["state"] == "unknown"
    assert rig.delay("cancel", handle).code == 1
    marker = rig.send("staying", "y", "--delay", "1s")
    assert rig.arrive("staying", 1) == [b"y"], marker
    assert payloads(rig.broker.address, "going") == [], "a new topic of the name gets none of it"


def test_the_status_shows_how_many_wait_and_when_the_next_one_is_due(rig: Rig) -> None:
    rig.send("t", "x", "--delay", "2h")
    rig.send("t", "x", "--delay", "3h")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := rig.json("status")["delay"])["pending"] != 2:
        assert time.monotonic() < deadline, "they are not counted"
        time.sleep(0.05)
    table = re.sub(r"\s+", " ", rig("status").out.decode())
    assert re.search(r"delayed messages 2, .*the next in (2 h|1 h \d+ min) at the earliest", table)
    assert (found["pending"], found["held"], found["arrivals"]) == (2, 0, "open")
    assert abs(found["ahead_ms"]) < 1_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["send", "t", "x", "--delay", "soon"],
        ["send", "t", "x", "--delay", "-3s"],
        ["send", "t", "x", "--delay", "1h", "--at", "2999-01-01"],
        ["send", "t", "x", "--at", "25:00"],
        ["send", "t", "x", "--delay", "9999999999999999d"],
        ["delay", "list", "--topic", "a/b"],
        ["delay", "list", "--from", "later"],
        ["delay", "histogram", "--every", "0"],
    ],
)
def test_bad_input_is_one_sentence(
    idle_broker: LiveServer, capsysbinary: pytest.CaptureFixture[bytes], arguments: list[str]
) -> None:
    rig = Rig(idle_broker, capsysbinary)
    ran = rig(*arguments)
    assert ran.code in (1, 2) and ran.out == b""
    assert len([line for line in ran.err.splitlines() if line.startswith(("tfmq: ", "Error: "))]) == 1, ran.err
    assert rig.waiting() == []
