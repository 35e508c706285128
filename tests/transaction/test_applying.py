"""From the decision to its targets: all of it, exactly once, told in time, and in small turns."""

import logging

import pytest

from tests.transaction.desk import BILLS, FOLDER, ORDERS, Desk
from tfmq.transaction.applier import LATE_SECONDS, RETRY_SECONDS_MAX, TURN_BYTES


def test_a_commit_is_answered_when_every_target_has_its_part() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"o"], ORDERS)
    desk.send(began, [b"b"], BILLS)
    answer = desk.commit(began, one_phase=True)
    assert (answer.state, desk.visible(), desk.visible(BILLS)) == ("committed", [b"o"], [b"b"])


def test_one_target_that_takes_nothing_makes_the_answer_applying_at_once() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"o"], ORDERS)
    desk.send(began, [b"b"], BILLS)
    desk.prepare(began)
    desk.targets.stop(BILLS)
    answer = desk.commit(began)
    assert answer.state == "applying"
    assert desk.visible() == [b"o"], "the other has its part"
    assert desk.state(began) == "applying"
    assert desk.handler.describe("x", 0)["waits_for"].keys() == {"topic17-0"}


def test_a_decision_that_comes_behind_one_that_waits_is_answered_as_applying() -> None:
    desk = Desk()
    first, second = desk.prepared("x"), desk.prepared("y")
    desk.targets.stop(ORDERS)
    desk.commit(first)
    assert desk.commit(second).state == "applying"


def test_who_has_waited_for_ten_seconds_is_told_that_it_is_being_applied() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    for number in range(3):
        desk.send(began, [b"%d" % number * 1_000_000])
    answer = desk.commit(began, one_phase=True)
    desk.step()
    desk.advance(LATE_SECONDS - 0.1)
    assert answer.code == "waiting", "a worker reads it, and is slow"
    desk.advance(0.2)
    assert answer.state == "applying"
    assert desk.commit(began).state == "applying"
    desk.work()
    assert desk.commit(began).state == "committed"


def test_many_small_decisions_are_brought_over_several_turns() -> None:
    """So that a pile of them does not keep the broker from everything else."""
    desk = Desk()
    count = 3 * TURN_BYTES // 500_000
    answers = [
        desk.transact([(ORDERS + number % 7, [b"x" * 500_000])], turn=False) for number in range(count)
    ]
    desk.turn()
    done = sum(answer.code == "ok" for answer in answers)
    assert 0 < done < count
    assert not desk.handler.due, "it waits for the next turn, and lets this one end"
    desk.tick()
    assert done < sum(answer.code == "ok" for answer in answers) < count
    desk.tick()
    desk.tick()
    assert {answer.state for answer in answers} == {"committed"}


def test_damage_of_the_journal_is_told_and_holds_up_what_is_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    first, second = desk.prepared("x", [b"damaged" * 50]), desk.prepared("y", [b"behind"])
    path = f"{FOLDER}/0000000000000001.journal"
    desk.disk.damage(path, desk.disk.read_file(path).index(b"damageddamaged"), b"DAMAGED")
    with caplog.at_level(logging.ERROR, "tfmq.transaction"):
        refused = desk.commit(first)
        assert refused.code == "damaged" and "the transaction journal is damaged" in str(refused.failure)
        assert "0000000000000001.journal" in str(refused.failure) and "`tfmq log repair`" in str(
            refused.failure
        )
        assert desk.commit(second).state == "applying"
        desk.advance(10 * RETRY_SECONDS_MAX)
    assert desk.visible() == [], "nothing is brought that is not what was sent, and nothing before it"
    assert len(caplog.records) == 1
    assert "0000000000000001.journal" in caplog.text
    assert desk.transact([(BILLS, [b"b"])]).state == "committed", "other targets go on"
    assert desk.handler.status()["waits_for"] == ["topic16-0"]
    rows = desk.handler.list(None, 0, 10)[0]
    assert ["the transaction journal is damaged" in row["damage"] for row in rows] == [True, False]
    assert "the transaction journal is damaged" in desk.handler.describe("y", 0)["waits_for"]["topic16-0"]
    assert desk.commit(first).code == "damaged", "the same to who asks again"


