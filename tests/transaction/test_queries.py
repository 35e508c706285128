"""What people are shown: pages in the order of epochs, ages, an alarm, and everything about one."""

import pytest

from tests.transaction.desk import BILLS, ORDERS, Desk
from tests.transaction.targets import Row
from tfmq.transaction.queries import TARGETS_DESCRIBED
from tfmq.transaction.requests import CommitGroupMember


def xids(
    desk: Desk, states: list[str] | None = None, after: int = 0, limit: int = 100, group: str = ""
) -> list[str]:
    return [row["xid"] for row in desk.handler.list(states, after, limit, group)[0]]


def test_a_row_says_what_an_operator_needs() -> None:
    desk = Desk()
    began = desk.begin("order-1", group="shop")
    desk.advance(5)
    desk.send(began, [b"1", b"2"], ORDERS)
    desk.send(began, [b"3"], BILLS)
    desk.prepare(began)
    desk.advance(100)
    ((row,), more, _) = desk.handler.list(None, 0, 10)
    assert not more
    assert row["age_seconds"] == 100
    assert row["prepared_ms"] - row["began_ms"] == 5000
    wanted = {
        "xid": "order-1",
        "epoch": began.epoch,
        "state": "prepared",
        "group": "shop",
        "owner": "shop@127.0.0.1:5000",
        "messages": 3,
        "bytes": 63,
        "topics": ["topic16", "topic17"],
        "expires_ms": 0,
        "commit_group": "",
    }
    assert {key: row[key] for key in wanted} == wanted


def test_only_those_that_need_an_operator_are_listed_unless_others_are_named() -> None:
    desk = Desk()
    desk.begin("open")
    prepared, by_hand, undone = desk.prepared("prepared"), desk.prepared("by hand"), desk.prepared("undone")
    applying = desk.prepared("applying", key=BILLS)
    desk.commit(desk.prepared("committed"))
    desk.commit(by_hand, by_hand=True)
    desk.rollback(undone, by_hand=True)
    desk.targets.stop(BILLS)
    desk.commit(applying)
    assert desk.state(prepared) == "prepared"
    assert xids(desk) == ["prepared", "by hand", "undone", "applying"]
    assert xids(desk, ["open"]) == ["open"]
    assert xids(desk, ["applying", "heuristic_committed"]) == ["by hand", "applying"]


def test_one_on_its_way_from_prepared_is_still_listed() -> None:
    desk = Desk()
    began = desk.prepared("x")
    desk.commit(began, turn=False)
    assert xids(desk) == ["x"]
    opened = desk.begin("y", turn=False)
    desk.send(opened, [b"m"], turn=False)
    desk.turn()
    desk.commit(opened, one_phase=True, turn=False)
    assert "y" not in xids(desk)


def test_pages_go_by_epoch_and_say_whether_there_is_more() -> None:
    desk = Desk()
    for number in range(7):
        desk.prepared(f"x{number}")
    seen, after, more, pages = [], 0, True, 0
    while more:
        rows, more, _ = desk.handler.list(None, after, 3)
        seen += [row["xid"] for row in rows]
        after = rows[-1]["epoch"]
        pages += 1
    assert (seen, pages) == ([f"x{number}" for number in range(7)], 3)


def test_rows_can_be_those_of_one_producer_group() -> None:
    desk = Desk()
    desk.prepared("a", group="shop")
    desk.prepared("b", group="bank")
    assert xids(desk, group="bank") == ["b"]


def test_a_row_names_few_topics_and_a_description_many() -> None:
    desk = Desk()
    began = desk.begin("x")
    for number in range(20):
        desk.send(began, [b"m"], (16 + number) << 24)
    assert len(desk.handler.list(["open"], 0, 10)[0][0]["topics"]) == 8
    assert len(desk.handler.describe("x", 0)["topics"]) == 20


def test_a_description_has_more_and_knows_what_is_over() -> None:
    desk = Desk()
    began = desk.begin("x", member=CommitGroupMember("spark", 3, "run"))
    desk.prepare(began, [Row("g", 1, 5)], ttl_ms=60_000)
    found = desk.handler.describe("x", began.epoch)
    assert (found["offset_groups"], found["commit_group"], found["sequence"], found["run"]) == (
        ["g"],
        "spark",
        3,
        "run",
    )
    assert desk.handler.describe("x", 0) == found
    desk.rollback(began)
    again = desk.begin("x")
    assert desk.handler.describe("x", began.epoch)["state"] == "rolled_back"
    assert desk.handler.describe("x", 0)["epoch"] == again.epoch
    assert desk.handler.describe("nobody", 0) == {"xid": "nobody", "epoch": 0, "state": "unknown"}
    assert desk.handler.describe("x", again.epoch + 1)["state"] == "unknown"


