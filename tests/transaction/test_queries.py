"""What people are shown: pages in the order of epochs, ages, an alarm, and everything about one."""

import pytest

from tests.transaction.rig import BILLS, ORDERS, Rig
from tests.transaction.targets import Row
from tfmq.transaction.queries import TARGETS_DESCRIBED
from tfmq.transaction.requests import CommitGroupMember


def xids(rig: Rig, states: list[str] | None = None, after: int = 0, limit: int = 100, group: str = "") -> list[str]:
    return [row["xid"] for row in rig.handler.list(states, after, limit, group)[0]]


def test_a_row_says_what_an_operator_needs() -> None:
    rig = Rig()
    began = rig.begin("order-1", group="shop")
    rig.advance(5)
    rig.send(began, [b"1", b"2"], ORDERS)
    rig.send(began, [b"3"], BILLS)
    rig.prepare(began)
    rig.advance(100)
    ((row,), more, _) = rig.handler.list(None, 0, 10)
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
    rig = Rig()
    rig.begin("open")
    prepared, by_hand, undone = rig.prepared("prepared"), rig.prepared("by hand"), rig.prepared("undone")
    applying = rig.prepared("applying", key=BILLS)
    rig.commit(rig.prepared("committed"))
    rig.commit(by_hand, by_hand=True)
    rig.rollback(undone, by_hand=True)
    rig.targets.stop(BILLS)
    rig.commit(applying)
    assert rig.state(prepared) == "prepared"
    assert xids(rig) == ["prepared", "by hand", "undone", "applying"]
    assert xids(rig, ["open"]) == ["open"]
    assert xids(rig, ["applying", "heuristic_committed"]) == ["by hand", "applying"]


def test_one_on_its_way_from_prepared_is_still_listed() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.commit(began, turn=False)
    assert xids(rig) == ["x"]
    opened = rig.begin("y", turn=False)
    rig.send(opened, [b"m"], turn=False)
    rig.turn()
    rig.commit(opened, one_phase=True, turn=False)
    assert "y" not in xids(rig)


def test_pages_go_by_epoch_and_say_whether_there_is_more() -> None:
    rig = Rig()
    for number in range(7):
        rig.prepared(f"x{number}")
    seen, after, more, pages = [], 0, True, 0
    while more:
        rows, more, _ = rig.handler.list(None, after, 3)
        seen += [row["xid"] for row in rows]
        after = rows[-1]["epoch"]
        pages += 1
    assert (seen, pages) == ([f"x{number}" for number in range(7)], 3)


def test_rows_can_be_those_of_one_producer_group() -> None:
    rig = Rig()
    rig.prepared("a", group="shop")
    rig.prepared("b", group="bank")
    assert xids(rig, group="bank") == ["b"]


def test_a_row_names_few_topics_and_a_description_many() -> None:
    rig = Rig()
    began = rig.begin("x")
    for number in range(20):
        rig.send(began, [b"m"], (16 + number) << 24)
    assert len(rig.handler.list(["open"], 0, 10)[0][0]["topics"]) == 8
    assert len(rig.handler.describe("x", 0)["topics"]) == 20


def test_a_description_has_more_and_knows_what_is_over() -> None:
    rig = Rig()
    began = rig.begin("x", member=CommitGroupMember("spark", 3, "run"))
    rig.prepare(began, [Row("g", 1, 5)], ttl_ms=60_000)
    found = rig.handler.describe("x", began.epoch)
    assert (found["offset_groups"], found["commit_group"], found["sequence"], found["run"]) == (
        ["g"],
        "spark",
        3,
        "run",
    )
    assert rig.handler.describe("x", 0) == found
    rig.rollback(began)
    again = rig.begin("x")
    assert rig.handler.describe("x", began.epoch)["state"] == "rolled_back"
    assert rig.handler.describe("x", 0)["epoch"] == again.epoch
    assert rig.handler.describe("nobody", 0) == {"xid": "nobody", "epoch": 0, "state": "unknown"}
    assert rig.handler.describe("x", again.epoch + 1)["state"] == "unknown"


def test_a_description_names_the_targets_that_it_waits_for_up_to_a_bound() -> None:
    rig = Rig()
    began = rig.begin("x")
    for number in range(TARGETS_DESCRIBED + 5):
        rig.send(began, [b"m"], ORDERS + number)
    rig.prepare(began)
    for number in range(TARGETS_DESCRIBED + 5):
        rig.targets.stop(ORDERS + number, "its disk failed")
    rig.commit(began)
    waits = rig.handler.describe("x", 0)["waits_for"]
    assert len(waits) == TARGETS_DESCRIBED
    assert "disk failed" in next(iter(waits.values()))


