"""The handler as its sessions see it: every step in every state, as one table, and what surrounds the steps."""

from collections.abc import Callable

import pytest

from tests.transaction.rig import ORDERS, Answer, Rig
from tfmq.errors import NOT_DONE, TransactionError
from tfmq.transaction.requests import CommitGroupMember

# The states in which a step can find a transaction.


def opened(rig: Rig) -> Answer:
    began = rig.begin()
    rig.send(began, [b"m"])
    return began


def prepared(rig: Rig) -> Answer:
    began = opened(rig)
    rig.prepare(began)
    return began


def then(first: Callable[[Rig], Answer], step: Callable[[Rig, Answer], object]) -> Callable[[Rig], Answer]:
    def reach(rig: Rig) -> Answer:
        began = first(rig)
        step(rig, began)
        return began

    return reach


def applying(rig: Rig) -> Answer:
    began = prepared(rig)
    rig.targets.stop(ORDERS)
    rig.commit(began)
    return began


def unsettled(rig: Rig) -> Answer:
    rig.targets.automatic = False
    began = prepared(rig)
    rig.commit(began)
    return began


def left_by_a_crash(rig: Rig) -> Answer:
    return crashed(rig, opened(rig))


def unknown(rig: Rig) -> Answer:
    began = rig.begin("x")
    rig.send(began, [b"m"])
    return crashed(rig, began)


def crashed(rig: Rig, began: Answer) -> Answer:
    rig.__dict__.update(rig.power_cut().__dict__)
    return began


def by_hand(rig: Rig) -> Answer:
    began = prepared(rig)
    rig.commit(began, by_hand=True)
    rig.advance(1)
    return began


def settled(rig: Rig) -> Answer:
    began = prepared(rig)
    rig.commit(began)
    rig.advance(1)
    return began


STATES: dict[str, Callable[[Rig], Answer]] = {
    "open": opened,
    "preparing": then(opened, lambda rig, began: rig.prepare(began, turn=False)),
    "prepared": prepared,
    "committing 1": then(opened, lambda rig, began: rig.commit(began, one_phase=True, turn=False)),
    "committing 2": then(prepared, lambda rig, began: rig.commit(began, turn=False)),
    "applying": applying,
    "committed": unsettled,
    "rolling back 1": then(opened, lambda rig, began: rig.rollback(began, turn=False)),
    "rolling back 2": then(prepared, lambda rig, began: rig.rollback(began, turn=False)),
    "rolled back": then(prepared, lambda rig, began: rig.rollback(began)),
    "hand committed": by_hand,
    "hand rolled b.": then(prepared, lambda rig, began: rig.rollback(began, by_hand=True)),
    "read only": then(lambda rig: rig.begin(), lambda rig, began: rig.prepare(began)),
    "settled": settled,
    "left by a crash": left_by_a_crash,
    "unknown": unknown,
}


def time_over(rig: Rig, began: Answer) -> None:
    rig.clock.advance(61)
    rig.tick()


def session_lost(rig: Rig, began: Answer) -> None:
    rig.handler.session_closed(rig.session)
    rig.turn()


