"""`Desk`: what an operator does with dead letters, without a broker wherever the store needs none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import paths
from tests.dead_letters.helpers import NOW, Time
from tests.dead_letters.test_redrive import fill
from tests.dead_letters.test_store import keeping
from tfmq.dead_letters.admin import RETRY_CALLS, Desk, default_stores
from tfmq.dead_letters.model import DEAD, DROPPED, HANDLED, PAGE_LETTERS, REDRIVING, WAITING, Selection
from tfmq.dead_letters.redrive import Report, Wish
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.dead_letters.store import StoreAddress, default_path
from tfmq.errors import BadRequest, ConnectionFailed, TfmqError, TimedOut
from tfmq.testing.broker import SimulatedBroker

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with three dead letters and one that waits."""
    path = tmp_path / "dead.db"
    store = BlockingSqlStore(StoreAddress("path", str(path)))
    store.apply([keeping(0), keeping(1), keeping(2), keeping(3, next_ms=10**15)])
    store.close()
    return path


@pytest.fixture
def desk(path: Path) -> Iterator[Desk]:
    with Desk(path, NOWHERE, wall_clock=Time()) as made:
        yield made


def states(desk: Desk) -> dict[int, str]:
    return {each.ordinal: each.state for each in desk.letters()}


def test_looking_and_changing_need_no_broker(desk: Desk) -> None:
    ids = [each.id for each in desk.letters(Selection(states=(DEAD,)))]
    assert len(ids) == 3
    letter = desk.get(ids[0])
    assert letter is not None and letter.body is not None
    assert [each is not None for each in desk.retry(ids[:1])] == [True]
    assert [each is not None for each in desk.drop(ids[1:2])] == [True]
    assert sorted(states(desk).values()) == sorted([WAITING, DROPPED, DEAD, WAITING])
    retried = desk.get(ids[0])
    assert retried is not None and (retried.next_ms, retried.calls_left) == (round(NOW * 1000), RETRY_CALLS)
    assert desk.counts() == {("billing", WAITING): 2, ("billing", DEAD): 1, ("billing", DROPPED): 1}


def test_by_force_one_is_handled_by_consumers_of_the_broker_that_is_named(path: Path) -> None:
    with SimulatedBroker() as broker, Desk(path, broker.servers) as desk:
        (first, second, *_) = [each.id for each in desk.letters(Selection(states=(DEAD,)))]
        desk.retry([first])
        desk.retry([second], force=True)
        found = {each.id: (each.state, each.broker) for each in desk.letters()}
        assert found[first] == (WAITING, "") and found[second][0] == WAITING
        assert found[second][1] == desk.redrive(Wish(dry=True)).broker != ""


def test_what_cannot_be_done_is_reported_for_each(desk: Desk) -> None:
    ids = [each.id for each in desk.letters()]
    desk.drop(ids[:1])
    assert desk.drop([ids[0], "0" * 16]) == [None, None]
    assert desk.retry(ids[:1])[0] is not None


def test_an_id_is_found_by_its_beginning(desk: Desk) -> None:
    (first, *_) = desk.letters()
    assert [each.id for each in desk.starting_with(first.id[:10])] == [first.id]
    assert desk.starting_with("zz") == []
    assert len(desk.starting_with("")) == 2


@pytest.mark.long
def test_pages_are_nothing_that_one_sees(tmp_path: Path) -> None:
    store = BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    steps = [keeping(number) for number in range(PAGE_LETTERS + 3)]
    store.apply(steps[:PAGE_LETTERS])
    store.apply(steps[PAGE_LETTERS:])
    with Desk(tmp_path / "dead.db", wall_clock=Time()) as desk:
        assert len(list(desk.letters())) == len(steps)
        assert None not in desk.drop([id for id, _ in steps])
        assert list(desk.letters(Selection(states=(DEAD,)))) == []


def test_a_store_that_is_not_there_is_reported_and_not_made(tmp_path: Path) -> None:
    with Desk(tmp_path / "none.db") as desk, pytest.raises(TfmqError, match="no dead letters at"):
        desk.check()
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(BadRequest):
        Desk("nosuch://x")


@pytest.mark.usefixtures("impatient_clients")
def test_sending_needs_a_broker_and_leaves_all_as_it_was(desk: Desk) -> None:
    with pytest.raises(ConnectionFailed):
        desk.redrive(Wish())
    assert states(desk) == {0: DEAD, 1: DEAD, 2: DEAD, 3: WAITING}


def test_the_progress_of_a_redrive_is_reported(tmp_path: Path) -> None:
    with SimulatedBroker() as broker:
        fill(broker, tmp_path / "dead.db", 6)
        reported: list[int] = []
        with Desk(tmp_path / "dead.db", broker.servers) as desk:
            report = desk.redrive(Wish(rate=20.0, limit=4), reported.append)
            assert (report.sent, reported) == (4, [2, 2])
            broker.fail_next("send", TimedOut, times=10_000)
            report = Report()
            with pytest.raises(TimedOut):
                desk.redrive(Wish(), report=report)
            assert report.sent == 0
            assert list(states(desk).values()).count(REDRIVING) == 2
            broker._faults._planned.clear()
            assert desk.redrive(Wish()).resumed == 2
        assert len(broker.sent("orders")) == 12


def test_a_topic_is_a_store_like_others(tmp_path: Path) -> None:
    with SimulatedBroker() as broker:
        with Desk("topic:dead", broker.servers) as desk:
            assert not desk.is_there()
        texts = fill(broker, "dead", 3)
        with Desk("topic:dead", broker.servers) as desk:
            desk.check()
            first, second, _ = found = list(desk.letters(whole=True))
            assert sorted(each.message().text for each in found) == texts, "kept in one ms: ordered by their ids"
            assert desk.drop([first.id]) != [None] and desk.retry([second.id]) != [None]
            assert desk.redrive(Wish()).sent == 1
            assert HANDLED not in states(desk).values()
        broker.stop()
        with Desk("topic:dead", broker.servers) as desk, pytest.raises(ConnectionFailed):
            list(desk.letters())


def test_the_stores_of_consumers_without_a_configured_one_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_stores() == []
    for group in ("shipping", "billing"):
        BlockingSqlStore(StoreAddress("path", default_path(group))).apply([keeping(1, group=group)])
    assert default_stores() == [default_path("billing"), default_path("shipping")]
    BlockingSqlStore(StoreAddress("path", default_path("billing", broker="0b1c"))).apply([keeping(2)])
    assert sorted(default_stores("billing")) == sorted(
        [default_path("billing"), default_path("billing", broker="0b1c")]
    )
    for pattern in ("*", "/billing", "**x", "[b]illing", "../billing"):
        assert default_stores(pattern) == [], "a group's name is no pattern of files"


def test_the_program_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (paths.ROOT / "docs" / "dead-letters.md").read_text()
    program = page.split("## From a program\n```python\n")[1].split("```")[0]
    path = str(tmp_path / "dead.db")
    with SimulatedBroker() as broker:
        texts = fill(broker, Path(path), 3)
        words = program.replace("/var/lib/billing/dead.db", path).replace('"Timeout"', '"no such"')
        names: dict[str, object] = {"servers": broker.servers}
        exec(words, names)
        printed = capsys.readouterr().out
        assert all(text in printed for text in texts) and printed.count("Traceback") == 3
        assert getattr(names["report"], "sent", 0) == 3
