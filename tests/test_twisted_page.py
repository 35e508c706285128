"""Every example of docs/twisted.md runs as it stands there, each in a program of its own, against a real broker."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmq

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "twisted.md").read_text(), re.DOTALL)
EXPECTED = (
    ["read 42", "stored at 0"],
    ["parcels has 1 partition", "stored at 0"],
    ["committed", "prepared committed"],
    ["job 1", "picture 2"],
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tfmq.local_server(tmp_path_factory.mktemp("broker") / "data") as address:
        yield address


def test_what_each_prints_is_known() -> None:
    assert len(EXAMPLES) == len(EXPECTED)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_every_example_runs(number: int, servers: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[number]],
        env={**os.environ, "TFMQ_SERVERS": servers, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == EXPECTED[number], done.stderr