EVENTS: dict[str, Callable[[Rig, Answer], Answer | None]] = {
    "send": lambda rig, began: rig.send(began, [b"n"]),
    "prepare": lambda rig, began: rig.prepare(began),
    "commit 2": lambda rig, began: rig.commit(began),
    "commit 1": lambda rig, began: rig.commit(began, one_phase=True),
    "commit h": lambda rig, began: rig.commit(began, one_phase=True, by_hand=True),
    "rollback": lambda rig, began: rig.rollback(began),
    "rollb. h": lambda rig, began: rig.rollback(began, by_hand=True),
    "forget": lambda rig, began: rig.forget_outcome(began),
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
# What is answered, and after ">" the state that follows where it is another than the one in the second column.
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
    """(state, event, answer, state after it) of every cell."""
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
    rig = Rig()
    began = STATES[state](rig)
    reported = EVENTS[event](rig, began)
    rig.turn()
    if reported is None:
        found = ""
    elif reported.failure is not None:
        found = reported.code
    elif isinstance(reported.result, bool):
        found = "forgotten" if reported.result else "not forgotten"
    else:
        found = "ok" if reported.result is None else str(reported.result.state)
    assert (found, rig.state(began)) == (answer, follows)
    visible = follows in ("committed", "heuristic_committed")
    assert rig.visible() == ([b"m"] if visible else [])


@pytest.mark.parametrize("state", list(STATES))
def test_whatever_a_crash_finds_is_decided_or_in_doubt_or_gone(state: str) -> None:
    """And a second and a third start find the same."""
    for cut in ("power_cut", "kill"):
        rig = Rig()
        began = STATES[state](rig)
        first = getattr(rig, cut)()
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
    rig = Rig()
    with monkeypatch.context() as broken:
        broken.setattr(rig.store, "begin", lambda origin: 1 // 0)
        assert rig.begin("x").code == "internal_error"
    assert rig.begin("x").code == "ok"


def test_a_broker_that_stops_takes_no_more_and_answers_what_it_took() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x", group="shop")
    rig.send(began, [b"m"])
    rig.prepare(began)
    rig.work()
    parked = Answer()
    rig.handler.await_check_back("shop", 60_000, rig.session, parked)
    answer = rig.commit(began, turn=False)
    stopped: list[bool] = []
    rig.handler.stop(lambda: stopped.append(True))
    assert not stopped
    for refused in (
        rig.begin("y"),
        rig.transact([(ORDERS, [b"m"])]),
        rig.commit_group("spark", 1, []),
        rig.rollback(began),
    ):
        assert (refused.code, refused.failure.outcome) == ("busy", NOT_DONE)  # type: ignore[union-attr]
    late = Answer()
    rig.handler.await_check_back("shop", 60_000, rig.session, late)
    assert (parked.result, late.code) == ([], "busy")
    rig.work()
    assert (stopped, answer.state) == ([True], "committed")
    rig.store.close()
    again = rig.again(rig.disk, rig.targets.killed())
    assert again.visible() == [b"m"]
    assert not again.store.transactions, "everything was forced and settled before the end"


def test_a_broker_that_stops_keeps_what_is_prepared() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.stop()
    again = rig.again(rig.disk, rig.targets.killed())
    assert again.state(began) == "prepared"
    assert again.commit(began).state == "committed"


def test_a_session_that_is_lost_after_the_stop_touches_nothing() -> None:
    """The store is closed in a worker by then, which packs what it captured."""
    rig = Rig()
    began = rig.begin("")
    rig.send(began, [b"m"])
    rig.stop()
    rig.handler.session_closed(rig.session)
    assert rig.store.idle
    assert rig.store.transactions[began.epoch].state == "open"


def test_nothing_ends_by_time_while_a_broker_stops() -> None:
    rig = Rig(queued=True)
    member = rig.begin("x", member=CommitGroupMember("spark", 1, "run"))
    rig.send(member, [b"m"])
    rig.prepare(member, ttl_ms=1000)
    rig.work()
    rig.handler.stop(lambda: None)
    rig.advance(100)
    rig.work()
    assert rig.state(member) == "prepared"


def test_a_group_is_asked_about_what_was_prepared_for_long() -> None:
    rig = Rig()
    began = rig.begin("x", group="shop")
    rig.send(began, [b"m"])
    rig.prepare(began)
    answer = Answer()
    rig.handler.await_check_back("shop", 100_000, rig.session, answer)
    rig.advance(59)
    assert answer.code == "waiting"
    rig.advance(2)
    ((check,),) = (answer.result,)
    assert (check.xid, check.epoch, check.topics) == ("x", began.epoch, ["topic16"])
    rig.rollback(began)
    silent = Answer()
    cancel = rig.handler.await_check_back("shop", 1_000_000, rig.session, silent)
    rig.advance(5000)
    cancel()
    assert silent.result == []


def test_a_lost_session_is_not_asked() -> None:
    rig = Rig()
    answer = Answer()
    rig.handler.await_check_back("shop", 100_000, rig.session, answer)
    rig.handler.session_closed(rig.session)
    began = rig.begin("x", group="shop")
    rig.send(began, [b"m"])
    rig.prepare(began)
    rig.advance(200)
    assert answer.code == "waiting"


def test_every_error_of_a_transaction_says_what_it_is_about() -> None:
    rig = Rig()
    began = rig.prepared("order-77")
    sentence = str(rig.send(began, [b"m"]).failure)
    assert "order-77" in sentence
    rig.commit(began)
    failure = rig.rollback(began).failure
    assert isinstance(failure, TransactionError)
    assert failure.details["epoch"] == began.epoch
