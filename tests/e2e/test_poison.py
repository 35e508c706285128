"""Poison with real kills: messages that fail in every way, consumer and broker killed, redrives killed in the middle.

Held here: each message is called at most `retries` + 1 times, and once more for each kill of a process that had called
it, or of the broker below it; none is lost, none is endless; each dead letter carries its history; a redrive that is
killed again and again has sent each one once.

All of it: `TFMQ_TEST_SCALE=1 python -m pytest -s tests/e2e/test_poison.py`; its last line has the figures.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.scale import SCALE, scaled, seeded
from tfmq.dead_letters.admin import Desk
from tfmq.dead_letters.model import DEAD, HANDLED, REDRIVEN
from tools.rigs.live_server import LiveServer
from tools.rigs.poison import CALLS_MAX, EXIT_CODE, kind_of

MESSAGES = scaled(10_000) if SCALE >= 1 else max(44, scaled(1_000))
"""A commit on the disk or several for each: where the disk is busy that takes its time."""
KILLS = max(3, scaled(150))
REDRIVE_KILLS = max(1, scaled(30))
LONGEST_SECONDS = 7200.0 if SCALE >= 1 else 180.0
WORK_SECONDS = 10.0
"""A process that is to be killed at work gets so long to begin."""
TOPIC = "poison"
DEAD_KINDS = ("fails", "rejected", "put off", "deadly")
MOST = {"fails": CALLS_MAX, "rejected": 1, "handled": 1, "put off": CALLS_MAX, "deadly": CALLS_MAX}
"""Calls of a message when nothing is killed."""
UNCOUNTED_MAX = 9
"""So many processes may end by a message before it is among the first few after a start, which are counted before they
are called: what is saved early at least halves the distance each time, from 4,096 to 16."""


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = LiveServer(folder / "data")
        self.server.start()
        self.store = str(folder / "dead.db")
        self.calls = folder / "calls"
        self.kills: list[int] = []
        """By process: how often it, or the broker below it, was killed."""
        self.broker_kills = self.redrives_killed = 0
        self.chance = seeded("poison")

    def python(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)

    def consume(self) -> None:
        """A consumer that is killed again and again, until one comes to its end."""
        until = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < until:
            place = (TOPIC, self.store, str(self.folder), str(len(self.kills)))
            worker = self.python("-m", "tools.rigs.poison", self.server.address, *place)
            assert worker.stdout is not None
            assert worker.stdout.readline() == "started\n"
            kills = self.kill(worker) if sum(self.kills) < KILLS else 0
            self.kills.append(kills)
            code = worker.wait(LONGEST_SECONDS)
            worker.stdout.close()
            if code == 0:
                return
            # A consumer whose broker was killed before it was reached says so, and ends.
            assert code in (EXIT_CODE, -signal.SIGKILL) or kills, "by a deadly message, or a kill"
        raise AssertionError("it does not come to an end")

    def kill(self, worker: subprocess.Popen[str]) -> int:
        """Kill it at some moment of its work, and perhaps the broker before; how many kills that were."""
        before = self.written()
        until = time.monotonic() + WORK_SECONDS
        while worker.poll() is None and self.written() == before and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(self.chance.random() * 0.4)
        kills = 0
        if len(self.kills) % 3 == 1:
            self.server.kill()
            self.server.start()
            self.broker_kills += 1
            kills += 1
        if worker.poll() is None:
            worker.kill()
            kills += 1
        return kills

    def written(self) -> int:
        return self.calls.stat().st_size if self.calls.exists() else 0

    def redrive(self) -> None:
        """A redrive that is killed in the middle, until one comes to its end."""
        for kill in range(REDRIVE_KILLS + 1):
            command = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
            process = self.python(
                *("-c", command, "dlq", "redrive", "--store", self.store, "--servers", self.server.address),
                *("--rate", "100", "-q") if kill < REDRIVE_KILLS else ("-q",),
            )
            if kill == REDRIVE_KILLS:
                assert process.wait(LONGEST_SECONDS) == 0
                return
            before = self.sent()
            until = time.monotonic() + 30
            while process.poll() is None and self.sent() == before and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(self.chance.random() * 0.1)
            self.redrives_killed += process.poll() is None
            process.kill()
            process.wait()

    def sent(self) -> int:
        with Desk(self.store) as desk:
            return sum(count for (_, state), count in desk.counts().items() if state == REDRIVEN)

    def letters(self) -> dict[int, Any]:
        with Desk(self.store) as desk:
            return {int(each.message().text): each for each in desk.letters(whole=True)}


class Calls:
    """What the processes wrote before each call."""

    def __init__(self, rig: Rig) -> None:
        self.kills = rig.kills
        self.by_message: dict[int, Counter[int]] = {}
        self.put_off: Counter[int] = Counter()
        """How often each was put off, which costs no call."""
        self.last: dict[int, int] = {}
        """Of each process, the message that it was called with last."""
        for line in rig.calls.read_text().splitlines():
            message, process, put_off = map(int, line.split())
            self.last[process] = message
            self.put_off[message] += put_off
            if not put_off:
                self.by_message.setdefault(message, Counter())[process] += 1

    def most(self, message: int) -> int:
        """How often that message may have been called: a process that ended, by a kill or by another message that is
        deadly, may have ended between a call and what was to be written down of it."""
        most = MOST[kind_of(message)] + (UNCOUNTED_MAX if kind_of(message) == "deadly" else 0)
        for process in self.by_message[message]:
            most += self.kills[process] or int(self.ended_itself(process) and self.last[process] != message)
        return most

    def ended_itself(self, process: int) -> bool:
        return kind_of(self.last[process]) == "deadly"

    def killed_at_work(self) -> int:
        """How many of the killed processes had called something."""
        return sum(1 for process in self.last if self.kills[process])


@pytest.mark.long
@pytest.mark.timeout(3 * LONGEST_SECONDS)
def test_poison_is_called_so_often_and_no_more_none_is_lost_and_a_killed_redrive_doubles_nothing(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    times = [time.monotonic()]
    try:
        with tfmq.Producer(rig.server.address) as producer:
            producer.send_many(TOPIC, [str(number) for number in range(MESSAGES)]).result()
        rig.consume()
        times.append(time.monotonic())
        calls = Calls(rig)
        check_calls(calls)
        check_letters(rig.letters())
        rig.redrive()
        check_sent(rig)
        times.append(time.monotonic())
    finally:
        rig.server.kill()
    say(rig, calls, times)


def check_calls(calls: Calls) -> None:
    # One that was put off may have lost its calls to neighbours that ended the process just before each of them.
    assert set(calls.put_off) == set(range(MESSAGES)), "every message was handled"
    assert all(calls.put_off[number] for number in set(range(MESSAGES)) - set(calls.by_message))
    over = {
        number: (dict(by_process), calls.most(number))
        for number, by_process in calls.by_message.items()
        if by_process.total() > calls.most(number)
    }
    assert over == {}
    assert all(calls.put_off[number] for number in range(MESSAGES) if kind_of(number) == "put off")
    assert calls.killed_at_work() >= 1


def check_letters(letters: dict[int, Any]) -> None:
    kinds = {number: kind_of(number) for number in range(MESSAGES)}
    found = {number: each.state for number, each in letters.items() if each.state != HANDLED}
    assert found == {number: DEAD for number, kind in kinds.items() if kind in DEAD_KINDS}
    assert all(kinds[number] == "handled" for number in set(letters) - set(found))
    for number, letter in letters.items():
        if number not in found:
            continue
        killed = "process ended" in letter.error  # the last call that was left was one of a killed process
        assert killed or "in _handle" in letter.failures[-1].traceback, number
        if kinds[number] == "deadly":
            assert killed and letter.calls >= CALLS_MAX
        if kinds[number] == "fails":
            assert letter.calls >= CALLS_MAX
            assert killed or letter.error.endswith(f"Poisoned: number {number}")


def check_sent(rig: Rig) -> None:
    expected = [number for number in range(MESSAGES) if kind_of(number) in DEAD_KINDS]
    found: list[int] = []
    with tfmq.Consumer(rig.server.address, topics=TOPIC) as consumer:
        while len(found) <= len(expected):
            found += [int(each.text) for each in consumer.poll(30, 10_000) if each.redrives]
            if consumer.lag() == 0:
                break
    assert sorted(found) == expected
    assert {each.state for each in rig.letters().values()} - {HANDLED} == {REDRIVEN}


def say(rig: Rig, calls: Calls, times: list[float]) -> None:
    """The figures, for a full count."""
    totals = {number: each.total() for number, each in calls.by_message.items()}
    above = Counter(max(0, total - MOST[kind_of(number)]) for number, total in totals.items())
    own = sum(calls.ended_itself(process) and not rig.kills[process] for process in calls.last)
    print(
        f"\n{MESSAGES} messages, {sum(totals.values())} calls, {calls.put_off.total()} more that put off;"
        f" consumers killed {sum(rig.kills) - rig.broker_kills} times, the broker {rig.broker_kills} times,"
        f" {calls.killed_at_work()} processes of these at work; {own} more ended by a deadly message;"
        f" messages by calls above {MOST}: {dict(sorted(above.items()))};"
        f" {rig.redrives_killed} redrives killed; {times[1] - times[0]:.0f} s + {times[2] - times[1]:.0f} s"
    )
