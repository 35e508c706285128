"""An error says "not done" only where that is known: who believes it does the work again."""

from tests.transaction.desk import ORDERS, Desk
from tfmq.errors import NOT_DONE, UNKNOWN, TfmqError


def outcome(error: BaseException | None) -> tuple[str, str]:
    assert isinstance(error, TfmqError)
    return error.code, error.outcome


def test_a_commit_of_which_only_a_later_namesake_is_known_may_have_happened() -> None:
    desk = Desk(limits={"transaction_outcomes": 1})
    first = desk.prepared("x", [b"first"])
    assert desk.commit(first).state == "committed"
    desk.advance(1)
    for number in range(5):
        desk.commit(desk.prepared(f"other-{number}"))
    desk.advance(1)
    desk.prepared("x", [b"second"])
    assert outcome(desk.commit(first).failure) == ("stale_epoch", UNKNOWN)
    assert b"first" in desk.visible()


def test_what_an_operator_committed_has_happened() -> None:
    desk = Desk()
    committed, dropped = desk.prepared("x", [b"m"]), desk.prepared("y", [b"n"])
    desk.commit(committed, by_hand=True)
    desk.rollback(dropped, by_hand=True)
    assert outcome(desk.commit(committed).failure) == ("heuristic_outcome", UNKNOWN)
    assert outcome(desk.commit(dropped).failure) == ("heuristic_outcome", NOT_DONE)
    assert desk.visible(ORDERS) == [b"m"]
