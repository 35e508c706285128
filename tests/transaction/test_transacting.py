"""A whole transaction in one request: one record, one force, and the same answer to the same request."""

import errno

import pytest

from journal.wal.entry import KIND_FILLER, JournalEntry, LostEntries
from tests.transaction.desk import BILLS, FOLDER, ORDERS, Answer, Desk, Stream, piece
from tests.transaction.targets import Row
from tfmq.errors import NOT_DONE, UNKNOWN, DiskFull
from tfmq.transaction.requests import TransactRequest


def repeat(desk: Desk, answer: Answer) -> Answer:
    return desk.ask("transact", answer.__dict__["request"], desk.session)


def test_it_begins_sends_and_commits() -> None:
    desk = Desk()
    answer = desk.transact([(ORDERS, [b"1", b"2"]), (BILLS, [b"3"])])
    assert (answer.state, answer.dropped, answer.repeated) == ("committed", 0, False)
    assert (desk.visible(), desk.visible(BILLS)) == ([b"1", b"2"], [b"3"])
    assert desk.targets.reserved == 0


def test_many_of_one_turn_share_one_write_and_one_force() -> None:
    desk = Desk()
    before = desk.disk.faults.counts.copy()
    answers = [desk.transact([(ORDERS, [b"%d" % number])], turn=False) for number in range(20)]
    desk.turn()
    assert {answer.state for answer in answers} == {"committed"}
    counts = desk.disk.faults.counts - before
    assert (counts["write"], counts["force"]) == (1, 1)


def test_nothing_is_visible_before_its_record_is_on_the_disk() -> None:
    desk = Desk(queued=True)
    answer = desk.transact([(ORDERS, [b"1"])])
    assert (answer.code, desk.visible()) == ("waiting", [])
    assert desk.power_cut().visible() == []


def test_one_that_the_disk_refuses_leaves_nothing_set_aside() -> None:
    desk = Desk()
    desk.disk.faults.fail("write", error=errno.ENOSPC)
    assert desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).code == "disk_full"
    assert (desk.targets.reserved, desk.targets.locks) == (0, {})


def test_one_that_the_store_refuses_leaves_nothing_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()

    def refuse(*asked: object, **more: object) -> None:
        raise DiskFull

    monkeypatch.setattr(desk.store, "commit", refuse)
    assert desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).code == "disk_full"
    assert (desk.targets.reserved, desk.targets.locks) == (0, {})
    monkeypatch.undo()
    assert desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 5)]).state == "committed"


def test_a_repeated_one_gets_the_remembered_outcome_also_after_a_start() -> None:
    desk = Desk()
    first = desk.transact([(ORDERS, [b"1"])])
    for each in (desk, desk.power_cut()):
        again = repeat(each, first)
        assert (again.state, again.epoch, again.repeated) == ("committed", first.epoch, True)
        assert each.visible() == [b"1"]


def test_one_that_is_repeated_while_it_is_under_way_waits_for_it() -> None:
    desk = Desk(queued=True)
    first = desk.transact([(ORDERS, [b"1"])], turn=False)
    early = repeat(desk, first)
    late = repeat(desk, first)
    assert [each.code for each in (first, early, late)] == ["waiting"] * 3
    desk.work()
    assert {(each.state, each.epoch) for each in (first, early, late)} == {("committed", first.epoch)}
    assert [each.repeated for each in (first, early, late)] == [False, True, True]
    assert desk.visible() == [b"1"]


def test_one_that_is_repeated_while_a_target_is_stopped_is_still_applying() -> None:
    desk = Desk()
    first = desk.transact([(ORDERS, [b"0"])])
    desk.advance(1)
    desk.targets.automatic = False
    stream = desk.stream()
    request = desk.transact([(ORDERS, [b"1"])], stream)
    desk.advance(1)
    desk.targets.fail_force(ORDERS)
    assert repeat(desk, request).state == "applying"
    assert repeat(desk, first).state == "committed"


