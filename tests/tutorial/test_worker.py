"""The tutorial's worker: its page can be followed, and its tests find out what the page says."""

from pathlib import Path

from tests.tutorial.pages import Page


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    Page("worker.md", tmp_path).follow()


def test_a_worker_that_is_not_idempotent_is_found_out(tmp_path: Path) -> None:
    page = Page("worker.md", tmp_path)
    page.write()
    program = tmp_path / "worker.py"
    program.write_text(program.read_text().replace("INSERT OR IGNORE", "INSERT"))
    said = page.pytest()
    assert "1 failed, 1 passed" in said, said
    words = "sqlite3.IntegrityError: UNIQUE constraint failed: invoices.number"
    assert words in said and words in page.text
    assert "tfmq_faults: without a fault the test passes; here" in said
