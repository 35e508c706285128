"""The tutorial's service: what its page says is typed, and comes as it is printed there."""

from pathlib import Path

import pytest

from tests.tutorial.pages import Page


@pytest.mark.long
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    Page("fastapi.md", tmp_path).follow()
