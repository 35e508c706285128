"""The command line that all pipelines share: options, sentences, exit codes; without Spark."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from tests.paths import ROOT
from tfmq.errors import BadRequest, ConnectionFailed, Damaged, TfmqError
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines import NAMES
from tfmq.spark.pipelines.command import Job, parse_address, pipeline_options, run_command, single_interrupt


def raising(error: Exception | None) -> click.Command:
    @click.command()
    @pipeline_options("trial")
    def trial(job: Job) -> int:
        if error is not None:
            raise error
        job.output.info(f"{job.name} with {job.master}")
        return 0

    return trial


@pytest.mark.parametrize(
    ("error", "code"),
    [(BadRequest("no."), 2), (ConnectionFailed("no."), 3), (Damaged("no."), 4), (TfmqError("no."), 1), (None, 0)],
)
def test_exit_codes_are_those_of_tfmq(error: Exception | None, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(error), "trial", []) == code
    said = capsys.readouterr().err
    assert said == ("tfmq: no.\n" if error else "trial with None\n")


def test_a_wrong_option_is_reported_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(None), "trial", ["--masterr", "local"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean '--master'?" in said
    assert "Usage: python -m tfmq.spark.pipelines.trial [OPTIONS]\n" in said
    assert "Try 'python -m tfmq.spark.pipelines.trial --help'" in said


def interrupted_while_clearing_up() -> None:
    try:
        raise KeyboardInterrupt
    finally:
        raise ValueError("Java is gone")


def test_a_ctrl_c_is_one_sentence_whatever_its_clearing_up_raises(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @pipeline_options("trial")
    def trial(job: Job) -> None:
        with single_interrupt():
            logging.exception("KeyboardInterrupt while sending command.")
            interrupted_while_clearing_up()

    assert run_command(trial, "trial", []) == 130
    assert capsys.readouterr().err.strip() == (
        "tfmq: interrupted. Run the same command again: the result is that of one complete run."
    )
    with pytest.raises(ValueError, match="mine"), single_interrupt():
        raise ValueError("mine")


def test_a_ctrl_c_is_taken_back_from_its_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    with single_interrupt() as as_before:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        as_before()
        assert signal.getsignal(signal.SIGINT) is before


def test_an_option_that_is_like_none_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(None), "trial", ["--format", "csv"]) == 2
    assert "No such option '--format'.\n" in capsys.readouterr().err


def test_without_pyspark_it_says_how_to_install_it(tmp_path: Path) -> None:
    finder = "import sys\nsys.modules['pyspark'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(finder)
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    command = [sys.executable, "-m", "tfmq.spark.pipelines.archive", "orders", "--to", "x"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr == (
        "tfmq: tfmq.spark needs pyspark, which is not installed: pip install 'pyspark>=4.2' pyarrow numpy matplotlib\n"
    )


@pytest.mark.long
def test_without_java_it_says_what_it_needs(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "from tfmq.spark.pipelines.command import start_session\n"
        "from tfmq.errors import NotSupported\n"
        "try: start_session('trial', None)\n"
        "except NotSupported as error: print(error)\n"
    )
    environment = {"PATH": "/nowhere", "JAVA_HOME": "/nowhere"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "needs a Java runtime, 17 or later" in ran.stdout, ran.stderr


def test_every_pipeline_has_its_section_and_its_help_on_the_page() -> None:
    page = (ROOT / "docs" / "pipelines.md").read_text()
    assert [name for name in NAMES if f"\n## {name}\n" not in page] == []
    there = [name for name in NAMES if find_spec(f"tfmq.spark.pipelines.{name}") is not None]
    helps = [f"Usage: python -m tfmq.spark.pipelines.{name} " for name in there]
    assert [text for text in helps if text not in page] == []


# Which broker or folder is meant.


def test_a_broker_is_named_or_in_the_environment_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFMQ_SERVERS", raising=False)
    assert parse_address(None, None, 5.0) == SourceAddress("127.0.0.1:8367", None, 5.0)
    monkeypatch.setenv("TFMQ_SERVERS", "b:1")
    assert parse_address(None, None, 5.0).servers == "b:1"
    assert parse_address("c:2", None, 5.0).servers == "c:2"
    monkeypatch.setenv("TFMQ_PASSWORD", "p@ss")  # tasks have another environment
    assert parse_address("c:2", None, 5.0).servers == "c:2"
    assert parse_address("tfmq://me@c:2", None, 5.0).servers == "tfmq://me:p%40ss@c:2"


def test_a_folder_is_named_whole_and_never_beside_a_broker(tmp_path: Path) -> None:
    assert parse_address(None, tmp_path / "x" / ".." / "data", 5.0).path == str(tmp_path / "data")
    with pytest.raises(BadRequest, match="either --servers or --path"):
        parse_address("b:1", tmp_path, 5.0)