def test_a_description_says_who_was_asked() -> None:
    rig = Rig()
    began = rig.prepared("x", group="shop")
    rig.advance(61)
    rig.handler.await_check_back("shop", 1000, rig.session, lambda result, error: None)
    found = rig.handler.describe("x", began.epoch)
    assert (found["asked"], found["asked_last"]) == (1, "shop@127.0.0.1:5000")


def test_status_counts_and_raises_the_alarm_by_age() -> None:
    rig = Rig(settings={"alarm_seconds": 100})
    assert rig.handler.status()["oldest_prepared_seconds"] == 0
    rig.begin("open")
    first = rig.prepared("a")
    rig.advance(50)
    second = rig.prepared("b")
    rig.commit(rig.prepared("c"), by_hand=True)
    rig.advance(50)
    status = rig.handler.status()
    assert (status["prepared"], status["heuristic"], status["oldest_prepared_seconds"]) == (2, 1, 100)
    assert status["alarm"] is False
    rig.advance(1)
    assert rig.handler.status()["alarm"] is True
    rig.commit(first)
    assert rig.handler.status()["alarm"] is False
    rig.rollback(second)
    assert rig.handler.status()["prepared"] == 0
    assert rig.handler.status()["journal"] == "open"


def test_status_has_the_age_of_the_open_transaction_that_began_first() -> None:
    rig = Rig()
    assert rig.handler.status()["oldest_open_seconds"] == 0
    rig.prepared("a")
    rig.advance(10)
    first, _ = rig.begin("b"), rig.begin("c")
    rig.advance(5)
    rig.begin("d")
    rig.advance(2)
    assert rig.handler.status()["oldest_open_seconds"] == 7
    rig.rollback(first)
    assert rig.handler.status()["oldest_open_seconds"] == 7, "that of c"
    rig.advance(1_000)
    status = rig.handler.status()
    assert (status["open"], status["oldest_open_seconds"]) == (0, 0), "their timeouts have ended"


def test_status_and_ages_survive_a_start() -> None:
    rig = Rig(settings={"alarm_seconds": 100})
    rig.prepared("a")
    rig.advance(200)
    status = rig.power_cut().handler.status()
    assert (status["prepared"], status["oldest_prepared_seconds"], status["alarm"]) == (1, 200, True)


def test_a_stopped_journal_is_named() -> None:
    rig = Rig()
    rig.disk.faults.fail("force", times=None)
    rig.transact([(ORDERS, [b"m"])])
    assert "fsync failed" in rig.handler.status()["journal"]


def test_a_state_that_a_power_cut_could_take_back_is_called_what_is_under_way() -> None:
    rig = Rig()
    prepared, decided = rig.prepared("p"), rig.prepared("c")
    dropped, by_hand, undone = rig.prepared("d"), rig.prepared("h"), rig.prepared("u")
    opened = rig.begin("x")
    rig.send(opened, [b"m"])
    rig.queued = True
    rig.prepare(opened)
    rig.commit(decided)
    rig.rollback(dropped)
    rig.commit(by_hand, by_hand=True)
    rig.rollback(undone, by_hand=True)
    unsure = [rig.state(each) for each in (prepared, opened, decided, dropped, by_hand, undone)]
    assert unsure == ["prepared", "preparing", "committing", "rolling_back", "committing", "rolling_back"]
    cut = rig.again(rig.disk.crash(keep="nothing"), rig.targets.power_cut())
    assert cut.handler.describe("d", 0)["state"] == "prepared"
    rig.work()
    sure = [rig.state(each) for each in (prepared, opened, decided, dropped, by_hand, undone)]
    assert sure == [
        "prepared", "prepared", "committed", "rolled_back", "heuristic_committed", "heuristic_rolled_back",
    ]  # fmt: skip


def test_a_page_looks_at_a_bounded_number_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that fits nothing must not walk all of a million in one request."""
    monkeypatch.setattr("tfmq.transaction.queries.SCANNED_MAX", 4)
    rig = Rig()
    began = [rig.begin(f"x{number}") for number in range(10)]
    rig.prepared("wanted")
    pages = []
    after, more = 0, True
    while more:
        found, more, after = rig.handler.list(["prepared"], after, 10)
        pages.append([row["xid"] for row in found])
    assert pages == [[], [], ["wanted"]]
    assert rig.handler.list(["prepared"], 0, 10)[1:] == (True, began[3].epoch)
