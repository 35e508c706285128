"""`python -m tfmq.spark.pipelines` lists the pipelines, and runs the one that is named; no Spark is needed to ask."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from tfmq.cli import main as tfmq_command
from tfmq.spark.pipelines import NAMES
from tfmq.spark.pipelines.__main__ import pipelines
from tfmq.spark.pipelines.command import PROGRAM, run_command


def listed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfmq.spark.pipelines", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_it_lists_the_pipelines_with_a_line_each() -> None:
    ran = listed("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = [line.split() for line in ran.stdout.split("Commands:\n")[1].splitlines() if line.strip()]
    lines = lines[: len(NAMES)]
    assert [words[0] for words in lines] == list(NAMES) and all(len(words) > 3 for words in lines)
    assert ran.stdout.startswith(f"Usage: {PROGRAM} [OPTIONS] COMMAND")


def test_without_a_name_it_is_wrong_usage_and_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(pipelines, "", []) == 2
    said = capsys.readouterr()
    assert [name for name in NAMES if f"\n  {name} " not in said.out + said.err] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_each_runs_by_its_name(name: str, option: str) -> None:
    ran = CliRunner().invoke(pipelines, [name, option], prog_name=PROGRAM)
    assert ran.exit_code == 0 and ran.output.startswith(f"Usage: {PROGRAM} {name} [OPTIONS]")


def test_a_name_that_is_none_gets_the_likely_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(pipelines, "", ["audti"]) == 2
    assert "there is no command 'audti'. Did you mean 'audit'?" in capsys.readouterr().err


@pytest.mark.parametrize("word", [*NAMES, "spark", "pipelines"])
def test_tfmq_says_where_pipelines_are(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tfmq_command.run([word]) == 2
    assert "`python -m tfmq.spark.pipelines` lists them." in capsys.readouterr().err
