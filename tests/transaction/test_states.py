"""The table of states: what it allows, and that nothing else is."""

import itertools

import pytest

from tfmq.transaction import states

EVENTS = (
    states.REQUEST_PREPARE,
    states.REQUEST_COMMIT,
    states.REQUEST_ROLLBACK,
    states.RECORD_FAILED,
    states.RECORD_FAILED_PREPARED,
    states.PREPARE,
    states.COMMIT,
    states.ROLLBACK,
    states.HEURISTIC_COMMIT,
    states.HEURISTIC_ROLLBACK,
    states.APPLIED,
    states.FINISH_EMPTY,
)


def reachable(start: str) -> set[str]:
    found = {start}
    while True:
        more = {to for (state, _), to in states.TRANSITIONS.items() if state in found} - found
        if not more:
            return found
        found |= more


def test_the_table_speaks_of_known_states_and_events() -> None:
    assert {event for _, event in states.TRANSITIONS} == set(EVENTS)
    assert {state for state, _ in states.TRANSITIONS} | set(states.TRANSITIONS.values()) == set(states.STATES)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(states.STATES, EVENTS)))
def test_a_step_is_in_the_table_or_refused(state: str, event: str) -> None:
    if (state, event) in states.TRANSITIONS:
        assert states.next_state(state, event) == states.TRANSITIONS[state, event]
    else:
        with pytest.raises(states.InvalidTransition, match="cannot take the step") as caught:
            states.next_state(state, event)
        assert (caught.value.state, caught.value.event) == (state, event)


def test_every_state_can_be_reached() -> None:
    assert reachable(states.OPEN) == set(states.STATES)


def test_what_has_ended_stays_as_it_is() -> None:
    for state in states.ENDED_STATES | {states.HEURISTIC_ROLLED_BACK}:
        assert reachable(state) == {state}


def test_a_decision_is_never_taken_back() -> None:
    assert reachable(states.APPLYING) == {states.APPLYING, states.COMMITTED}
    assert reachable(states.HEURISTIC_COMMITTED) == {states.HEURISTIC_COMMITTED}


def test_nothing_is_prepared_or_decided_twice() -> None:
    for state in states.STATES:
        if state not in (states.OPEN, states.PREPARING):
            assert (state, states.PREPARE) not in states.TRANSITIONS
        if state not in (states.OPEN, states.PREPARED, states.COMMITTING):
            assert (state, states.COMMIT) not in states.TRANSITIONS


def test_hazard_04_a_refused_record_leaves_what_was_there() -> None:
    for asked, event in ((states.REQUEST_PREPARE, states.RECORD_FAILED), (states.REQUEST_COMMIT, states.RECORD_FAILED)):
        assert states.next_state(states.next_state(states.OPEN, asked), event) == states.OPEN
    for asked in (states.REQUEST_COMMIT, states.REQUEST_ROLLBACK):
        assert (
            states.next_state(states.next_state(states.PREPARED, asked), states.RECORD_FAILED_PREPARED)
            == states.PREPARED
        )
