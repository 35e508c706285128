"""The tutorial's worker: its tests pass, they find out what the page says, and its commands do what it shows."""

import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

import tfmq
from tests.tutorial.pages import SECONDS, Page


def test_its_tests_pass(tmp_path: Path) -> None:
    said = Page("worker.md", tmp_path).pytest()
    assert "2 passed" in said, said


def test_a_worker_that_is_not_idempotent_is_found_out(tmp_path: Path) -> None:
    page = Page("worker.md", tmp_path)
    program = tmp_path / "worker.py"
    program.write_text(program.read_text().replace("INSERT OR IGNORE", "INSERT"))
    said = page.pytest()
    assert "1 failed, 1 passed" in said, said
    words = "sqlite3.IntegrityError: UNIQUE constraint failed: invoices.number"
    assert words in said and words in page.text
    assert "tfmq_faults: without a fault the test passes; here" in said


def invoices(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "books.db")) as books:
        return dict(books.execute("SELECT number, total FROM invoices"))


def wait_for(page: Page, *words: str) -> str:
    """The list of dead letters, once it has all of `words`."""
    deadline = time.monotonic() + SECONDS
    while True:
        said = page.run("tfmq dlq list --store letters.db") if (page.folder / "letters.db").exists() else ""
        if all(word in said for word in words):
            return said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def test_its_commands_do_what_it_shows(tmp_path: Path) -> None:
    with tfmq.local_server(tmp_path / "data") as servers:
        page = Page("worker.md", tmp_path, servers)
        (start, first), (listing, letters), (mend, last) = page.consoles()
        *sends, run = start
        for command in sends:
            page.run(command)
        with page.begin(run.removesuffix(" &")) as worker:
            try:
                assert worker.stdout is not None
                assert [worker.stdout.readline().strip()] == first
                wait_for(page, "KeyError", "Reject")
                assert listing == ["tfmq dlq list --store letters.db"]
                assert unnamed(page.run(listing[0]).splitlines()) == unnamed(letters)
                *mending, kill = mend
                for command in mending:
                    page.run(command)
                assert [worker.stdout.readline().strip()] == last and kill == "kill %1"
            finally:
                worker.terminate()
            assert worker.wait(SECONDS) == 0
    assert invoices(tmp_path) == {"1": 40, "3": 35}


def unnamed(lines: list[str]) -> list[list[str]]:
    """The rows of a table of dead letters, without what is another in each run: the ids and the times."""
    rows = [line.split()[1:] for line in lines if any(letter.isalnum() for letter in line)]
    return [[word for word in row if not re.match(r"\d{4}-\d\d-", word)] for row in rows]


@pytest.mark.parametrize("verb", ["show", "drop"])
def test_the_other_commands_that_it_names_are_there(verb: str, tmp_path: Path) -> None:
    page = Page("worker.md", tmp_path)
    assert f"tfmq dlq {verb}" in page.text
    page.run(f"tfmq dlq {verb} --help")
