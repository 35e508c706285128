"""What the ancestor of this broker got wrong, and what its checklist asks, each as a scenario: see the names.

Crashes are real here: a new broker starts on what the simulated disk and the targets have, at every boundary.
"""

import errno
from collections.abc import Callable

import pytest

from tests.transaction.rig import BILLS, FOLDER, ORDERS, Answer, Rig
from tests.transaction.targets import Targets
from tfmq.transaction.requests import TransactRequest


class Probe:
    """Tries, at every change of the disk and before everything that becomes visible, what a crash would leave."""

    def __init__(self, rig: Rig, check: Callable[[Rig, str], None]) -> None:
        self.rig, self.check = rig, check
        self.busy = False
        self.count = 0
        rig.disk.after = lambda kind, path: self.probe(f"behind {kind} of {path}")
        rig.targets.before_append = lambda: self.probe("before something becomes visible")

    def probe(self, where: str) -> None:
        if self.busy:
            return
        self.busy = True
        self.count += 1
        for keep in ("nothing", "everything"):
            targets = self.rig.targets.killed()
            self.check(self.rig.again(self.rig.disk.crash(keep=keep), targets), f"{where}, {keep} kept")
        self.busy = False

    def end(self) -> None:
        self.rig.disk.after = None
        self.rig.targets.before_append = lambda: None
        assert self.count > 2, "the probe saw nothing"


def all_or_nothing(began: Answer, payloads: dict[int, list[bytes]]) -> Callable[[Rig, str], None]:
    """The transaction is prepared or unknown and invisible, or committed and everywhere, once."""

    def check(rig: Rig, where: str) -> None:
        state = rig.state(began)
        there = {key: rig.visible(key) for key in payloads}
        wanted = payloads if state == "committed" else {key: [] for key in payloads}
        assert there == wanted, f"{state} {where}"

    return check


@pytest.mark.parametrize("one_phase", [True, False])
def test_hazard_01_item_16_item_35_nothing_is_visible_before_the_decision_is_on_the_disk(one_phase: bool) -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"1", b"2"], ORDERS)
    rig.send(began, [b"3"], BILLS)
    probe = Probe(rig, all_or_nothing(began, {ORDERS: [b"1", b"2"], BILLS: [b"3"]}))
    if not one_phase:
        rig.prepare(began)
    assert rig.commit(began, one_phase=one_phase).state == "committed"
    rig.advance(2)
    probe.end()
    assert rig.visible() == [b"1", b"2"]


def test_hazard_01_a_whole_transaction_is_not_visible_before_its_record_either() -> None:
    rig = Rig()
    seen: list[str] = []

    def check(after: Rig, where: str) -> None:
        there = (after.visible(), after.visible(BILLS))
        assert there in (([], []), ([b"1"], [b"2"])), where
        seen.append("all" if there[0] else "nothing")

    probe = Probe(rig, check)
    rig.transact([(ORDERS, [b"1"]), (BILLS, [b"2"])])
    probe.end()
    assert set(seen) == {"all", "nothing"}


@pytest.mark.parametrize("trouble", ["stopped", "full"])
def test_hazard_02_an_append_that_fails_is_not_called_done_and_is_done_later(trouble: str) -> None:
    rig = Rig()
    began = rig.prepared("x")
    target = rig.targets.target(ORDERS)
    target.stopped, target.full = ("its disk failed" if trouble == "stopped" else None), trouble == "full"
    assert rig.commit(began).state == "applying"
    assert rig.state(began) == "applying"
    left = rig.targets.killed()
    for again in (rig.again(rig.disk.crash(keep="nothing"), left), rig):
        if again is rig:
            rig.targets.resume(ORDERS)
            rig.targets.target(ORDERS).full = False
            rig.handler.target_resumed(ORDERS)
            rig.turn()
        assert (again.state(began), again.visible()) == ("committed", [b"m"])


def test_hazard_03_item_34_an_answer_means_that_the_record_is_on_the_disk_and_the_messages_are_written() -> None:
    """Also where many share one force: every answer is held against what a power cut would leave at that moment."""
    rig = Rig()
    reported: list[int] = []

    def transact(number: int) -> None:
        request = rig.stream()
        pieces = [request.piece(ORDERS + number % 3, [b"%d" % number])]

        def done(result: object, error: BaseException | None) -> None:
            assert error is None
            assert b"%d" % number in rig.visible(ORDERS + number % 3)
            again = rig.again(rig.disk.crash(keep="nothing"), Targets())
            assert b"%d" % number in again.visible(ORDERS + number % 3)
            reported.append(number)

        rig.handler.transact(TransactRequest(request.id, 1, pieces), rig.session, done)

    for number in range(12):
        transact(number)
    rig.turn()
    assert sorted(reported) == list(range(12))


