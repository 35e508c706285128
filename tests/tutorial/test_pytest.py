"""The tutorial's project with tests: its page can be followed, and its tests find out what the page says."""

from pathlib import Path

import pytest

from tests.tutorial.pages import Page


@pytest.mark.long
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    Page("pytest.md", tmp_path).follow()


@pytest.mark.long
def test_a_handler_that_is_not_idempotent_is_found_out(tmp_path: Path) -> None:
    page = Page("pytest.md", tmp_path)
    line = "            self.unpaid.discard(message.text)\n"
    said = page.found_out("once_whatever", "shop.py", line, "")
    words = "AssertionError: assert ['41', '41', '42'] == ['41', '42']"
    assert words in said and words in page.text
    assert "tfmq_faults: without a fault the test passes; here" in said
