"""The soak's comparison finds each kind of loss and repetition, and nothing in a run where all is well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tools.rigs.memory_in_use import ENVIRONMENT, FILE_VARIABLE, read_in_use
from tools.rigs.soak import Sample, growth_faults, pooled_slope, summarize
from tools.rigs.soak_audit import BILLING, POISON_EVERY, SHIPPING, SOURCE, TARGET, TICKS, WORK, Audit, Diary, is_poison

MINUTE = datetime(2026, 1, 1, 9, 0, tzinfo=UTC)


def send(audit: Audit, topic: str, *numbers: int, name: str = "w") -> None:
    for number in numbers:
        audit.receive(topic, 0, f"s|{name}|{number}|", 0)


def part(audit: Audit, number: int, *indexes: int, count: int = 3) -> None:
    for index in indexes:
        audit.receive("first", index % 2, f"t|w|{number}|{index}|{count}|", 0)


def tick(audit: Audit, minute: int) -> None:
    time = MINUTE + timedelta(minutes=minute)
    audit.receive(TICKS, 0, "tick", 0, {"schedule": "each", "scheduled_for": time.isoformat()})


def end(audit: Audit) -> list[str]:
    audit.check_complete()
    return audit.faults


def good_run() -> Audit:
    audit = Audit()
    for topic in (SOURCE, TARGET):
        send(audit, topic, 0, 1, 2)
    audit.learn(["stored", "w", SOURCE, 0, 3])
    part(audit, 1, 0, 2, 1)
    audit.learn(["ended", "w", 1, "committed"])
    audit.learn(["ended", "w", 2, "absent"])
    audit.learn(["ended", "w", 3, "unknown"])
    audit.learn(["delayed", "w", 0, 1000])
    audit.receive("later", 0, "d|w|0|", 1000)
    audit.learn(["delayed", "w", 1, 1000])
    audit.learn(["ask", "w", 1])
    audit.learn(["cancel", "w", 1, "cancelled"])
    for minute in range(3):
        tick(audit, minute)
    return audit


def test_a_good_run_has_no_fault_and_nothing_missing() -> None:
    audit = good_run()
    assert audit.missing() == ""
    audit.check_ticks(MINUTE + timedelta(minutes=3))
    assert end(audit) == []


BAD: dict[str, tuple[Any, str]] = {
    "an acknowledged message is missing": (lambda a: a.learn(["stored", "w", SOURCE, 0, 4]), "3 to 3 are acknowledged"),
    "a message is missing before another": (lambda a: send(a, SOURCE, 4), "3 to 3 are missing before 4"),
    "a message is stored twice": (lambda a: send(a, SOURCE, 1), "1 is stored twice"),
    "a copy is missing": (lambda a: send(a, SOURCE, 3), "target 0 has 3 messages of w, source has 4"),
    "a copy is made twice": (lambda a: send(a, TARGET, 2), "2 is stored twice"),
    "a transaction is torn": (lambda a: part(a, 3, 0, 1), "only the messages [0, 1] are stored"),
    "a committed one is torn": (
        lambda a: (part(a, 4, 0), a.learn(["ended", "w", 4, "committed"])),
        "is committed, and only its messages [0]",
    ),
    "a committed one is missing": (lambda a: a.learn(["ended", "w", 4, "committed"]), "only its messages []"),
    "one that was rolled back is there": (lambda a: part(a, 2, 0, 1, 2), "was rolled back, and its message 0"),
    "one is rolled back when it is there": (
        lambda a: a.learn(["ended", "w", 1, "absent"]),
        "was rolled back, and messages",
    ),
    "a part is stored twice": (lambda a: part(a, 1, 2), "message 2 of transaction w 1 is stored twice"),
    "a timer is missing": (lambda a: a.learn(["delayed", "w", 2, 1000]), "2 is acknowledged, and not stored"),
    "a timer is stored twice": (lambda a: a.receive("later", 0, "d|w|0|", 1000), "0 is stored twice"),
    "a timer is early": (
        lambda a: (a.learn(["delayed", "w", 2, 2000]), a.receive("later", 0, "d|w|2|", 1900)),
        "came 100 ms early",
    ),
    "a cancelled timer is there": (lambda a: a.receive("later", 0, "d|w|1|", 1000), "1 is cancelled, and stored"),
    "something else is there": (lambda a: a.receive(SOURCE, 0, "x|", 0), "nobody sent"),
    "a time is sent twice": (lambda a: tick(a, 2), "after"),
}


@pytest.mark.parametrize("case", BAD)
def test_each_fault_is_found(case: str) -> None:
    audit = good_run()
    change, sentence = BAD[case]
    change(audit)
    assert [fault for fault in end(audit) if sentence in fault]


def test_what_is_only_late_is_missing_and_no_fault_before_the_end() -> None:
    audit = good_run()
    audit.learn(["stored", "w", SOURCE, 0, 4])
    audit.learn(["ended", "w", 4, "committed"])
    part(audit, 4, 0)
    audit.learn(["delayed", "w", 2, 1000])
    audit.check_times()
    assert audit.faults == []
    assert audit.missing() == "messages 1, transactions 1, parts of transactions 1, delayed messages 1"


def test_a_timer_whose_new_time_was_not_answered_may_be_there_or_not_but_once() -> None:
    audit = good_run()
    audit.learn(["delayed", "w", 2, 2000])
    audit.learn(["ask", "w", 2])
    assert end(audit) == []
    audit.receive("later", 0, "d|w|2|", 1500)
    assert end(audit) == []


def test_times_of_a_schedule_have_no_gap_up_to_the_end() -> None:
    audit = good_run()
    audit.check_ticks(MINUTE + timedelta(minutes=4))
    assert "sent last for" in audit.faults.pop()
    tick(audit, 4)
    audit.check_ticks(MINUTE + timedelta(minutes=5))
    assert "left out times" in audit.faults.pop()


def test_each_message_is_handled_or_one_dead_letter_of_each_group() -> None:
    audit = Audit()
    numbers = list(range(POISON_EVERY))
    send(audit, WORK, *numbers)
    for group in (BILLING, SHIPPING):
        for number in numbers:
            if not is_poison(number):
                audit.learn(["handled", "w", 0, number], group)
    (poison,) = audit.poison()
    audit.check_handled(BILLING, [poison])
    assert (audit.faults, audit.missing()) == ([], "")
    assert not audit.is_under_way(), "of the other kinds of clients nothing is there"
    audit.check_handled(BILLING, [poison, poison])
    assert "two dead letters" in audit.faults.pop()
    audit.check_handled(BILLING, [])
    assert "1 dead letters of billing are missing, 0 are too many" in audit.faults.pop()
    audit.check_handled(BILLING, [poison, ("w", 0, 1)])
    assert "0 dead letters of billing are missing, 1 are too many" in audit.faults.pop()
    send(audit, WORK, POISON_EVERY)
    audit.check_handled(SHIPPING, [poison])
    assert "1 messages of work were never handled by shipping" in audit.faults.pop()


def test_a_diary_is_read_on_and_its_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.diary"
    diary = Diary(path)
    assert list(diary.read()) == []
    path.write_text(json.dumps(["one"]) + '\n["tw')
    assert list(diary.read()) == [["one"]]
    with path.open("a") as file:
        file.write('o"]\n')
    assert list(diary.read()) == [["two"]]


def test_a_process_tells_what_it_has_allocated_and_not_what_its_allocator_keeps(tmp_path: Path) -> None:
    code = """