def test_hazard_06_the_journal_keeps_what_the_partitions_have_not_fsynced() -> None:
    """Files roll and checkpoints pass; then the power goes, and the partitions have nothing of it."""
    rig = Rig(settings={"journal_file_bytes": 1 << 16})
    rig.targets.automatic = False
    payloads = [b"%03d" % number + b"x" * 20_000 for number in range(40)]
    for payload in payloads:
        assert rig.transact([(ORDERS, [payload])]).state == "committed"
        rig.advance(1.1)
    assert len([name for name in rig.disk.list(FOLDER) if name.endswith(".journal")]) > 5
    rig.store._journal.checkpoint()()
    rig.store._journal.checkpoint_done(None)
    again = rig.power_cut()
    assert again.visible() == payloads


def test_item_25_the_journal_lets_go_of_what_the_partitions_have_fsynced() -> None:
    rig = Rig(settings={"journal_file_bytes": 1 << 16})
    for number in range(60):
        rig.transact([(ORDERS, [b"%03d" % number + b"x" * 20_000])])
        rig.advance(1.1)
    for _ in range(2):
        rig.store._journal.checkpoint()()
        rig.store._journal.checkpoint_done(None)
    assert rig.handler.status()["journal_bytes"] < 20 * 20_000


@pytest.mark.parametrize("what", ["topic", "partition", "retention"])
def test_hazard_13_item_37_what_is_gone_drops_its_own_messages_and_nothing_after_them(what: str) -> None:
    rig = Rig()
    rig.targets.automatic = False
    first = rig.transact([(ORDERS, [b"1"]), (BILLS, [b"2"])])
    rig.transact([(BILLS, [b"3"])])
    last = rig.prepared("x", [b"4"], BILLS)
    rig.commit(last)
    assert first.state == "committed"
    left = rig.targets.power_cut()
    if what == "topic":
        left.delete(16)
    elif what == "partition":
        left.gone.add(16)
    else:
        rig.targets.force(ORDERS)
        left = rig.targets.power_cut()
        left.retain(ORDERS, 0)
    again = rig.again(rig.disk.crash(keep="nothing"), left)
    assert again.recovered
    assert (again.visible(ORDERS), again.visible(BILLS)) == ([], [b"2", b"3", b"4"])
    second = again.kill()
    assert (second.visible(ORDERS), second.visible(BILLS)) == ([], [b"2", b"3", b"4"])
    assert not second.handler.list(None, 0, 10)[0]


def test_hazard_15_everything_in_doubt_is_back_before_the_start_is_over() -> None:
    rig = Rig()
    prepared = [rig.prepared(f"x{number}", [b"%d" % number]) for number in range(5)]
    decided = rig.prepared("y", [b"decided"], BILLS)
    rig.targets.stop(BILLS)
    rig.commit(decided)
    again = Rig(rig.disk.crash(keep="nothing"), rig.clock, rig.targets.power_cut(), start=False)
    found: list[list[str]] = []
    again.recovering = lambda: found.append([again.state(began) for began in prepared])
    again.start()
    assert found == [["prepared"] * 5], "they are there when the start says that it is over"
    assert again.visible(BILLS) == [b"decided"]
    for began in prepared:
        assert again.commit(began).state == "committed"


def test_item_18_an_unfinished_local_transaction_is_rolled_back_by_a_start() -> None:
    rig = Rig()
    began = rig.begin()
    rig.send(began, [b"m"])
    for again in (rig.kill(), rig.power_cut()):
        assert (again.visible(), again.handler.status()["open"]) == ([], 0)
        assert again.commit(began, one_phase=True).code == "transaction_rolled_back"


def test_item_19_a_commit_survives_starts_and_is_not_doubled() -> None:
    rig = Rig()
    began = rig.prepared("x", [b"1", b"2"])
    rig.commit(began)
    for _ in range(3):
        rig = rig.kill()
        assert rig.visible() == [b"1", b"2"]
        rig = rig.power_cut()
        assert rig.visible() == [b"1", b"2"]


