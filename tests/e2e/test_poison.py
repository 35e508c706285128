"""Poison with real kills: messages that fail in every way, consumer and broker killed, redrives killed in the middle.

Held here: each message is called at most `retries` + 1 times and once more a kill; none is lost, none is endless; each
dead letter carries its history; a redrive that is killed again and again has sent each one once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.scale import SCALE, scaled, seeded
from tfmq.dead_letters.desk import Desk
from tfmq.dead_letters.letter import DEAD, HANDLED, REDRIVEN
from tfmq.dead_letters.selection import Selection
from tools.rigs.live_server import LiveServer
from tools.rigs.poison import CALLS_MAX, EXIT_CODE, kind_of

MESSAGES = scaled(10_000) if SCALE >= 1 else max(41, scaled(2_000))
"""A commit on the disk or several for each: where the disk is busy that takes its time."""
KILLS = max(2, scaled(100))
LONGEST_SECONDS = 600.0
TOPIC = "poison"
DEAD_KINDS = ("fails", "rejected", "put off", "deadly")


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = LiveServer(folder / "data")
        self.server.start()
        self.store = str(folder / "dead.db")
        self.kills = 0
        self.chance = seeded("poison")

    def python(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)

    def consume(self) -> None:
        """A consumer that is killed again and again, until one comes to its end."""
        until = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < until:
            worker = self.python(
                *("-m", "tools.rigs.poison", self.server.address, TOPIC, self.store),
                str(self.folder),
            )
            assert worker.stdout is not None
            assert worker.stdout.readline() == "started\n"
            if self.kills >= KILLS:
                if worker.wait(LONGEST_SECONDS) == 0:
                    return
                assert worker.returncode == EXIT_CODE
                self.kills += 1
                continue
            time.sleep(self.chance.random() * 0.4)
            crash = self.chance.random() < 0.3
            if crash:
                self.server.kill()
                self.server.start()
            ended = worker.poll() is not None
            worker.kill()
            worker.wait()
            self.kills += 1
            if ended:  # a consumer that never reached a broker says so and ends
                assert worker.returncode in (0, EXIT_CODE) or (crash and worker.returncode == 1)
        raise AssertionError("it does not come to an end")

    def redrive(self) -> None:
        """A redrive that is killed in the middle, until one comes to its end."""
        for kill in range(KILLS + 1):
            command = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
            process = self.python(
                *("-c", command, "dlq", "redrive", "--store", self.store, "--servers", self.server.address),
                *("--rate", "100", "-q") if kill < KILLS else ("-q",),
            )
            if kill == KILLS:
                assert process.wait(LONGEST_SECONDS) == 0
                return
            before = self.sent()
            until = time.monotonic() + 30
            while process.poll() is None and self.sent() == before and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(self.chance.random() * 0.1)
            process.kill()
            process.wait()

    def sent(self) -> int:
        with Desk(self.store) as desk:
            return sum(1 for _ in desk.letters(Selection(states=(REDRIVEN,))))

    def letters(self) -> dict[int, Any]:
        with Desk(self.store) as desk:
            return {int(each.message().text): each for each in desk.letters(whole=True)}

    def calls(self) -> Counter[int]:
        lines = (self.folder / "calls").read_text().splitlines()
        return Counter(int(line.split()[0]) for line in lines)


@pytest.mark.timeout(LONGEST_SECONDS)
def test_poison_is_called_so_often_and_no_more_none_is_lost_and_a_killed_redrive_doubles_nothing(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    try:
        with tfmq.Producer(rig.server.address) as producer:
            producer.send_many(TOPIC, [str(number) for number in range(MESSAGES)]).result()
        rig.consume()
        check_calls(rig)
        check_letters(rig.letters())
        rig.redrive()
        check_sent(rig)
    finally:
        rig.server.kill()


def check_calls(rig: Rig) -> None:
    calls = rig.calls()
    assert set(calls) == set(range(MESSAGES)), "every message was handled"
    most = {"fails": CALLS_MAX, "rejected": 1, "handled": 1, "put off": 1 + CALLS_MAX, "deadly": CALLS_MAX}
    over = {number: count for number, count in calls.items() if count > most[kind_of(number)] + rig.kills}
    assert over == {}, f"{rig.kills} kills"
    assert max(calls.values()) > 1


def check_letters(letters: dict[int, Any]) -> None:
    kinds = {number: kind_of(number) for number in range(MESSAGES)}
    found = {number: each.state for number, each in letters.items() if each.state != HANDLED}
    assert found == {number: DEAD for number, kind in kinds.items() if kind in DEAD_KINDS}
    assert all(kinds[number] == "handled" for number in set(letters) - set(found))
    for number, letter in letters.items():
        if number not in found:
            continue
        killed = "process ended" in letter.error  # the last call that was left was one of a killed process
        assert killed or letter.failures[-1].traceback, number
        if kinds[number] == "deadly":
            assert killed and letter.calls >= CALLS_MAX
        if kinds[number] == "fails":
            assert letter.calls >= CALLS_MAX
            assert killed or letter.error.endswith(f"Poisoned: number {number}")


def check_sent(rig: Rig) -> None:
    expected = [number for number in range(MESSAGES) if kind_of(number) in DEAD_KINDS]
    found: list[int] = []
    with tfmq.Consumer(rig.server.address, topics=TOPIC) as consumer:
        while messages := consumer.poll(2, 10_000):
            found += [int(each.text) for each in messages if each.redrives]
    assert sorted(found) == expected
    assert {each.state for each in rig.letters().values()} - {HANDLED} == {REDRIVEN}
