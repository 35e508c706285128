"""The counted work of each operation is not above what is recorded in tools/bench/counted_work.json.

The counts are of Python 3.11. What waits for the disk or for a message is counted less exactly than a written send: an
fsync or a response that comes earlier or later joins other work of the same turn, or not, and a large request is sent
in more or fewer pieces.
"""

import json
import shutil
import sys

import pytest

from tools.bench import counted_work

COUNTS = {"calls": 25, "system calls": 25, "allocations": 100}
"""Counting allocations costs some by itself, at each start and stop. Of fewer operations it would be a tenth more."""
ATTEMPTS = 3
"""Other load of the machine only adds work: timers and heartbeats of longer waits. A real excess is found each time."""
SLACK = {"calls": 1.03, "system calls": 1.2, "allocations": 1.1, "bytes": 1.1}
SLACK_OF_WAITING = {"calls": 1.25, "system calls": 2.0, "allocations": 1.25, "bytes": 1.25}
SLACK_OF_MEBIBYTE = 4.0
"""Of the system calls that take in 1 MiB: on a busy machine it comes in smaller pieces, with a wait for each."""
SLACK_OF_IDLE = 2.0
"""A second has four turns without work, or some more."""
IDLE_SYSTEM_CALLS = 30
"""Of a second: strace itself stops the process a few times, and on a busy machine a wait is interrupted more often."""
ABSOLUTE = {"calls": 2, "system calls": 3, "allocations": 20, "bytes": 20_000}


@pytest.mark.parametrize("kind", counted_work.COUNTERS)
def test_no_operation_costs_more_than_recorded(kind: str) -> None:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("cannot be had here: the recorded counts are of Python 3.11")
    if sys.platform != "linux":
        pytest.skip("cannot be had here: strace and memray need Linux")
    if kind == "system calls" and not shutil.which("strace"):
        pytest.skip("strace is not installed")
    recorded = counted_work.read_recorded()
    more: dict[tuple[str, str, str], float] = {}
    for attempt in range(ATTEMPTS):
        found = counted_work.measure(kind, COUNTS[kind])
        assert found.keys() == recorded.keys()
        above = {
            (name, work, side): count
            for name, kinds in found.items()
            for work, sides in kinds.items()
            for side, count in sides.items()
            if count > allowed(name, work, recorded[name][work][side])
        }
        more = above if attempt == 0 else {key: count for key, count in above.items() if key in more}
        if not more:
            break
    texts = [
        f"{name}: {count:.1f} {work} in the {side}, {recorded[name][work][side]:.1f} are recorded"
        for (name, work, side), count in more.items()
    ]
    assert not texts, f"{texts}. Where it is meant: python -m tools.bench.counted_work --record"


def allowed(name: str, work: str, recorded: float) -> float:
    slack = SLACK[work] if name.endswith("written") else SLACK_OF_WAITING[work]
    if name == "fetch of 1 MiB" and work == "system calls":
        slack = SLACK_OF_MEBIBYTE
    if name == counted_work.IDLE:
        slack = SLACK_OF_IDLE
        if work == "system calls":
            return max(recorded * slack, IDLE_SYSTEM_CALLS)
    return recorded * slack + ABSOLUTE[work]


def test_recorded_counts_have_every_kind() -> None:
    assert json.loads(counted_work.RECORDED.read_text())["python"].startswith("3.11.")
    kinds = {"calls", "system calls", "allocations", "bytes"}
    assert all(set(work) == kinds for work in counted_work.read_recorded().values())
