"""The tutorial's worker: its page can be followed, and its tests find out what the page says."""

from pathlib import Path

import pytest

from tests.tutorial.pages import Page


@pytest.mark.long
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    Page("worker.md", tmp_path).follow()


@pytest.mark.long
def test_a_worker_that_is_not_idempotent_is_found_out(tmp_path: Path) -> None:
    page = Page("worker.md", tmp_path)
    said = page.found_out("every_order", "worker.py", "INSERT OR IGNORE", "INSERT")
    words = "sqlite3.IntegrityError: UNIQUE constraint failed: invoices.number"
    assert words in said and words in page.text
    assert "tfmq_faults: without a fault the test passes; here" in said
