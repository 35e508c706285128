"""The table of steps: every pair of step and state is decided, and every refusal says why."""

import itertools

import pytest

from tfmq.client.transaction import states as steps
from tfmq.client.transaction.states import check_step, state_after_error
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    Busy,
    Damaged,
    HeuristicOutcome,
    StaleEpoch,
    TimedOut,
    TransactionCommitted,
    TransactionError,
    TransactionRolledBack,
    UnknownTransaction,
)

STATES = [
    *("open", "prepared", "read_only", "committed", "applying", "rolled_back", "unknown", "abandoned"),
    *("preparing", "committing", "rolling_back", "heuristic_committed", "heuristic_rolled_back"),
]
STEPS = ["send", "prepare", "commit", "rollback"]


@pytest.mark.parametrize(("step", "state"), list(itertools.product(STEPS, STATES)))
def test_every_step_is_allowed_or_refused_with_a_reason(step: str, state: str) -> None:
    if state in steps.EXECUTED_IN[step] or state in steps.DONE_IN[step]:
        assert check_step(step, state) == (steps.GO if state in steps.EXECUTED_IN[step] else steps.DONE)
        return
    with pytest.raises((TransactionError, Abandoned)) as caught:
        check_step(step, state, "because")
    assert caught.value.outcome == NOT_DONE and caught.value.sentence == "because"


def test_the_table_names_known_states_only() -> None:
    for table in (steps.EXECUTED_IN, steps.DONE_IN):
        assert set(itertools.chain(*table.values())) <= set(STATES) and set(table) == set(STEPS)


def test_nothing_may_be_done_to_what_ended_otherwise() -> None:
    with pytest.raises(TransactionRolledBack):
        check_step("commit", "rolled_back")
    for state in ("committed", "applying"):
        with pytest.raises(TransactionCommitted):
            check_step("rollback", state)


@pytest.mark.parametrize(
    ("step", "state", "sentence"),
    [
        ("send", "read_only", "The transaction is over, with nothing in it: begin another one for further messages."),
        (
            "send",
            "unknown",
            "The transaction is in doubt (a step got no reply; calling it again returns the outcome): begin",
        ),
        ("prepare", "rolled_back", "The transaction is rolled back: it cannot be prepared any more."),
    ],
)
def test_a_refusal_reads_as_a_sentence(step: str, state: str, sentence: str) -> None:
    with pytest.raises(TransactionError) as caught:
        check_step(step, state)
    assert caught.value.sentence.startswith(sentence)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Busy(), None),
        (TimedOut(outcome=NOT_DONE), None),
        (TimedOut(outcome=UNKNOWN), "unknown"),
        (UnknownTransaction(), "unknown"),
        (UnknownTransaction(outcome=NOT_DONE), None),
        (StaleEpoch(), "unknown"),
        (TransactionRolledBack(), "rolled_back"),
        (TransactionCommitted(), "committed"),
        (HeuristicOutcome(state="heuristic_committed"), "heuristic_committed"),
        (HeuristicOutcome(state="a later one"), None),
        (Damaged(state="prepared", lost=2), None),
        (Damaged(state="committed", outcome=UNKNOWN), "committed"),
        (Damaged(state="applying", outcome=UNKNOWN), "applying"),
    ],
)
def test_what_a_refusal_says_about_the_transaction(error: TransactionError, state: str | None) -> None:
    assert state_after_error("commit", error) == state
