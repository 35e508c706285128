"""Who began what: counted by session, and the local ones end with it."""

from tests.transaction.desk import Session
from tfmq.transaction.active_transactions import Sessions


def test_a_lost_session_gives_up_its_local_transactions_only() -> None:
    sessions, mine, other = Sessions(), Session(), Session()
    sessions.opened(mine, 1, local=True)
    sessions.opened(mine, 2, local=False)
    sessions.opened(mine, 3, local=True)
    sessions.opened(other, 4, local=True)
    assert sessions.lost(mine) == [1, 3]
    assert sessions.count(mine) == 0
    assert sessions.count(other) == 1
    assert sessions.lost(mine) == []


def test_what_is_open_no_more_is_not_counted_and_survives_its_session() -> None:
    sessions, mine = Sessions(), Session()
    sessions.opened(mine, 1, local=True)
    sessions.opened(mine, 2, local=True)
    sessions.closed(1)
    sessions.closed(1)
    sessions.closed(99)
    assert sessions.count(mine) == 1
    assert sessions.lost(mine) == [2]


def test_two_sessions_of_the_same_client_are_two() -> None:
    sessions, first, second = Sessions(), Session("a"), Session("a")
    sessions.opened(first, 1, local=True)
    assert sessions.count(second) == 0


def test_a_session_without_transactions_is_not_kept() -> None:
    sessions, mine = Sessions(), Session()
    sessions.opened(mine, 1, local=True)
    sessions.closed(1)
    assert not sessions._epochs and not sessions._owner