def test_item_20_a_partition_that_lost_everything_gets_it_again_and_the_second_start_changes_nothing() -> None:
    rig = Rig()
    rig.targets.automatic = False
    rig.transact([(ORDERS, [b"1"])])
    rig.commit(rig.prepared("x", [b"2", b"3"]))
    again = rig.again(rig.disk.crash(keep="nothing"), Targets())
    assert again.visible() == [b"1", b"2", b"3"]
    second = again.kill()
    assert second.visible() == [b"1", b"2", b"3"]


def test_item_21_item_22_a_prepared_one_survives_with_its_messages_and_ends_either_way() -> None:
    rig = Rig()
    first, second = rig.prepared("x", [b"1"]), rig.prepared("y", [b"2"])
    rig = rig.power_cut()
    assert [rig.state(began) for began in (first, second)] == ["prepared", "prepared"]
    rig.commit(first)
    rig.rollback(second)
    rig = rig.power_cut()
    assert [rig.state(began) for began in (first, second)] == ["committed", "rolled_back"]
    assert rig.visible() == [b"1"]


def test_item_33_one_in_doubt_is_committed_after_a_start_among_other_sends() -> None:
    """Its messages come where it is decided; nothing that was sent meanwhile is overwritten (hazard 11)."""
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"1"])
    rig.targets.plain(ORDERS, b"plain 1")
    rig.send(began, [b"2"])
    rig.prepare(began)
    rig.targets.plain(ORDERS, b"plain 2")
    again = rig.kill()
    again.targets.plain(ORDERS, b"plain 3")
    again.transact([(ORDERS, [b"other"])])
    assert again.commit(began).state == "committed"
    again.targets.plain(ORDERS, b"plain 4")
    wanted = [b"plain 1", b"plain 2", b"plain 3", b"other", b"1", b"2", b"plain 4"]
    assert again.visible() == wanted
    assert again.kill().visible() == wanted


@pytest.mark.parametrize("moment", ["prepared", "deciding", "applying", "applied"])
def test_item_36_a_checkpoint_at_any_moment_of_a_commit_keeps_it(moment: str) -> None:
    rig = Rig()
    rig.targets.automatic = False

    def checkpoint() -> None:
        rig.store._journal.checkpoint()()
        rig.store._journal.checkpoint_done(None)

    began = rig.prepared("x", [b"1", b"2"])
    if moment == "prepared":
        checkpoint()
    if moment == "applying":
        rig.targets.stop(ORDERS)
    answer = rig.commit(began, turn=moment != "deciding")
    if moment == "deciding":
        rig.handler.write()
    if moment != "prepared":
        checkpoint()
    rig.turn()
    assert answer.code == "ok"
    left = rig.targets.power_cut()
    again = rig.again(rig.disk.crash(keep="nothing"), left)
    assert (again.state(began), again.visible()) == ("committed", [b"1", b"2"])


def test_hazard_12_a_rollback_after_a_checkpoint_stays_one() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.store._journal.checkpoint()()
    rig.store._journal.checkpoint_done(None)
    rig.rollback(began)
    again = rig.power_cut()
    assert (again.state(began), again.visible()) == ("rolled_back", [])


def test_hazard_09_an_outcome_by_hand_survives_a_kill_at_once() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.rollback(began, by_hand=True)
    assert rig.power_cut().state(began) == "heuristic_rolled_back"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("nth", range(1, 6))
def test_a_fault_at_any_write_or_fsync_never_tears_a_transaction(error: int, nth: int) -> None:
    for kind in ("write", "force"):
        if kind == "force" and error == errno.ENOSPC:
            continue
        rig = Rig()
        rig.disk.faults.fail(kind, nth=nth, error=error)
        began = rig.begin("x")
        answers = []
        if began.code == "ok":
            answers = [
                rig.send(began, [b"1"], ORDERS),
                rig.send(began, [b"2"], BILLS),
                rig.prepare(began),
                rig.commit(began),
            ]
        sent = all(answer.code == "ok" for answer in answers[:2])
        for each in (rig, rig.kill(), rig.power_cut()):
            both = (each.visible(), each.visible(BILLS))
            assert both in (([], []), ([b"1"], [b"2"]))
            if answers and answers[3].code == "ok":
                assert sent
                assert both == ([b"1"], [b"2"])
