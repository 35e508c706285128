"""docs/spark.md: what its reader types works as it stands, and prints what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests import paths
from tools.rigs.live_server import LiveServer

ROOT = paths.ROOT
PAGE = (ROOT / "docs" / "spark.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPARKS = re.compile(r"does not support|ErrorIfExists")
"""What Spark says of any source."""
SECONDS = 60.0


def blocks(heading: str) -> list[tuple[str, str]]:
    """(language, text) of what stands in fences under a heading."""
    begin = PAGE.index(f"\n{heading}\n")
    return FENCE.findall(PAGE[begin : PAGE.index("\n#", begin + len(heading))])


def run(program: str, servers: str, folder: Path, names: dict[str, Any]) -> None:
    """As if it were typed in `folder`, where Spark's own process is not."""
    exec(program.replace("127.0.0.1:8367", servers).replace(', "checkpoint', f', "{folder}/checkpoint'), names)


def send(typed: str, servers: str) -> None:
    """What the shell's lines send; the broker is there already."""
    for line in typed.splitlines():
        if line.startswith("tfmq send "):
            command = [str(Path(sys.executable).parent / "tfmq"), *shlex.split(line)[1:], "--servers", servers]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=SECONDS)


def stored(servers: str, topic: str) -> list[tuple[str | None, str]]:
    """(key, payload) of all messages."""
    with tfmq.Consumer(servers, topics=topic, start="earliest") as consumer:
        return [(str(each.key), each.text) for each in consumer.poll(timeout=SECONDS)]


def test_the_sentences_that_the_page_quotes_are_said() -> None:
    """Those of the table under "Errors" that are ours."""
    begin = PAGE.index("\n## Errors\n")
    cells = re.findall(r"^\| (`.*?`) \|", PAGE[begin : PAGE.index("\n## ", begin + 1)], re.MULTILINE)
    quoted = [part.strip("… ") for cell in cells for part in re.findall(r"`(.*?)`", cell)]
    ours = [each for each in quoted if not each.startswith("[") and not SPARKS.search(each)]
    assert len(ours) >= 5
    code = "".join(path.read_text() for path in (ROOT / "tfmq").rglob("*.py"))
    words = [word for each in ours for word in re.split(r" ?\b\d+\b|, and|pyspark", each) if len(word) > 7]
    assert [word for word in words if word.strip() not in code] == []


@pytest.mark.long
def test_the_first_query_works_as_it_is_typed(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = LiveServer(tmp_path / "data")
    server.start()
    shell, table, shown, stream, counting = [*blocks("## The first query"), *blocks("### Counts that change")]
    send(shell[1], server.address)
    names: dict[str, Any] = {}
    for block in (table, stream):
        run(block[1], server.address, tmp_path, names)
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if line] == shown[1].splitlines()
    assert stored(server.address, "copies") == stored(server.address, "orders")

    names["orders"] = (
        spark.readStream.format("tfmq")
        .options(servers=server.address, subscribe="orders", startingOffsets="earliest")
        .load()
    )
    run(counting[1], server.address, tmp_path, names)
    names["query"].processAllAvailable()
    names["query"].stop()
    assert sorted(stored(server.address, "counts")) == [("kettle", "2"), ("toaster", "1")]
    server.stop()
