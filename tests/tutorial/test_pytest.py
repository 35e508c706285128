"""The tutorial's project with tests: they pass, and find out what the page says."""

from pathlib import Path

from tests.tutorial.pages import Page


def test_its_tests_pass(tmp_path: Path) -> None:
    said = Page("pytest.md", tmp_path).pytest()
    assert "6 passed" in said and "warning" not in said, said


def test_a_handler_that_is_not_idempotent_is_found_out(tmp_path: Path) -> None:
    page = Page("pytest.md", tmp_path)
    program = tmp_path / "shop.py"
    before, behind = program.read_text().split("def check")
    program.write_text(before + "def check" + behind.replace("self.unpaid.discard(message.key)", "pass"))
    said = page.pytest()
    assert "1 failed, 5 passed" in said, said
    words = "AssertionError: assert ['41', '41', '42'] == ['41', '42']"
    assert words in said and words in page.text
    assert "tfmq_faults: without a fault the test passes; here" in said
