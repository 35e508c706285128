"""An error says "not done" only where that is known: who believes it does the work again."""

from tests.transaction.rig import ORDERS, Rig
from tfmq.errors import NOT_DONE, UNKNOWN, TfmqError


def outcome(error: BaseException | None) -> tuple[str, str]:
    assert isinstance(error, TfmqError)
    return error.code, error.outcome


def test_a_commit_of_which_only_a_later_namesake_is_known_may_have_happened() -> None:
    rig = Rig(limits={"transaction_outcomes": 1})
    first = rig.prepared("x", [b"first"])
    assert rig.commit(first).state == "committed"
    rig.advance(1)
    for number in range(5):
        rig.commit(rig.prepared(f"other-{number}"))
    rig.advance(1)
    rig.prepared("x", [b"second"])
    assert outcome(rig.commit(first).failure) == ("stale_epoch", UNKNOWN)
    assert b"first" in rig.visible()


def test_what_an_operator_committed_has_happened() -> None:
    rig = Rig()
    committed, dropped = rig.prepared("x", [b"m"]), rig.prepared("y", [b"n"])
    rig.commit(committed, by_hand=True)
    rig.rollback(dropped, by_hand=True)
    assert outcome(rig.commit(committed).failure) == ("heuristic_outcome", UNKNOWN)
    assert outcome(rig.commit(dropped).failure) == ("heuristic_outcome", NOT_DONE)
    assert rig.visible(ORDERS) == [b"m"]
