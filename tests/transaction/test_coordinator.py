"""The handler as its sessions see it: every step in every state, as one table, and what surrounds the steps."""

from collections.abc import Callable

import pytest

from tests.transaction.desk import ORDERS, Answer, Desk
from tfmq.errors import NOT_DONE, TransactionError
from tfmq.transaction.requests import CommitGroupMember

# The states in which a step can find a transaction.


def opened(desk: Desk) -> Answer:
    began = desk.begin()
    desk.send(began, [b"m"])
    return began


def prepared(desk: Desk) -> Answer:
    began = opened(desk)
    desk.prepare(began)
    return began


def then(first: Callable[[Desk], Answer], step: Callable[[Desk, Answer], object]) -> Callable[[Desk], Answer]:
    def reach(desk: Desk) -> Answer:
        began = first(desk)
        step(desk, began)
        return began

    return reach


def applying(desk: Desk) -> Answer:
    began = prepared(desk)
    desk.targets.stop(ORDERS)
    desk.commit(began)
    return began


def unsettled(desk: Desk) -> Answer:
    desk.targets.automatic = False
    began = prepared(desk)
    desk.commit(began)
    return began


def left_by_a_crash(desk: Desk) -> Answer:
    return crashed(desk, opened(desk))


def unknown(desk: Desk) -> Answer:
    began = desk.begin("x")
    desk.send(began, [b"m"])
    return crashed(desk, began)


def crashed(desk: Desk, began: Answer) -> Answer:
    desk.__dict__.update(desk.power_cut().__dict__)
    return began


def by_hand(desk: Desk) -> Answer:
    began = prepared(desk)
    desk.commit(began, by_hand=True)
    desk.advance(1)
    return began


def settled(desk: Desk) -> Answer:
    began = prepared(desk)
    desk.commit(began)
    desk.advance(1)
    return began


STATES: dict[str, Callable[[Desk], Answer]] = {
    "open": opened,
    "preparing": then(opened, lambda desk, began: desk.prepare(began, turn=False)),
    "prepared": prepared,
    "committing 1": then(opened, lambda desk, began: desk.commit(began, one_phase=True, turn=False)),
    "committing 2": then(prepared, lambda desk, began: desk.commit(began, turn=False)),
    "applying": applying,
    "committed": unsettled,
    "rolling back 1": then(opened, lambda desk, began: desk.rollback(began, turn=False)),
    "rolling back 2": then(prepared, lambda desk, began: desk.rollback(began, turn=False)),
    "rolled back": then(prepared, lambda desk, began: desk.rollback(began)),
    "hand committed": by_hand,
    "hand rolled b.": then(prepared, lambda desk, began: desk.rollback(began, by_hand=True)),
    "read only": then(lambda desk: desk.begin(), lambda desk, began: desk.prepare(began)),
    "settled": settled,
    "left by a crash": left_by_a_crash,
    "unknown": unknown,
}


def time_over(desk: Desk, began: Answer) -> None:
    desk.clock.advance(61)
    desk.tick()


def session_lost(desk: Desk, began: Answer) -> None:
    desk.handler.session_closed(desk.session)
    desk.turn()


EVENTS: dict[str, Callable[[Desk, Answer], Answer | None]] = {
    "send": lambda desk, began: desk.send(began, [b"n"]),
    "prepare": lambda desk, began: desk.prepare(began),
    "commit 2": lambda desk, began: desk.commit(began),
    "commit 1": lambda desk, began: desk.commit(began, one_phase=True),
    "commit h": lambda desk, began: desk.commit(began, one_phase=True, by_hand=True),
    "rollback": lambda desk, began: desk.rollback(began),
    "rollb. h": lambda desk, began: desk.rollback(began, by_hand=True),
    "forget": lambda desk, began: desk.forget_outcome(began),
    "time": time_over,
    "lost": session_lost,
}

