"""The letters of a group, as its consumers use them, over each kind of store, with no broker where none is needed."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

from tests.dead_letters.conftest import Stand
from tests.dead_letters.helpers import NOW, Time, failure, finished, group_of, message, sql_shelf
from tests.scale import scaled, seeded
from tfmq import codecs
from tfmq.client.worker.dead_letter_store import DeadLetterStore
from tfmq.dead_letters.model import DEAD, FAILING, HANDLED, RETRYING, WAITING, Letter, Selection
from tfmq.dead_letters.store import LEASE_SECONDS, GroupDeadLetterStore, time_after_ms
from tfmq.message import BORN_MS_MAX


def only(stand: Stand) -> Letter:
    (letter,) = stand.run(stand.shelf.find(Selection()))
    found: Letter = letter
    return found


def test_a_dead_letter_is_kept_with_its_history(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    kept: DeadLetterStore = group_of(stand.shelf, Time())
    secret = failure(6, "ValueError: secret of the payload")
    assert stand.run(kept.store_letter(message(1), [failure(n) for n in range(5)] + [secret])) == DEAD
    letter = only(stand)
    assert (letter.state, letter.calls, len(letter.failures)) == (DEAD, 6, 6)
    assert stand.run(kept.lease_next()) is None and stand.run(kept.seconds_until_due()) is None
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert letter.id in line and kept.address in line and "ValueError" in line
    assert "secret" not in line


def test_calls_in_a_lane_are_noted_until_they_are_used_up(stand: Stand) -> None:
    clock = Time()
    states = []
    for number in range(5):  # each by another process: the one before was killed
        shelf, run = stand.open()
        states.append(run(group_of(shelf, clock, calls_max=4).record_failure(message(1), failure(number))))
    assert states == [FAILING, FAILING, FAILING, DEAD, DEAD]
    letter = only(stand)
    assert (letter.calls, len(letter.failures)) == (5, 5)


def test_one_that_ends_its_process_each_time_is_dead_in_the_end(stand: Stand) -> None:
    states = []
    for number in range(5):
        shelf, run = stand.open()
        states.append(run(group_of(shelf, Time(NOW + number), calls_max=3).count_call(message(1))))
    assert states == [FAILING, FAILING, FAILING, DEAD, DEAD]
    kept = group_of(stand.shelf, Time(NOW + 9))
    assert stand.run(kept.count_call(message(2))) == FAILING
    assert stand.run(kept.record_failure(message(2), failure(5), begun=True)) == FAILING
    assert stand.run(kept.count_call(message(2))) == FAILING
    stand.run(kept.record_success(message(2)))
    found = {each.ordinal: (each.state, each.calls) for each in stand.run(stand.shelf.find(Selection()))}
    assert found == {1: (DEAD, 3), 2: (HANDLED, 2)}


def test_one_that_passes_behind_failures_is_over(stand: Stand) -> None:
    kept = group_of(stand.shelf, Time())
    stand.run(kept.record_success(message(1)))
    assert stand.run(stand.shelf.find(Selection())) == []
    stand.run(kept.record_failure(message(1), failure()))
    stand.run(kept.record_success(message(1)))
    assert only(stand).state == HANDLED


def test_what_ended_is_forgotten_in_time(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.shelf, clock)
    stand.run(kept.store_letter(message(1), [failure()]))
    stand.run(kept.record_failure(message(2), failure()))
    stand.run(kept.record_success(message(2)))
    stand.run(kept.delete_expired())
    assert len(stand.run(stand.shelf.find(Selection()))) == 2
    clock.now += 31 * 86_400
    stand.run(kept.delete_expired())
    kinds = {each.state for each in stand.run(stand.shelf.find(Selection()))}
    assert DEAD in kinds and (HANDLED not in kinds or stand.shelf.name.startswith("topic:"))


def test_one_that_is_put_off_comes_at_its_time_and_not_before(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.shelf, clock)
    assert stand.run(kept.store_letter(message(1, b"{}"), [failure()], retry_after=30)) == WAITING
    assert stand.run(kept.seconds_until_due()) == 30
    clock.now += 29.99
    assert stand.run(kept.lease_next()) is None
    clock.now += 0.01
    due = stand.run(kept.lease_next())
    assert (due.message.payload, due.message.offset, due.calls, due.put_offs) == (b"{}", 100, 2, 1)
    assert stand.run(kept.lease_next()) is None
    assert stand.run(kept.mark_handled(due)) is True
    assert only(stand).state == HANDLED
    assert stand.run(kept.mark_handled(due)) is False


def test_it_is_called_as_often_as_it_may_fail_and_then_it_is_dead(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.shelf, clock, calls_max=4)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    calls, states = 0, []
    while (wait := stand.run(kept.seconds_until_due())) is not None:
        clock.now += wait
        due = stand.run(kept.lease_next())
        calls += 1
        states.append(stand.run(kept.mark_failed(due, failure(calls))))
    assert (calls, states) == (4, [WAITING, WAITING, WAITING, DEAD])
    letter = only(stand)
    assert (letter.calls, len(letter.failures)) == (5, 5)


def test_a_rejected_one_is_dead_at_once(stand: Stand) -> None:
    kept = group_of(stand.shelf, Time())
    stand.run(kept.store_letter(message(1), [], calls=1, retry_after=0))
    kept = group_of(stand.shelf, Time(NOW + 1))
    due = stand.run(kept.lease_next())
    assert stand.run(kept.mark_failed(due, failure(), rejected=True)) == DEAD


def test_waits_grow_between_failures(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.shelf, clock, calls_max=6)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    waits = []
    for number in range(4):
        clock.now += stand.run(kept.seconds_until_due())
        stand.run(kept.mark_failed(stand.run(kept.lease_next()), failure(number)))
        waits.append(stand.run(kept.seconds_until_due()))
    assert waits == [2, 4, 8, 16]


def test_putting_off_once_more_costs_no_call(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.shelf, clock, calls_max=2)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    for _ in range(10):
        clock.now += stand.run(kept.seconds_until_due())
        due = stand.run(kept.lease_next())
        assert stand.run(kept.postpone(due, 60, "the bank is closed")) == WAITING
    assert only(stand).put_offs == 11
    assert "the bank is closed" in only(stand).error


def test_what_a_killed_consumer_had_is_anothers_when_the_lease_is_over(stand: Stand) -> None:
    clock = Time()
    killed = group_of(stand.shelf, clock)
    stand.run(killed.store_letter(message(1), [failure()], retry_after=1))
    clock.now += 1
    lost = stand.run(killed.lease_next())
    shelf, run = stand.open()
    heir = group_of(shelf, clock)
    assert run(heir.lease_next()) is None
    assert run(heir.seconds_until_due()) == LEASE_SECONDS
    clock.now += LEASE_SECONDS / 2
    assert stand.run(killed.renew_lease(lost)) is True
    clock.now += LEASE_SECONDS - 0.001
    assert run(heir.lease_next()) is None
    clock.now += 0.001
    due = run(heir.lease_next())
    assert due.calls == lost.calls + 1
    assert stand.run(killed.renew_lease(lost)) is False
    assert stand.run(killed.mark_failed(lost, failure())) == ""
    assert stand.run(killed.postpone(lost, 5)) == ""
    assert stand.run(killed.release(lost)) is False
    assert run(heir.mark_handled(due)) is True


def test_what_is_given_back_was_never_called(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.shelf, clock)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    clock.now += 1
    first = stand.run(kept.lease_next())
    assert stand.run(kept.release(first)) is True
    again = stand.run(kept.lease_next())
    assert again.calls == first.calls


def test_another_groups_letters_are_not_taken(stand: Stand) -> None:
    clock = Time()
    stand.run(group_of(stand.shelf, clock).store_letter(message(1), [failure()], retry_after=0))
    other = GroupDeadLetterStore(stand.shelf, "shipping", 6, wall_clock=clock)
    clock.now += 1
    assert stand.run(other.lease_next()) is None
    assert stand.run(other.store_letter(message(1), [failure()])) == DEAD
    assert stand.run(stand.shelf.count_by_state()) == {("billing", WAITING): 1, ("shipping", DEAD): 1}


def test_a_value_is_made_by_the_consumers_codec(tmp_path: Path) -> None:
    clock = Time()
    kept = GroupDeadLetterStore(
        sql_shelf(tmp_path / "dead.db"), "billing", 6, wall_clock=clock, codec=codecs.json
    )
    finished(kept.store_letter(message(1, b'{"n": 1}'), [failure()], retry_after=0))
    clock.now += 1
    due = finished(kept.lease_next())
    assert due is not None and due.message.value == {"n": 1}


def test_no_time_is_beyond_the_calendar(tmp_path: Path) -> None:
    assert time_after_ms(1000, 5) == 6000 and time_after_ms(1000, 0) == 1001
    assert time_after_ms(1000, 1e300) == BORN_MS_MAX
    kept = group_of(sql_shelf(tmp_path / "dead.db"), Time())
    assert finished(kept.store_letter(message(1), [failure()], retry_after=1e300)) == WAITING
    assert finished(kept.seconds_until_due()) > 1e9


@pytest.mark.long
def test_random_consumers_that_die_lose_nothing_and_end(tmp_path: Path) -> None:
    """At most as many calls as were granted and one a kill, nothing lost, nothing endless."""
    for run in range(scaled(200)):
        chance = seeded("keeping", run)
        shelf, clock = sql_shelf(tmp_path / f"{run}.db"), Time()
        count, calls_max = 8, chance.randrange(2, 5)
        calls: Counter[str] = Counter()
        kills: Counter[str] = Counter()
        keeper = group_of(shelf, clock, calls_max)
        for number in range(count):
            finished(
                keeper.store_letter(message(number), [failure()], calls=1, retry_after=chance.random() * 5)
            )
        consumers = [group_of(shelf, clock, calls_max) for _ in range(3)]
        while (wait := finished(keeper.seconds_until_due())) is not None:
            clock.now += wait
            due = finished(chance.choice(consumers).lease_next())
            if due is None:
                continue
            calls[due.id] += 1
            if chance.random() < 0.3:
                kills[due.id] += 1
            else:
                finished(keeper.mark_failed(due, failure(calls[due.id])))
        letters = finished(shelf.find(Selection()))
        assert [each.state for each in letters] == [DEAD] * count, f"run {run}"
        assert all(calls[each.id] <= calls_max for each in letters), f"run {run}"
        assert RETRYING not in {each.state for each in letters}
        shelf.close()