def test_a_description_names_the_targets_that_it_waits_for_up_to_a_bound() -> None:
    desk = Desk()
    began = desk.begin("x")
    for number in range(TARGETS_DESCRIBED + 5):
        desk.send(began, [b"m"], ORDERS + number)
    desk.prepare(began)
    for number in range(TARGETS_DESCRIBED + 5):
        desk.targets.stop(ORDERS + number, "its disk failed")
    desk.commit(began)
    waits = desk.handler.describe("x", 0)["waits_for"]
    assert len(waits) == TARGETS_DESCRIBED
    assert "disk failed" in next(iter(waits.values()))


def test_a_description_says_who_was_asked() -> None:
    desk = Desk()
    began = desk.prepared("x", group="shop")
    desk.advance(61)
    desk.handler.await_check_back("shop", 1000, desk.session, lambda result, error: None)
    found = desk.handler.describe("x", began.epoch)
    assert (found["asked"], found["asked_last"]) == (1, "shop@127.0.0.1:5000")


def test_status_counts_and_raises_the_alarm_by_age() -> None:
    desk = Desk(settings={"alarm_seconds": 100})
    assert desk.handler.status()["oldest_prepared_seconds"] == 0
    desk.begin("open")
    first = desk.prepared("a")
    desk.advance(50)
    second = desk.prepared("b")
    desk.commit(desk.prepared("c"), by_hand=True)
    desk.advance(50)
    status = desk.handler.status()
    assert (status["prepared"], status["heuristic"], status["oldest_prepared_seconds"]) == (2, 1, 100)
    assert status["alarm"] is False
    desk.advance(1)
    assert desk.handler.status()["alarm"] is True
    desk.commit(first)
    assert desk.handler.status()["alarm"] is False
    desk.rollback(second)
    assert desk.handler.status()["prepared"] == 0
    assert desk.handler.status()["journal"] == "open"


def test_status_and_ages_survive_a_start() -> None:
    desk = Desk(settings={"alarm_seconds": 100})
    desk.prepared("a")
    desk.advance(200)
    status = desk.power_cut().handler.status()
    assert (status["prepared"], status["oldest_prepared_seconds"], status["alarm"]) == (1, 200, True)


def test_a_stopped_journal_is_named() -> None:
    desk = Desk()
    desk.disk.faults.fail("force", times=None)
    desk.transact([(ORDERS, [b"m"])])
    assert "fsync failed" in desk.handler.status()["journal"]


def test_a_state_that_a_power_cut_could_take_back_is_called_what_is_under_way() -> None:
    desk = Desk()
    prepared, decided = desk.prepared("p"), desk.prepared("c")
    dropped, by_hand, undone = desk.prepared("d"), desk.prepared("h"), desk.prepared("u")
    opened = desk.begin("x")
    desk.send(opened, [b"m"])
    desk.queued = True
    desk.prepare(opened)
    desk.commit(decided)
    desk.rollback(dropped)
    desk.commit(by_hand, by_hand=True)
    desk.rollback(undone, by_hand=True)
    unsure = [desk.state(each) for each in (prepared, opened, decided, dropped, by_hand, undone)]
    assert unsure == ["prepared", "preparing", "committing", "rolling_back", "committing", "rolling_back"]
    cut = desk.again(desk.disk.crash(keep="nothing"), desk.targets.power_cut())
    assert cut.handler.describe("d", 0)["state"] == "prepared"
    desk.work()
    sure = [desk.state(each) for each in (prepared, opened, decided, dropped, by_hand, undone)]
    assert sure == [
        "prepared", "prepared", "committed", "rolled_back", "heuristic_committed", "heuristic_rolled_back",
    ]  # fmt: skip


def test_a_page_looks_at_a_bounded_number_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that fits nothing must not walk all of a million in one request."""
    monkeypatch.setattr("tfmq.transaction.queries.SCANNED_MAX", 4)
    desk = Desk()
    began = [desk.begin(f"x{number}") for number in range(10)]
    desk.prepared("wanted")
    pages = []
    after, more = 0, True
    while more:
        found, more, after = desk.handler.list(["prepared"], after, 10)
        pages.append([row["xid"] for row in found])
    assert pages == [[], [], ["wanted"]]
    assert desk.handler.list(["prepared"], 0, 10)[1:] == (True, began[3].epoch)
