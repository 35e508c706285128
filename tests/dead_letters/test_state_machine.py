"""What events do to letters: each cell of the table, and the invariants that random events cannot break.

Invariants: a letter has a token exactly while a consumer has it; calls never shrink but for one that was given back; a
journey, once settled, is never replaced by another one unless it was returned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.dead_letters.helpers import failure, message
from tests.scale import scaled, seeded
from tfmq.dead_letters import model
from tfmq.dead_letters.model import (
    DEAD,
    DROPPED,
    FAILING,
    HANDLED,
    REDRIVEN,
    REDRIVING,
    RETRYING,
    STATES,
    WAITING,
    Letter,
    RedrivePosition,
    letter_from_message,
)
from tfmq.dead_letters.state_machine import PUT_OFFS_MAX, TRANSITIONS, apply_event

NEW = replace(letter_from_message(message(), "billing"), calls=1, calls_left=5, failures=(failure(),))
JOURNEY = RedrivePosition("orders", 7, 0, 99, 0, 1000)


def keep(at_ms: int = 10, next_ms: int = 0, **fields: Any) -> model.KeepEvent:
    return model.KeepEvent(at_ms, replace(NEW, failures=(failure(at_ms),), **fields), next_ms)


def note(at_ms: int, calls_left: int = 3) -> model.NoteEvent:
    return model.NoteEvent(at_ms, replace(NEW, calls=0, calls_left=calls_left, failures=(failure(at_ms),)))


def letter_in(state: str) -> Letter:
    """A letter in that state, on an honest way."""
    dead = done(None, keep(calls_left=0))
    waiting = done(None, keep(next_ms=20))
    retrying = done(waiting, model.TakeEvent(20, "me", 80))
    redriving = done(done(dead, model.ClaimEvent(20, "me")), model.DepartEvent(21, "me", JOURNEY))
    return {
        FAILING: done(None, note(15)),
        DEAD: dead,
        WAITING: waiting,
        RETRYING: retrying,
        REDRIVING: redriving,
        REDRIVEN: done(redriving, model.ArriveEvent(22, 99, 0, 500)),
        HANDLED: done(retrying, model.HandledEvent(30, "me")),
        DROPPED: done(dead, model.DropEvent(30)),
    }[state]


def done(letter: Letter | None, event: model.Event) -> Letter:
    found = apply_event(letter, event)
    assert found is not None
    return found


EVENTS: dict[str, model.Event] = {
    "keep dead": keep(50, calls_left=0),
    "keep waiting": keep(50, next_ms=60),
    "note": note(50),
    "begin": model.BeginEvent(50, replace(NEW, calls=0, calls_left=3, failures=())),
    "note what was begun": note(50)._replace(begun=True),
    "pass": model.PassEvent(50),
    "take": model.TakeEvent(50, "you", 110),
    "take when the lease is over": model.TakeEvent(90, "you", 150),
    "renew": model.RenewEvent(50, "me", 200),
    "renew another's": model.RenewEvent(50, "you", 200),
    "handled": model.HandledEvent(50, "me"),
    "handled by another": model.HandledEvent(50, "you"),
    "failed": model.FailedEvent(50, "me", failure(50), 70),
    "failed for good": model.FailedEvent(50, "me", failure(50), 0),
    "failed another's": model.FailedEvent(50, "you", failure(50), 70),
    "put off": model.PutOffEvent(50, "me", failure(50), 70),
    "give back": model.GiveBackEvent(50, "me"),
    "retry": model.RetryEvent(50, 3),
    "drop": model.DropEvent(50),
    "drop by force": model.DropEvent(50, True),
    "adopt": model.AdoptEvent(50, "node-2"),
    "adopt by force": model.AdoptEvent(50, "node-2", True),
    "claim": model.ClaimEvent(50, "you"),
    "claim also what waits": model.ClaimEvent(50, "you", True),
    "depart again": model.DepartEvent(50, "me", JOURNEY._replace(sequence=4)),
    "arrive": model.ArriveEvent(50, 99, 0, 500),
    "arrive elsewhere": model.ArriveEvent(50, 98, 0, 500),
    "return": model.ReturnEvent(50, "me", 99, 0),
    "return another's": model.ReturnEvent(50, "you", 99, 0),
    "return from another place": model.ReturnEvent(50, "me", 99, 1),
    "return from no place": model.ReturnEvent(50, "me"),
}
LANE = ("begin", "note", "note what was begun")
ADOPTED = ("adopt", "adopt by force")
TABLE = {
    FAILING: {
        "keep dead": DEAD,
        "keep waiting": WAITING,
        "note": FAILING,
        "note what was begun": FAILING,
        "begin": FAILING,
        "pass": HANDLED,
        "drop": DROPPED,
        "drop by force": DROPPED,
        **dict.fromkeys(ADOPTED, FAILING),
    },
    WAITING: {
        "note": WAITING,
        "note what was begun": WAITING,
        "begin": WAITING,
        "keep dead": DEAD,
        "keep waiting": WAITING,
        "take": RETRYING,
        "take when the lease is over": RETRYING,
        "retry": WAITING,
        "drop": DROPPED,
        "drop by force": DROPPED,
        "claim also what waits": REDRIVING,
        **dict.fromkeys(ADOPTED, WAITING),
    },
    RETRYING: {
        "note": RETRYING,
        "note what was begun": RETRYING,
        "begin": RETRYING,
        "keep dead": DEAD,
        "keep waiting": RETRYING,
        "take when the lease is over": RETRYING,
        "renew": RETRYING,
        "handled": HANDLED,
        "failed": WAITING,
        "failed for good": DEAD,
        "put off": WAITING,
        "give back": WAITING,
        **dict.fromkeys(ADOPTED, RETRYING),
    },
    DEAD: {
        "note": DEAD,
        "note what was begun": DEAD,
        "begin": DEAD,
        "keep dead": DEAD,
        "keep waiting": DEAD,
        "retry": WAITING,
        "drop": DROPPED,
        "drop by force": DROPPED,
        "claim": REDRIVING,
        "claim also what waits": REDRIVING,
        **dict.fromkeys(ADOPTED, DEAD),
    },
    REDRIVING: {
        "note": REDRIVING,
        "note what was begun": REDRIVING,
        "begin": REDRIVING,
        "keep dead": REDRIVING,
        "keep waiting": REDRIVING,
        "drop by force": DROPPED,
        "arrive": REDRIVEN,
        "return": DEAD,
        **dict.fromkeys(ADOPTED, REDRIVING),
    },
    REDRIVEN: {
        "keep dead": DEAD,
        "keep waiting": WAITING,
        **dict.fromkeys(LANE, FAILING),
        **dict.fromkeys(ADOPTED, REDRIVEN),
    },
    HANDLED: {
        "keep dead": DEAD,
        "keep waiting": WAITING,
        **dict.fromkeys(LANE, FAILING),
        **dict.fromkeys(ADOPTED, HANDLED),
    },
    DROPPED: {
        **dict.fromkeys(LANE, FAILING),
        "keep dead": DEAD,
        "keep waiting": WAITING,
        "retry": WAITING,
        **dict.fromkeys(ADOPTED, DROPPED),
    },
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", EVENTS)
def test_each_event_does_in_each_state_what_the_table_says(state: str, name: str) -> None:
    letter = letter_in(state)
    assert letter.state == state
    found = apply_event(letter, EVENTS[name])
    assert (None if found is None else found.state) == TABLE[state].get(name)


def test_nothing_happens_to_a_dead_letter_that_is_not_there() -> None:
    for name, event in EVENTS.items():
        assert (apply_event(None, event) is not None) is name.startswith(("keep", "note", "begin")), name


def test_the_same_keeping_once_more_changes_nothing() -> None:
    for state in STATES:
        letter = letter_in(state)
        last = letter.failures[-1].at_ms - failure().at_ms
        assert apply_event(letter, keep(last)) == letter


def test_the_same_message_kept_once_more_joins_both_histories() -> None:
    letter = done(letter_in(DEAD), keep(50, calls=3))
    assert letter.calls == 4
    assert [each.at_ms for each in letter.failures] == [failure(10).at_ms, failure(50).at_ms]
    assert letter.kept_ms == 10 and letter.changed_ms == 50


def test_one_that_comes_back_while_it_is_under_way_stays_under_way() -> None:
    letter = done(letter_in(REDRIVING), keep(50))
    assert letter.journey == JOURNEY and letter.token == "me"
    assert letter.failures[-1].at_ms == failure(50).at_ms


@pytest.mark.parametrize("state", STATES)
def test_a_dead_letter_that_names_its_broker_is_another_ones_by_force_only(state: str) -> None:
    letter = replace(letter_in(state), broker="node-1")
    assert apply_event(letter, EVENTS["adopt"]) is None
    assert done(letter, EVENTS["adopt by force"]).broker == "node-2"
    assert done(letter_in(state), EVENTS["adopt"]).broker == "node-2"


def test_a_message_that_its_consumer_meets_again_names_the_broker() -> None:
    met = replace(NEW, calls=0, calls_left=3, broker="node-1")
    again = replace(met, failures=(failure(60),))
    for event in (
        model.KeepEvent(50, again),
        model.NoteEvent(50, again),
        model.BeginEvent(50, replace(met, failures=())),
    ):
        assert done(letter_in(FAILING), event).broker == "node-1"


def test_calls_of_a_queue_are_counted_over_the_death_of_its_consumer() -> None:
    letter, states = None, []
    for at in (10, 20, 30):
        letter = done(letter, note(at, calls_left=3))
        states.append(letter.state)
    assert letter is not None
    assert states == [FAILING, FAILING, DEAD]
    assert (letter.calls, letter.calls_left, len(letter.failures)) == (3, 0, 3)
    assert done(letter, note(40, calls_left=3)).state == DEAD
    assert done(None, note(10, calls_left=1)).state == DEAD


def test_calls_that_fail_alike_in_one_moment_are_counted_each() -> None:
    letter = done(done(None, note(10, calls_left=3)), note(10, calls_left=3))
    assert (letter.calls, letter.calls_left, len(letter.failures)) == (2, 1, 2)


def test_one_that_failed_and_is_put_off_has_the_calls_that_are_left() -> None:
    noted = done(done(None, note(10, calls_left=4)), note(20, calls_left=4))
    waiting = done(noted, keep(30, next_ms=40, calls=1, calls_left=4))
    assert (waiting.state, waiting.calls_left, waiting.calls) == (WAITING, 2, 3)


def test_putting_off_a_call_that_was_begun_costs_none_of_those_that_are_left() -> None:
    begun = done(None, model.BeginEvent(10, replace(NEW, calls=0, calls_left=4, failures=())))
    waiting = done(begun, keep(20, next_ms=30, calls=0, calls_left=4)._replace(begun=True))
    assert (waiting.state, waiting.calls, waiting.calls_left) == (WAITING, 1, 4)
    rejected = done(begun, keep(20, calls=0, calls_left=0)._replace(begun=True))
    assert (rejected.state, rejected.calls, rejected.calls_left) == (DEAD, 1, 0)


def test_one_that_is_put_off_once_more_after_a_kill_begins_no_new_round() -> None:
    """Its offset was not saved, so its consumer meets it again; calls that failed meanwhile have failed."""
    again = keep(70, next_ms=90, calls=1, calls_left=5)
    waiting = done(letter_in(RETRYING), model.FailedEvent(50, "me", failure(50), 60))
    assert (waiting.calls, waiting.calls_left) == (2, 4)
    kept = done(waiting, again)
    assert (kept.state, kept.calls, kept.calls_left, kept.next_ms) == (WAITING, 3, 4, 90)
    in_work = done(waiting, model.TakeEvent(60, "killed", 120))
    kept = done(in_work, again)
    assert (kept.state, kept.calls, kept.calls_left, kept.token, kept.lease_ms) == (RETRYING, 4, 3, "killed", 120)
    last = done(replace(in_work, calls_left=0), again)
    assert done(last, model.TakeEvent(120, "you", 180)).state == DEAD, "its process ended in the last call"
    dead = done(letter_in(DEAD), again)
    assert (dead.state, dead.calls, dead.calls_left, dead.next_ms) == (DEAD, 2, 0, 0)


def test_what_was_handled_and_fails_again_begins_a_new_round() -> None:
    passed = done(done(None, note(10, calls_left=2)), model.PassEvent(20))
    again = done(passed, note(30, calls_left=2))
    assert (again.state, again.calls, again.calls_left) == (FAILING, 2, 1)
    assert again.kept_ms == 10


def test_one_that_ends_its_process_in_the_queue_is_dead_when_its_calls_are_used_up() -> None:
    begin = model.BeginEvent(10, replace(NEW, calls=0, calls_left=3, failures=()))
    letter, states = None, []
    for at in (10, 20, 30, 40, 50):
        letter = done(letter, begin._replace(at_ms=at))
        states.append(letter.state)
    assert letter is not None
    assert (states, letter.calls) == ([FAILING, FAILING, FAILING, DEAD, DEAD], 3)
    assert "process ended" in letter.error and len(letter.failures) == 1


def test_a_call_that_was_begun_is_counted_once() -> None:
    begin = model.BeginEvent(10, replace(NEW, calls=0, calls_left=2, failures=()))
    first = done(done(None, begin), note(11, calls_left=2)._replace(begun=True))
    assert (first.state, first.calls, first.calls_left) == (FAILING, 1, 1)
    second = done(done(first, begin._replace(at_ms=12)), note(13, calls_left=2)._replace(begun=True))
    assert (second.state, second.calls, second.calls_left) == (DEAD, 2, 0)
    passed = done(done(None, begin), model.PassEvent(14))
    assert passed.state == HANDLED


def test_a_call_counts_when_it_begins() -> None:
    waiting = letter_in(WAITING)
    taken = done(waiting, model.TakeEvent(20, "me", 80))
    assert (taken.calls, taken.calls_left) == (waiting.calls + 1, waiting.calls_left - 1)
    given = done(taken, model.GiveBackEvent(21, "me"))
    assert (given.calls, given.calls_left) == (waiting.calls, waiting.calls_left)


def test_it_is_not_taken_before_its_time() -> None:
    assert apply_event(letter_in(WAITING), model.TakeEvent(19, "me", 80)) is None


def test_one_that_ends_its_process_each_time_is_dead_when_its_calls_are_used_up() -> None:
    letter = done(None, keep(next_ms=20, calls_left=3))
    now, calls = 20, 0
    while letter.state != DEAD:
        letter = done(letter, model.TakeEvent(now, f"process {now}", now + 60))
        calls += letter.state == RETRYING
        now += 60
    assert calls == 3
    assert "process ended" in letter.error


def test_putting_off_costs_no_call_and_comes_to_an_end() -> None:
    letter = done(None, keep(next_ms=20))
    left, now, times = letter.calls_left, 20, 1
    while letter.state == WAITING and times <= 2 * PUT_OFFS_MAX:
        letter = done(letter, model.TakeEvent(now, "me", now + 5))
        letter = done(letter, model.PutOffEvent(now, "me", failure(now), now + 1))
        assert letter.state == DEAD or letter.calls_left == left
        now, times = now + 1, times + 1
    assert times == PUT_OFFS_MAX + 1
    assert letter.error.startswith(f"put off {PUT_OFFS_MAX} times")


def test_a_claim_without_a_place_is_anybodys() -> None:
    claimed = done(letter_in(DEAD), model.ClaimEvent(20, "me"))
    assert done(claimed, model.ReturnEvent(21, "me")).state == DEAD
    again = done(claimed, model.ClaimEvent(21, "you"))
    assert apply_event(again, model.DepartEvent(22, "me", JOURNEY)) is None
    assert done(again, model.DepartEvent(22, "you", JOURNEY)).journey == JOURNEY


def test_a_place_is_settled_once() -> None:
    assert apply_event(letter_in(REDRIVING), model.DepartEvent(50, "me", JOURNEY._replace(producer_id=98))) is None
    returned = done(letter_in(REDRIVING), model.ReturnEvent(50, "me", 99, 0))
    assert (returned.journey, returned.token) == (None, "")


def test_the_table_knows_every_event_and_every_state() -> None:
    assert {kind for row in TRANSITIONS.values() for kind in row} == {type(each) for each in EVENTS.values()}


def test_random_events_break_no_invariant() -> None:
    chance = seeded("course")
    for _ in range(scaled(3000)):
        letter, now = None, 10
        for _ in range(60):
            now += chance.randrange(30)
            letter = one_event(chance, letter, now)


def one_event(chance: Any, letter: Letter | None, now: int) -> Letter | None:
    """The letter after a random event."""
    token = chance.choice(["a", "b", letter.token if letter else "a"])
    event: model.Event = chance.choice(
        [
            keep(now, next_ms=chance.choice([0, now + 5]), calls_left=chance.randrange(4)),
            note(now, chance.randrange(1, 4))._replace(begun=chance.random() < 0.3),
            model.BeginEvent(now, replace(NEW, calls=0, calls_left=chance.randrange(1, 4), failures=())),
            model.PassEvent(now),
            model.TakeEvent(now, chance.choice("ab") + str(now), now + 20),
            model.RenewEvent(now, token, now + 20),
            model.HandledEvent(now, token),
            model.FailedEvent(now, token, failure(now), chance.choice([0, now + 3])),
            model.PutOffEvent(now, token, failure(now), now + 3),
            model.GiveBackEvent(now, token),
            model.RetryEvent(now, 2),
            model.DropEvent(now, chance.random() < 0.2),
            model.ClaimEvent(now, chance.choice("ab"), True),
            model.DepartEvent(now, token, JOURNEY._replace(sequence=chance.randrange(3))),
            model.ArriveEvent(now, 99, chance.randrange(3), 5),
            model.ReturnEvent(now, token, chance.choice([0, 99]), chance.randrange(3)),
        ]
    )
    found = apply_event(letter, event)
    if found is None:
        return letter
    assert (found.token != "") == (found.state in (RETRYING, REDRIVING)), event
    assert found.calls_left >= 0
    if letter is not None and not isinstance(event, model.GiveBackEvent):
        assert found.calls >= letter.calls
    if letter is not None and letter.journey and found.state == REDRIVING:
        assert found.journey == letter.journey
    if found.state in (WAITING, RETRYING, REDRIVING):
        assert (found.next_ms > 0) == (found.state == WAITING) or found.state == RETRYING
    return found