def test_offsets_are_told_only_where_they_are_on_the_disk() -> None:
    desk = Desk()
    answer = desk.transact([(ORDERS, [b"1"]), (BILLS, [b"2"]), (ORDERS, [b"3"])])
    assert answer.offsets == [-1, -1, -1]
    desk.targets.is_durable = lambda mark: mark.key == ORDERS  # type: ignore[method-assign]
    answer = desk.transact([(ORDERS, [b"1"]), (BILLS, [b"2"]), (ORDERS, [b"3"])])
    assert answer.offsets[1] == -1
    assert 0 < answer.offsets[0] < answer.offsets[2]


def test_it_is_idle_when_all_is_brought_or_waits_for_a_target() -> None:
    desk = Desk()
    applier = desk.handler._applier
    assert applier.idle
    began = desk.prepared("x")
    desk.targets.stop(ORDERS)
    desk.commit(began)
    assert applier.idle
    desk.handler.target_resumed(ORDERS)
    assert not applier.idle


def test_a_start_brings_what_was_decided_before_anything_is_asked() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"1", b"2"])
    desk.targets.stop(ORDERS)
    desk.commit(began)
    again = desk.kill()
    assert again.recovered
    assert again.visible() == [b"1", b"2"]
    assert again.state(began) == "committed"


def test_a_start_does_not_wait_for_a_target_that_takes_nothing() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"1"])
    desk.targets.stop(ORDERS)
    desk.commit(began)
    left = desk.targets.killed()
    left.stop(ORDERS)
    again = desk.again(desk.disk.crash(keep="everything"), left)
    assert again.recovered
    assert again.state(began) == "applying"
    left.resume(ORDERS)
    again.handler.target_resumed(ORDERS)
    again.turn()
    assert again.visible() == [b"1"]


def test_stopping_brings_what_is_small_and_forces_it() -> None:
    desk = Desk()
    desk.targets.automatic = False
    answer = desk.transact([(ORDERS, [b"1"])], turn=False)
    desk.handler.stop(lambda: None)
    desk.turn()
    assert answer.state == "committed"
    assert ("force", ORDERS) in desk.targets.asked


def test_stopping_breaks_off_what_is_large_and_the_next_start_goes_on() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    for number in range(8):
        desk.send(began, [b"%d" % number + b"x" * 1_000_000])
    answer = desk.commit(began, one_phase=True)
    while not desk.visible():
        desk.step()
    desk.stop()
    assert answer.state == "applying"
    assert 0 < len(desk.visible()) < 8
    again = desk.again(desk.disk, desk.targets.killed())
    assert [payload[:1] for payload in again.visible()] == [b"%d" % number for number in range(8)]


def test_a_target_that_stopped_before_its_force_is_told_until_it_is_back() -> None:
    desk = Desk()
    desk.targets.automatic = False
    began = desk.begin("x")
    desk.send(began, [b"o"], ORDERS)
    desk.send(began, [b"b"], BILLS)
    assert desk.commit(began, one_phase=True).state == "committed"
    desk.advance(1)
    desk.targets.force(ORDERS)
    desk.targets.fail_force(BILLS)
    assert desk.commit(began).state == "applying"
    assert [row["state"] for row in desk.handler.list(None, 0, 10)[0]] == ["applying"]
    assert (desk.handler.status()["applying"], desk.handler.status()["waits_for"]) == (1, ["topic17-0"])
    assert desk.handler.describe("x", 0)["waits_for"].keys() == {"topic17-0"}
    desk.targets.resume(BILLS, keep=0)
    desk.targets.target(BILLS).full = True
    desk.handler.target_resumed(BILLS)
    desk.turn()
    assert desk.commit(began).state == "applying", "it lost its part, and cannot take it again yet"
    assert desk.handler.status()["applying"] == 1
    desk.targets.target(BILLS).full = False
    desk.advance(60)
    assert desk.visible(BILLS) == [b"b"]
    desk.targets.force()
    desk.advance(1)
    assert desk.handler.list(None, 0, 10)[0] == []
    assert desk.handler.status()["applying"] == 0


def test_a_topic_that_goes_after_its_force_failed_lets_go() -> None:
    desk = Desk()
    desk.targets.automatic = False
    desk.transact([(ORDERS, [b"o"])])
    desk.advance(1)
    desk.targets.fail_force(ORDERS)
    assert desk.handler.status()["applying"] == 1
    desk.targets.delete(16)
    desk.handler.topic_deleted(16)
    desk.advance(1)
    assert desk.handler.status()["applying"] == 0
    assert not desk.store.transactions
