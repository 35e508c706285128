"""What the ancestor's journal did wrong, each as a scenario that must not come back; and its checklist."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from journal.errors import Corrupt, Stopped
from journal.testing import crash_states
from journal.wal.entry import COMMIT, PREPARE, Operation
from journal.wal.file import FILE_HEADER_SIZE
from journal.wal.store import JournalOptions
from tests.journal.journals import CHECKPOINT, ONE, Journal, message, opened, row_of
from tests.scale import scaled, seeded


def test_hazard_05_a_bad_entry_never_takes_later_prepared_transactions_with_it() -> None:
    """An unchecked length sized an allocation, and any bad record truncated everything after it."""
    journal = opened(JournalOptions())
    journal.append(message(1, 1), Operation(PREPARE, 1, b"first"))
    journal.store.force()
    journal.append(message(2, 2), Operation(PREPARE, 2, b"second"))
    journal.store.force()
    journal.append(Operation(COMMIT, 3, b"third"))
    whole = journal.disk.read_file(journal.file())
    places = [row[0] for row in journal.state.seen]
    for place in places[:2]:
        for length in (0, 1, 2**31, 2**32 - 1, 1 << 20):
            journal.disk.write_file(journal.file(), whole)
            journal.disk.damage(journal.file(), place, length.to_bytes(4, "big"))
            with pytest.raises(Corrupt, match=f"damage before forced entries at LSN {place}"):
                journal.open()
            assert journal.disk.read_file(journal.file())[place + 4 :] == whole[place + 4 :]


def test_hazard_05_any_flipped_bit_of_what_was_fsynced_is_named_and_nothing_is_thrown_away() -> None:
    journal = opened().sent(12)
    journal.checkpoint()
    journal.sent(6)
    journal.kill()
    whole = journal.bytes()
    generator = seeded("flip")
    for name in [f"{number:016d}.journal" for number in journal.numbers[-2:]]:
        first = 0 if name != f"{journal.numbers[-2]:016d}.journal" else FILE_HEADER_SIZE + 2 * ONE
        for at in range(first, len(whole[name])):
            if generator.random() > 0.2:
                continue
            journal.disk.damage(journal.path(name), at, bytes([whole[name][at] ^ 1 << generator.randrange(8)]))
            with pytest.raises(Corrupt) as error:
                journal.open()
            assert error.value.path == journal.path(name)
            journal.disk.write_file(journal.path(name), whole[name])
    journal.kill()


def test_hazard_06_nothing_that_a_checkpoint_replaces_goes_before_it_is_durable() -> None:
    """A power cut at every moment of a life with many checkpoints: every state opens with everything forced."""
    generator = seeded("hazard 6")
    journal = opened()
    problems = 0
    for epoch in range(1, 4 + scaled(60)):
        journal.sent(2, epoch)
        journal.settle(epoch)
        journal.store.force()
        forced = list(journal.state.seen)

        def look(kind: str, path: str, forced: list[tuple[int, int, int, bytes]] = forced) -> None:
            nonlocal problems
            for state in crash_states(journal.disk, 5, generator):
                after = Journal(state)
                after.open()
                problems += after.state.seen != forced

        journal.disk.after = look
        journal.checkpoint()
        journal.disk.after = None
    assert problems == 0
    assert journal.numbers[0] > 1


def test_hazard_07_prepares_are_fsynced_like_everything_else_and_a_failure_is_never_forgotten() -> None:
    journal = opened(JournalOptions())
    journal.append(message(1, 1), Operation(PREPARE, 1, b""))
    assert journal.store.forced_offset == FILE_HEADER_SIZE, "not forced yet, and known not to be"
    journal.disk.faults.fail("force")
    with pytest.raises(Stopped):
        journal.store.force()
    for _ in range(2):
        with pytest.raises(Stopped):
            journal.store.force()
    assert journal.store.forced_offset == FILE_HEADER_SIZE
    assert journal.crash().state.seen == []


@pytest.mark.long
def test_hazard_08_each_flipped_bit_of_the_checkpoint_and_the_newest_snapshot_costs_nothing() -> None:
    """The ancestor read the newest checkpoint only, and could not distinguish a bad one from a good one."""
    journal = opened().sent(12)
    journal.checkpoint()
    journal.sent(6)
    journal.checkpoint()
    journal.sent(2)
    whole = journal.bytes()
    generator = seeded("hazard 8")
    newest = f"{journal.snapshots[-1]:020d}.snapshot"
    for name in ("checkpoint", newest):
        for at in range(len(whole[name])):
            if generator.random() > 0.2:
                continue
            other = Journal(journal.disk.crash(keep="everything"))
            other.disk.damage(other.path(name), at, bytes([whole[name][at] ^ 1 << generator.randrange(8)]))
            other.open()
            assert other.state.seen == journal.state.seen
            assert other.store.recovery.labels[0] == ("older snapshot" if name == newest else "newest snapshot")
            other.checkpoint()
            assert len(other.store.recovery.warnings) == (name == newest)


def test_hazard_12_a_checkpoint_between_two_appends_describes_exactly_the_first() -> None:
    """A checkpoint between a commit's removal from memory and its record left an orphan that replay misread."""
    for before in range(6):
        journal = opened(JournalOptions())
        contents = [message(1, 1), message(1, 2), Operation(PREPARE, 1), Operation(COMMIT, 1), message(2, 3)]
        for content in contents[:before]:
            journal.append(content)
        work = journal.store.checkpoint()
        for content in contents[before:]:
            journal.append(content)
        work()
        journal.store.checkpoint_done(None)
        journal.store.force()
        after = journal.crash()
        assert after.state.seen == journal.state.seen
        assert after.state.replayed == len(contents) - before