def test_the_next_number_of_the_stream_is_a_new_one_and_an_older_is_refused() -> None:
    desk = Desk()
    stream = desk.stream()
    first = desk.transact([(ORDERS, [b"1"])], stream)
    desk.transact([(ORDERS, [b"2"])], stream)
    answer = repeat(desk, first)
    assert answer.code == "unknown_transaction"
    assert desk.visible() == [b"1", b"2"]


def test_one_without_anything_is_read_only() -> None:
    desk = Desk()
    assert desk.transact([]).state == "read_only"
    assert desk.store.transactions == {}


@pytest.mark.parametrize(
    "trouble", ["journal full", "target stopped", "target full", "target gone", "fenced", "limit"]
)
def test_one_that_is_refused_leaves_nothing_and_can_come_again(trouble: str) -> None:
    desk = Desk(limits={"transaction_bytes": 100_000})
    stream = desk.stream()
    rows = [Row("g", 1, 50)]
    batches = [(ORDERS, [b"1"])]
    if trouble == "journal full":
        desk.disk.faults.fail("write", error=errno.ENOSPC)
    elif trouble == "target stopped":
        desk.targets.stop(ORDERS)
    elif trouble == "target full":
        desk.targets.target(ORDERS).full = True
    elif trouble == "target gone":
        desk.targets.gone.add(16)
    elif trouble == "fenced":
        desk.targets.generations["g"] = 2
    else:
        batches = [(ORDERS, [b"x" * 200_000])]
    answer = desk.transact(batches, stream, rows)
    assert answer.failure is not None
    assert answer.failure.outcome == NOT_DONE  # type: ignore[attr-defined]
    assert (desk.store.transactions, desk.targets.reserved, desk.targets.locks) == ({}, 0, {})
    desk.targets.gone.clear()
    desk.targets.generations.clear()
    desk.targets.targets.clear()
    request = answer.__dict__["request"]._replace(batches=[piece(stream.id, 0, ORDERS, [b"1"])])
    assert desk.ask("transact", request, desk.session).state == "committed"
    assert (desk.visible(), desk.targets.saved("g")) == ([b"1"], 50)


def test_a_repeat_that_waited_for_one_that_failed_is_done_on_its_own() -> None:
    desk = Desk()
    desk.disk.faults.fail("write", error=errno.ENOSPC)
    first = desk.transact([(ORDERS, [b"1"])], turn=False)
    second = repeat(desk, first)
    assert (first.code, second.state, second.repeated) == ("disk_full", "committed", False)
    assert desk.visible() == [b"1"]


def test_sequences_are_contiguous_over_its_batches() -> None:
    desk = Desk()
    stream = Stream(55)
    pieces = [piece(55, 0, ORDERS, [b"1", b"2"]), piece(55, 3, BILLS, [b"3"])]
    assert desk.ask("transact", TransactRequest(55, 1, pieces), desk.session).code == "sequence_gap"
    pieces = [piece(55, 0, ORDERS, [b"1", b"2"]), piece(55, 2, BILLS, [b"3"])]
    assert desk.ask("transact", TransactRequest(55, 1, pieces), desk.session).state == "committed"
    stream.sequence = 3
    desk.transact([(ORDERS, [b"4"])], stream, number=2)
    assert desk.visible() == [b"1", b"2", b"4"]


def torn(desk: Desk, payloads: list[bytes], stream: Stream) -> tuple[Answer, Desk]:
    """A frame of which a crash left the messages and tore the decision, which stood behind them in the same write."""
    answer = desk.transact([(ORDERS, payloads)], stream, turn=False)
    desk.handler.write()
    disk = desk.disk.crash(keep="everything")
    path = max(f"{FOLDER}/{name}" for name in disk.list(FOLDER) if name.endswith(".journal"))
    disk.write_file(path, disk.read_file(path)[:-1])
    return answer, desk.again(disk, desk.targets.killed())