import os, time
from tools.rigs.memory_in_use import bytes_in_use, write_in_use

def sizes(make):
    before = bytes_in_use()
    kept = make()
    held = bytes_in_use()
    del kept
    return held - before, bytes_in_use() - before

write_in_use()
print(os.getpid(), *sizes(lambda: [str(each) for each in range(100_000)]), *sizes(lambda: bytearray(8 << 20)))
while not os.path.exists(os.environ["TFMQ_TEST_MEMORY_FILE"]):
    time.sleep(0.01)
"""
    path = tmp_path / "memory"
    environment = {**os.environ, **ENVIRONMENT, FILE_VARIABLE: str(path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert not run.stderr
    pid, small, small_left, large, large_left = map(int, run.stdout.split())
    assert small > 5e6 and large > 8e6
    assert abs(small_left) < 100_000 and abs(large_left) < 100_000
    assert 1e6 < (read_in_use(path, pid) or 0) < 50e6
    assert read_in_use(path, pid + 1) is None, "the process before it"
    assert read_in_use(tmp_path / "no file", pid) is None


def samples(life: int, begin: float, *memory: float) -> list[Sample]:
    return [Sample(begin + 100.0 * n, life, 100.0 + 100.0 * n, each, 10 + n, 0.0) for n, each in enumerate(memory)]


def test_growth_is_that_within_the_lives_after_the_warm_up() -> None:
    flat = samples(1, 0, 50, 90) + samples(2, 600, 60, 60, 60, 60, 60) + samples(3, 1200, 40, 40, 40)
    figures = summarize(flat, 600, 60)
    assert (figures["memory_mb_per_hour"], figures["slope_seconds"], figures["lives"]) == (0, 400, 3)
    assert growth_faults("broker", {**figures, "descriptors_per_hour": 0.0}) == []
    growing = summarize(samples(2, 600, 50, 51, 52, 53, 54), 600, 60)
    assert (growing["memory_mb_per_hour"], growing["descriptors_per_hour"]) == (pytest.approx(36), pytest.approx(36))
    assert growth_faults("broker", growing) == ["the memory of broker grew by 4.0 MB in 400 s"]
    more = {**figures, "descriptors_per_hour": 360.0}
    assert growth_faults("broker", more) == ["the descriptors of broker grew by 40 in 400 s"]
    assert growth_faults("broker", {**growing, "slope_seconds": 60.0}) == [], "too short to say"
    assert pooled_slope([]) == (0.0, 0.0)
    # Of a client, what is allocated is judged, and what is resident only if it grows by far more.
    told = {**growing, "in_use_mb_mean": 10.0, "in_use_mb_per_hour": 0.0, "descriptors_per_hour": 0.0}
    assert growth_faults("member", told) == []
    leak = {**told, "in_use_mb_per_hour": 10.0}
    assert growth_faults("member", leak) == ["the memory in use of member grew by 1.1 MB in 400 s"]
    unknown = {**told, "memory_mb_per_hour": 100.0}
    assert growth_faults("member", unknown) == ["the memory of member grew by 11.1 MB in 400 s"]
    young = samples(2, 600, 1, 50, 50, 50)
    assert summarize(young, 600, 150)["memory_mb_per_hour"] == 0, "the first one is of a process that was too young"
