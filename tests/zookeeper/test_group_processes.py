"""Invariant: over cuts, freezes and kills a partition has one owner at a time, and no offset goes back.

Seen by who consumed what from when to when, in processes that ZooKeeper coordinates, and by looking at the offsets all
the while. At full count each cut lasts thirty seconds.
"""

import signal
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.scale import SCALE, scaled
from tests.zookeeper.conftest import until
from tests.zookeeper.group_processes import Crew, Event, Observer, check_handover, crew_of, cut_off
from tools.rigs.zookeeper import ZooKeeperServer

CUT_SECONDS = 30.0 if SCALE >= 1 else 0.7
SESSION_SECONDS = 6.0 if SCALE >= 1 else 0.5
TRUST_SECONDS = SESSION_SECONDS / 2
"""So long a member hands out without a reply."""
ROUNDS = 2


def silent_for(crew: Crew, names: set[str], since: float, until_time: float) -> None:
    """Those that are cut off since then have trusted their sessions for a moment, and no longer."""
    late = [event for event in crew.outs(since + TRUST_SECONDS) if event.began < until_time and event.who in names]
    assert not late, f"handed out although the session may be over: {late[0]}"


def cut_everybody(crew: Crew) -> None:
    began = time.monotonic()
    with cut_off(crew.proxies, silent=False):
        cut_at = time.monotonic()
        time.sleep(CUT_SECONDS)
        healed_at = time.monotonic()
    assert healed_at - began >= CUT_SECONDS
    until(partial(crew.working, {"a", "b", "c"}, healed_at))
    silent_for(crew, {"a", "b", "c"}, cut_at, healed_at)


def cut_one(crew: Crew) -> None:
    """Its connection stays open, and nothing comes; the others take over what it had."""
    with cut_off({"b": crew.proxies["b"]}, silent=True):
        cut_at = time.monotonic()
        time.sleep(CUT_SECONDS)
        until(partial(crew.working, {"a", "c"}, cut_at + TRUST_SECONDS))
        healed_at = time.monotonic()
    until(partial(crew.working, {"a", "b", "c"}, healed_at))
    silent_for(crew, {"b"}, cut_at, healed_at)


def freeze_zookeeper(crew: Crew) -> None:
    with crew.zookeeper.frozen():
        frozen_at = time.monotonic()
        time.sleep(CUT_SECONDS)
        thawed_at = time.monotonic()
    until(partial(crew.working, {"a", "b", "c"}, thawed_at))
    silent_for(crew, {"a", "b", "c"}, frozen_at, thawed_at)


def freeze_one(crew: Crew) -> None:
    """It comes back as if nothing had been."""
    crew.signal("c", signal.SIGSTOP)
    at = time.monotonic()
    until(partial(crew.working, {"a", "b"}, at))
    crew.signal("c", signal.SIGCONT)
    at = time.monotonic()
    until(partial(crew.working, {"a", "b", "c"}, at))


def kill_one(crew: Crew) -> None:
    crew.signal("a", signal.SIGKILL)
    crew.processes["a"].wait(60)
    at = time.monotonic()
    until(partial(crew.working, {"b", "c"}, at))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(scaled(ROUNDS)))
def test_cuts_freezes_and_kills_leave_one_owner_and_no_offset_goes_back(
    zookeeper: ZooKeeperServer, root: str, tmp_path: Path, number: int
) -> None:
    observer = Observer(zookeeper, root)
    with crew_of(zookeeper, root, tmp_path, SESSION_SECONDS) as crew:
        for name in ("a", "b", "c"):
            crew.join(name)
        until(lambda: crew.working({"a", "b", "c"}, 0.0))
        for trouble in (cut_everybody, cut_one, freeze_zookeeper, freeze_one, kill_one):
            trouble(crew)
        crew.examine()
    observer.end()
    assert observer.looks > 10 and observer.went_back == ""


def owned(*spans: tuple[float, float]) -> list[Event]:
    numbers = count()
    return [Event(began, ended, 0, 1, next(numbers), "out", "a") for began, ended in spans]


def test_two_owners_at_one_time_would_be_seen() -> None:
    check_handover(owned((1, 2), (3, 4)), owned((5, 6)))
    check_handover(owned((1, 2), (3, 9)), owned((5, 6)))
    with pytest.raises(AssertionError, match="two owners"):
        check_handover(owned((1, 2), (5.5, 5.8)), owned((5, 6)))
    with pytest.raises(AssertionError, match="two owners"):
        check_handover(owned((1, 9), (3, 9)), owned((5, 6)))