def test_item_36_a_checkpoint_while_appends_and_rolls_go_on_loses_nothing_at_any_moment() -> None:
    generator = seeded("item 36")
    for _ in range(scaled(60)):
        journal = opened().sent(generator.randint(1, 9))
        work = journal.store.checkpoint()
        forced = list(journal.state.seen)

        def meanwhile(kind: str, path: str, journal: Journal = journal) -> None:
            """The owner goes on while the worker makes the checkpoint; then the power goes."""
            nonlocal forced
            journal.disk.after = None
            if generator.random() < 0.4:
                journal.append(message(5, 1), Operation(COMMIT, 5))
            if generator.random() < 0.2:
                journal.store._gate.fsync(journal.store._files.active)
                forced = list(journal.state.seen)
            for state in crash_states(journal.disk, 4, generator):
                after = Journal(state)
                after.open()
                assert after.state.seen[: len(forced)] == forced
            journal.disk.after = meanwhile

        journal.disk.after = meanwhile
        work()
        journal.disk.after = None
        journal.store.checkpoint_done(None)


def test_hazard_14_numbers_and_places_never_go_back() -> None:
    """Recovery deleted the last file, and numbering began at 1 again, below the checkpoint."""
    journal = opened().sent(12)
    journal.settle(1)
    for _ in range(2):
        journal.store.force()
        journal.checkpoint()
    number, end = journal.numbers[-1], journal.store.end_offset
    assert journal.numbers == [number] and number > 1
    journal.disk.unlink(journal.file())
    with pytest.raises(Corrupt, match="missing"):
        journal.open()
    with pytest.raises(Corrupt, match="missing"):
        journal.open()
    journal = opened().sent(12)
    for _ in range(4):
        journal.kill()
        numbers = journal.numbers
        journal.sent(5)
        assert journal.numbers[: len(numbers)] == numbers
        assert journal.store.end_offset > end or journal.numbers[-1] <= number
        number = max(number, journal.numbers[-1])


def test_hazard_14_a_torn_new_file_gives_its_number_back_only_because_nothing_was_in_it() -> None:
    journal = opened().sent(5)
    journal.disk.write_file(journal.path(f"{2:016d}.journal"), b"TFTJ" + bytes(10))
    journal.kill()
    end = journal.store.end_offset
    place = journal.send()
    assert journal.numbers == [1, 2] and place > end


def test_hazard_14_all_files_gone_is_never_a_new_journal() -> None:
    for count in (0, 3, 12):
        journal = opened().sent(count)
        for number in journal.numbers:
            journal.disk.unlink(journal.file(number))
        with pytest.raises(Corrupt, match="missing"):
            journal.open()
        assert journal.ids == 5
    journal = opened().sent(3)
    journal.disk.unlink(CHECKPOINT)
    with pytest.raises(Corrupt, match="checkpoint missing"):
        journal.open()


def test_item_38_zeros_and_impossible_lengths_in_the_middle_are_named_at_the_tail_cut() -> None:
    journal = opened(JournalOptions()).sent(3)
    journal.send()
    whole = journal.disk.read_file(journal.file())
    journal.disk.write_file(
        journal.file(), whole[: FILE_HEADER_SIZE + ONE] + bytes(ONE) + whole[FILE_HEADER_SIZE + 2 * ONE :]
    )
    with pytest.raises(Corrupt, match=f"LSN {FILE_HEADER_SIZE + ONE}"):
        journal.open()
    journal.disk.write_file(journal.file(), whole[: FILE_HEADER_SIZE + 3 * ONE] + bytes(4096))
    journal.open()
    assert len(journal.state.seen) == 3


def test_any_rot_anywhere_is_refused_without_a_change_or_costs_nothing() -> None:
    """Flipped and overwritten bytes, cut and missing files, also of snapshots and the checkpoint, several at once."""
    generator = seeded("any rot")
    refused = passed = 0
    for _ in range(scaled(400)):
        journal = opened()
        for epoch in range(1, generator.randint(3, 9)):
            journal.sent(generator.randint(1, 6), epoch)
            if generator.random() < 0.4:
                journal.settle(generator.randint(1, epoch))
            if generator.random() < 0.5:
                journal.store.force()
                journal.checkpoint()
        journal.store.close()
        rows = list(journal.state.seen)
        for _ in range(generator.randint(1, 3)):
            _rot(journal, generator)
        before = journal.bytes()
        if not journal.numbers:
            # With the checkpoint gone too nothing says that there ever was a journal; the broker's catalog does.
            continue
        try:
            journal.open()
        except Corrupt:
            refused += 1
            assert journal.bytes() == before
            continue
        passed += 1
        assert journal.state.seen == rows
        for place in journal.state.held():
            with suppress(Corrupt):
                assert row_of(journal.store.read(place)) in rows
    print(f"{refused} refused, {passed} cost nothing")
    assert refused


def _rot(journal: Journal, generator: Random) -> None:
    name = generator.choice(sorted(journal.bytes()))
    path, data = journal.path(name), journal.bytes()[name]
    kind = generator.random()
    if kind < 0.7 and data:
        at = generator.randrange(len(data))
        journal.disk.damage(path, at, generator.randbytes(min(len(data) - at, generator.choice((1, 1, 50)))))
    elif kind < 0.85:
        journal.disk.write_file(path, data[: generator.randrange(len(data) + 1)])
    else:
        journal.disk.unlink(path)