ANSWERS = {
    ".": "",
    "ok": "ok",
    "no": "not forgotten",
    "yes": "forgotten",
    "prep": "prepared",
    "comm": "committed",
    "appl": "applying",
    "roll": "rolled_back",
    "hroll": "heuristic_rolled_back",
    "empty": "read_only",
    "!state": "transaction_state",
    "!unkn": "unknown_transaction",
    "!comm": "transaction_committed",
    "!roll": "transaction_rolled_back",
    "!hand": "heuristic_outcome",
}
# What is answered, and behind ">" the state that follows where it is another than the one in the second column.
TABLE = """
                 state  send    prepare     commit 2     commit 1     commit h      rollback     rollb. h       forget    time       lost
open             open   ok      prep>prep   !state       comm>comm    !state        roll>roll    roll>roll      no        .>roll     .>roll
preparing        prep   !state  prep        comm>comm    comm>comm    comm>hcomm    roll>roll    hroll>hroll    no        .          .
prepared         prep   !state  prep        comm>comm    comm>comm    comm>hcomm    roll>roll    hroll>hroll    no        .          .
committing 1     comm   !state  !comm       comm         comm         comm          !comm        !comm          no        .          .
committing 2     comm   !state  !comm       comm         comm         comm          !comm        !comm          no        .          .
applying         appl   !state  !comm       appl         appl         appl          !comm        !comm          no        .          .
committed        comm   !state  !comm       comm         comm         comm          !comm        !comm          no        .          .
rolling back 1   roll   !state  !roll       !roll        !roll        !roll         roll         roll           no        .          .
rolling back 2   roll   !state  !roll       !roll        !roll        !roll         roll         roll           no        .          .
rolled back      roll   !unkn   !roll       !roll        !roll        !roll         roll         roll           no        .          .
hand committed   hcomm  !state  !hand       !hand        !hand        comm          !hand        !hand          yes>comm  .          .
hand rolled b.   hroll  !state  !hand       !hand        !hand        !hand         !hand        hroll          yes>roll  .          .
read only        empty  !unkn   empty       empty        empty        empty         roll         roll           no        .          .
settled          comm   !unkn   !comm       comm         comm         comm          !comm        !comm          no        .          .
left by a crash  unkn   !unkn   !roll       !roll        !roll        !roll         roll         roll           no        .          .
unknown          unkn   !unkn   !unkn       !unkn        !unkn        !unkn         !unkn        !unkn          no        .          .
"""  # noqa: E501
SHOWN = {
    "open": "open",
    "prep": "prepared",
    "comm": "committed",
    "hcomm": "heuristic_committed",
    "appl": "applying",
    "roll": "rolled_back",
    "hroll": "heuristic_rolled_back",
    "empty": "read_only",
    "unkn": "unknown",
}


def cells() -> list[tuple[str, str, str, str]]:
    """(state, event, answer, state behind it) of every cell."""
    found = []
    for line in TABLE.strip("\n").splitlines()[1:]:
        state, words = line[:15].strip(), line[15:].split()
        stays = words[0]
        for event, cell in zip(EVENTS, words[1:], strict=True):
            answer, _, follows = cell.partition(">")
            found.append((state, event, ANSWERS[answer], SHOWN[follows or stays]))
    return found


def test_the_table_has_every_state_and_every_event() -> None:
    assert len(cells()) == len(STATES) * len(EVENTS)
    assert {state for state, *_ in cells()} == set(STATES)


@pytest.mark.parametrize(("state", "event", "answer", "follows"), cells())
def test_every_event_in_every_state(state: str, event: str, answer: str, follows: str) -> None:
    desk = Desk()
    began = STATES[state](desk)
    told = EVENTS[event](desk, began)
    desk.turn()
    if told is None:
        found = ""
    elif told.failure is not None:
        found = told.code
    elif isinstance(told.result, bool):
        found = "forgotten" if told.result else "not forgotten"
    else:
        found = "ok" if told.result is None else str(told.result.state)
    assert (found, desk.state(began)) == (answer, follows)
    visible = follows in ("committed", "heuristic_committed")
    assert desk.visible() == ([b"m"] if visible else [])


@pytest.mark.parametrize("state", list(STATES))
def test_whatever_a_crash_finds_is_decided_or_in_doubt_or_gone(state: str) -> None:
    """And a second and a third start find the same."""
    for cut in ("power_cut", "kill"):
        desk = Desk()
        began = STATES[state](desk)
        first = getattr(desk, cut)()
        found, visible = first.state(began), first.visible()
        assert found in {
            "unknown", "prepared", "committed", "rolled_back", "heuristic_committed", "heuristic_rolled_back",
        }  # fmt: skip
        assert visible == ([b"m"] if found in ("committed", "heuristic_committed") else [])
        for _ in range(2):
            first = first.kill()
            assert (first.state(began), first.visible()) == (found, visible)
        assert first.handler.status()["open"] == 0


