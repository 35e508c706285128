"""The page about testing is true: its examples run as they are written, and what it lists is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import paths
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.clock import VirtualClock

ROOT = paths.ROOT
PAGE = (ROOT / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]


@pytest.mark.long
def test_every_example_passes_as_it_is_written(tmp_path: Path) -> None:
    assert len(EXAMPLES) > 4
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"test_{number}.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tfmq.testing.plugin", "-c", os.devnull, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    count = sum(len(re.findall(r"^def test_", example, re.MULTILINE)) for example in EXAMPLES)
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted({name for row in ROWS for name in re.findall(r"`\.(\w+)", row)}))
def test_every_verb_that_it_lists_is_there(name: str) -> None:
    with SimulatedBroker() as broker:
        assert hasattr(broker, name)


def test_every_verb_that_is_there_is_listed() -> None:
    inner = {"make_client_parts", "close", "attach_fault_run"}
    for kind, inside in ((SimulatedBroker, inner), (VirtualClock, {"monotonic", "wall_ms", "wall_us", "move"})):
        public = {name for name in vars(kind) if not name.startswith("_")} - inside
        assert sorted(name for name in public if name not in PAGE) == []
