"""The tutorial's notebook: its cells, one after the other, as Jupyter runs them; and what each shows."""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.tutorial.pages import ROOT

PAGE = (ROOT / "docs" / "tutorial" / "notebook.md").read_text()
CELLS = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)\n```)?", PAGE, re.DOTALL)


async def execute(cell: str, names: dict[str, Any]) -> Any:
    """The value of the cell's last line, if that is an expression; `await` may stand anywhere."""
    tree = ast.parse(cell)
    last = tree.body[-1]
    parts: list[tuple[ast.Module | ast.Expression, str]] = [(tree, "exec")]
    if isinstance(last, ast.Expr):
        del tree.body[-1]
        parts.append((ast.Expression(last.value), "eval"))
    value = None
    for part, mode in parts:
        value = FunctionType(compile(part, "<cell>", mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)()
        if inspect.iscoroutine(value):
            value = await value
    return value


@pytest.mark.long
def test_every_cell_shows_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def notebook() -> list[tuple[str, str]]:
        names: dict[str, Any] = {}
        return [(shown, repr(await execute(cell, names))) for cell, shown in CELLS]

    found = asyncio.run(notebook())
    assert len(found) == 5
    assert [(shown, value) for shown, value in found if shown] == [(shown, shown) for shown, _ in found if shown]
    assert sum(bool(shown) for shown, _ in found) == 3