# What surrounds the steps


def test_an_error_of_ours_is_reported_and_the_next_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    with monkeypatch.context() as broken:
        broken.setattr(desk.store, "begin", lambda origin: 1 // 0)
        assert desk.begin("x").code == "internal_error"
    assert desk.begin("x").code == "ok"


def test_a_broker_that_stops_takes_no_more_and_answers_what_it_took() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x", group="shop")
    desk.send(began, [b"m"])
    desk.prepare(began)
    desk.work()
    parked = Answer()
    desk.handler.await_check_back("shop", 60_000, desk.session, parked)
    answer = desk.commit(began, turn=False)
    stopped: list[bool] = []
    desk.handler.stop(lambda: stopped.append(True))
    assert not stopped
    for refused in (
        desk.begin("y"),
        desk.transact([(ORDERS, [b"m"])]),
        desk.commit_group("spark", 1, []),
        desk.rollback(began),
    ):
        assert (refused.code, refused.failure.outcome) == ("busy", NOT_DONE)  # type: ignore[union-attr]
    late = Answer()
    desk.handler.await_check_back("shop", 60_000, desk.session, late)
    assert (parked.result, late.code) == ([], "busy")
    desk.work()
    assert (stopped, answer.state) == ([True], "committed")
    desk.store.close()
    again = desk.again(desk.disk, desk.targets.killed())
    assert again.visible() == [b"m"]
    assert not again.store.transactions, "everything was forced and settled before the end"


def test_a_broker_that_stops_keeps_what_is_prepared() -> None:
    desk = Desk()
    began = desk.prepared("x")
    desk.stop()
    again = desk.again(desk.disk, desk.targets.killed())
    assert again.state(began) == "prepared"
    assert again.commit(began).state == "committed"


def test_a_session_that_is_lost_after_the_stop_touches_nothing() -> None:
    """The store is closed in a worker by then, which packs what it captured."""
    desk = Desk()
    began = desk.begin("")
    desk.send(began, [b"m"])
    desk.stop()
    desk.handler.session_closed(desk.session)
    assert desk.store.idle
    assert desk.store.transactions[began.epoch].state == "open"


def test_nothing_ends_by_time_while_a_broker_stops() -> None:
    desk = Desk(queued=True)
    member = desk.begin("x", member=CommitGroupMember("spark", 1, "run"))
    desk.send(member, [b"m"])
    desk.prepare(member, ttl_ms=1000)
    desk.work()
    desk.handler.stop(lambda: None)
    desk.advance(100)
    desk.work()
    assert desk.state(member) == "prepared"


def test_a_group_is_asked_about_what_was_prepared_for_long() -> None:
    desk = Desk()
    began = desk.begin("x", group="shop")
    desk.send(began, [b"m"])
    desk.prepare(began)
    answer = Answer()
    desk.handler.await_check_back("shop", 100_000, desk.session, answer)
    desk.advance(59)
    assert answer.code == "waiting"
    desk.advance(2)
    ((check,),) = (answer.result,)
    assert (check.xid, check.epoch, check.topics) == ("x", began.epoch, ["topic16"])
    desk.rollback(began)
    silent = Answer()
    cancel = desk.handler.await_check_back("shop", 1_000_000, desk.session, silent)
    desk.advance(5000)
    cancel()
    assert silent.result == []


def test_a_lost_session_is_not_asked() -> None:
    desk = Desk()
    answer = Answer()
    desk.handler.await_check_back("shop", 100_000, desk.session, answer)
    desk.handler.session_closed(desk.session)
    began = desk.begin("x", group="shop")
    desk.send(began, [b"m"])
    desk.prepare(began)
    desk.advance(200)
    assert answer.code == "waiting"


def test_every_error_of_a_transaction_says_what_it_is_about() -> None:
    desk = Desk()
    began = desk.prepared("order-77")
    sentence = str(desk.send(began, [b"m"]).failure)
    assert "order-77" in sentence
    desk.commit(began)
    failure = desk.rollback(began).failure
    assert isinstance(failure, TransactionError)
    assert failure.details["epoch"] == began.epoch
