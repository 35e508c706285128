"""A file that left the set is closed when nobody uses the set, not before, and once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from journal.disk import FileReferences
from tests.scale import scaled


class Counted:
    """A file that counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_with_nothing_pinned_it_is_closed_at_once() -> None:
    pins, file = FileReferences(), Counted()
    pins.retire([file])
    assert file.closed == 1


def test_it_is_closed_once_when_the_last_pin_is_taken_back() -> None:
    pins, file = FileReferences(), Counted()
    pins.acquire()
    with pins:
        pins.retire([file])
        with pins:
            pass
        assert file.closed == 0
    assert file.closed == 0, "pins are counted"
    pins.release()
    assert file.closed == 1
    with pins:
        pins.retire([])
    assert file.closed == 1


def test_a_pin_that_comes_behind_keeps_it_open_too() -> None:
    """Nobody can say whose hand it is in, so the last one of all closes it."""
    pins, file = FileReferences(), Counted()
    pins.acquire()
    pins.retire([file])
    pins.acquire()
    pins.release()
    assert file.closed == 0
    pins.release()
    assert file.closed == 1


def test_a_block_that_ends_with_an_error_takes_its_pin_back() -> None:
    pins, file = FileReferences(), Counted()
    with pytest.raises(OSError, match="to see"), pins:
        pins.retire([file])
        raise OSError("to see")
    assert file.closed == 1


def test_a_close_may_use_the_pins_itself() -> None:
    pins = FileReferences()

    class Nested(Counted):
        def close(self) -> None:
            super().close()
            with pins:
                assert self.closed == 1

    file = Nested()
    pins.retire([file])
    assert file.closed == 1


def test_a_pin_that_is_taken_back_while_files_are_told_leaves_none_open() -> None:
    """A generator that is collected there does that."""
    pins, files = FileReferences(), [Counted(), Counted()]

    def told() -> Iterator[Counted]:
        yield files[0]
        pins.release()
        yield files[1]

    pins.acquire()
    pins.retire(told())
    assert [file.closed for file in files] == [1, 1]


def test_whoever_pins_before_he_takes_the_list_never_has_a_closed_file() -> None:
    pins, rounds = FileReferences(), scaled(5_000)
    current = [Counted()]
    old: list[Counted] = []
    seen: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            with pins:
                file = current[0]
                # Others run now, with the file in this one's hand.
                time.sleep(0)
                seen.append(file.closed)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(rounds):
        gone, current[0] = current[0], Counted()
        old.append(gone)
        pins.retire([gone])
        time.sleep(0)
    over.set()
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive()
    assert seen and not any(seen)
    assert [file.closed for file in old] == [1] * rounds and current[0].closed == 0