def test_one_that_a_crash_tore_is_told_as_a_gap_which_says_that_nothing_of_it_was_done() -> None:
    desk = Desk()
    stream = desk.stream()
    desk.transact([(ORDERS, [b"0"])], stream)
    first, again = torn(desk, [b"1", b"2"], stream)
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("sequence_gap", NOT_DONE)  # type: ignore[union-attr]
    assert answer.failure.details == {"expected": 3, "found": 1}  # type: ignore[union-attr]
    assert again.visible() == [b"0"]
    assert again.transact([(ORDERS, [b"1", b"2"])]).state == "committed"
    assert again.visible() == [b"0", b"1", b"2"]


def lost_behind_a_rollback(desk: Desk) -> tuple[Answer, Desk]:
    """A frame that stood behind records that nobody waits for; a power cut took both."""
    stream = desk.stream()
    large = desk.begin("", stream)
    desk.send(large, [b"large"])
    assert desk.rollback(large).state == "rolled_back"
    answer = desk.transact([(ORDERS, [b"1"])], stream, turn=False)
    return answer, desk.power_cut()


def test_one_whose_stream_a_power_cut_took_is_told_as_a_gap() -> None:
    """The id is young and no stream was forgotten: had the frame been done, the broker would know its stream."""
    first, again = lost_behind_a_rollback(Desk(queued=True))
    answer = repeat(again, first)
    assert answer.failure is not None and answer.failure.details == {"expected": 0, "found": 1}  # type: ignore[attr-defined]
    assert answer.code == "sequence_gap" and again.visible() == []


def test_after_a_repair_a_gap_proves_nothing() -> None:
    """What is missing may have been lost behind the answer: then "not done" is not certain."""
    first, again = lost_behind_a_rollback(Desk(queued=True))
    ledger = again.store._table
    ledger.apply(JournalEntry(KIND_FILLER, again.store.end_lsn, 60, LostEntries(60), 0))
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("unknown_producer", UNKNOWN)  # type: ignore[union-attr]
    ledger.load(ledger.dump()())
    answer = repeat(again, first)
    assert (answer.code, answer.failure.outcome) == ("unknown_producer", UNKNOWN)  # type: ignore[union-attr]


def test_its_offsets_are_saved_with_it_and_free_behind_it() -> None:
    desk = Desk(queued=True)
    answer = desk.transact([(ORDERS, [b"1"])], offsets=[Row("g", 1, 50)])
    assert len(desk.targets.locks) == 1
    desk.work()
    assert (answer.state, desk.targets.saved("g"), desk.targets.locks) == ("committed", 50, {})


def test_messages_larger_than_memory_keeps_are_read_from_the_journal() -> None:
    desk = Desk()
    payload = b"x" * 300_000
    assert desk.transact([(ORDERS, [payload, payload])]).state == "committed"
    assert desk.visible() == [payload, payload]


def test_item_24_a_hundred_clients_with_many_transactions_end_with_none_active() -> None:
    """Ten streams of each of them, whole ones and ones in steps, in turns of many."""
    desk = Desk()
    streams = [desk.stream() for _ in range(100)]
    sent = 0
    for round_number in range(10):
        answers = []
        for number, stream in enumerate(streams):
            if (number + round_number) % 10:
                answers.append(desk.transact([(ORDERS + number % 3, [b"m"])], stream, turn=False))
            else:
                began = desk.begin(f"x{number}", stream, turn=False)
                desk.send(began, [b"m"], ORDERS + number % 3, turn=False)
                answers.append(desk.commit(began, one_phase=True, turn=False))
            sent += 1
        desk.turn()
        assert {answer.state for answer in answers} == {"committed"}
    desk.advance(1)
    assert not desk.store.transactions
    assert sum(len(desk.visible(ORDERS + number)) for number in range(3)) == sent
    assert {desk.handler.status()[each] for each in ("open", "prepared", "applying")} == {0}
