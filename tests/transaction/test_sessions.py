"""Who began what: counted by session, and the local ones end with it."""

from tests.transaction.desk import Session
from tfmq.transaction.active_transactions import SessionTransactions


def test_a_lost_session_gives_up_its_local_transactions_only() -> None:
    sessions, mine, other = SessionTransactions(), Session(), Session()
    sessions.add_transaction(mine, 1, local=True)
    sessions.add_transaction(mine, 2, local=False)
    sessions.add_transaction(mine, 3, local=True)
    sessions.add_transaction(other, 4, local=True)
    assert sessions.remove_session(mine) == [1, 3]
    assert sessions.open_count(mine) == 0
    assert sessions.open_count(other) == 1
    assert sessions.remove_session(mine) == []


def test_what_is_open_no_more_is_not_counted_and_survives_its_session() -> None:
    sessions, mine = SessionTransactions(), Session()
    sessions.add_transaction(mine, 1, local=True)
    sessions.add_transaction(mine, 2, local=True)
    sessions.remove_transaction(1)
    sessions.remove_transaction(1)
    sessions.remove_transaction(99)
    assert sessions.open_count(mine) == 1
    assert sessions.remove_session(mine) == [2]


def test_two_sessions_of_the_same_client_are_two() -> None:
    sessions, first, second = SessionTransactions(), Session("a"), Session("a")
    sessions.add_transaction(first, 1, local=True)
    assert sessions.open_count(second) == 0


def test_a_session_without_transactions_is_not_kept() -> None:
    sessions, mine = SessionTransactions(), Session()
    sessions.add_transaction(mine, 1, local=True)
    sessions.remove_transaction(1)
    assert not sessions._epochs and not sessions._session_by_epoch
