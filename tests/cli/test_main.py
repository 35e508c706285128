"""The one place where an error becomes a sentence and an exit code."""

import os
import re
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import click
import pytest

import tfmq
from journal.errors import Corrupt
from tests import paths
from tests.cli.conftest import Cli
from tfmq import errors
from tfmq.cli import main
from tfmq.client.send.batch import Batch, Delivery
from tools.rigs.live_server import LiveServer

ROOT = paths.ROOT


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    @click.command("status")
    def status() -> None:
        raise error

    monkeypatch.setattr("tfmq.cli.status.status", status)


def lost(*reasons: tfmq.TfmqError) -> errors.DeliveryFailed:
    deliveries = []
    for reason in reasons:
        batch = Batch(None, "orders", 0, 100, b"", 0.0)  # type: ignore[arg-type]
        batch.set_failed(reason)
        deliveries.append(Delivery((batch, 0)))
    return errors.DeliveryFailed(f"{len(reasons)} lost", deliveries=deliveries)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (errors.DiskFull(), 1, "no space left"),
        (errors.BadRequest("'a/b' is no name"), 2, "'a/b' is no name"),
        (errors.NotARecord(), 1, "No record starts"),
        (errors.ConfigError("wrong"), 2, "wrong"),
        (errors.ConnectionFailed("nobody there"), 3, "nobody there"),
        (errors.Damaged("a hole"), 4, "a hole"),
        (Corrupt("/data/x", 1, 2, "a flipped bit"), 4, "a flipped bit"),
        (lost(errors.ConnectionFailed("nobody there")), 3, "tfmq: nobody there"),
        (lost(errors.DiskFull(), errors.DiskFull()), 1, "2 lost"),
        (PermissionError(13, "Permission denied", "/etc/shadow"), 1, "/etc/shadow"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), 2, "not UTF-8"),
        (click.UsageError("give a topic"), 2, "give a topic"),
        (click.ClickException("not today"), 1, "tfmq: not today"),
        (click.Abort(), 1, "stopped"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_expected_error_is_a_sentence_and_a_code(
    offline: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    failing(monkeypatch, error)
    ran = offline("status")
    assert (ran.code, ran.out) == (code, b"")
    assert words in ran.err
    assert "Traceback" not in ran.err


def test_the_pages_have_every_exit_code() -> None:
    codes = (main.NOT_DONE, main.WRONG_USAGE, main.NOT_REACHED, main.DAMAGE_FOUND, main.INTERRUPTED)
    for page in ("cli.md", "operations.md"):
        (said,) = (line for line in (ROOT / "docs" / page).read_text().splitlines() if "0 done, 1 not done" in line)
        assert all(f" {code} " in said for code in codes)


def test_a_mistake_of_ours_keeps_its_traceback(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        offline("status")


def test_a_misspelt_command_gets_a_hint(offline: Cli) -> None:
    ran = offline("sned", "orders", "x")
    assert ran.code == 2
    assert "there is no command 'sned'. Did you mean 'send'?" in ran.err


@pytest.mark.parametrize("command", [*main.COMMANDS, "topic create", "group reset", "log verify"])
def test_every_command_has_help_with_an_example(offline: Cli, command: str) -> None:
    ran = offline(*command.split(), "--help")
    assert ran.code == 0
    assert "Usage: " in ran.out.decode()
    if command not in ("topic", "group", "log", "tx"):
        assert "Example" in ran.out.decode()


def test_the_version_is_printed(offline: Cli) -> None:
    assert offline("--version").out.decode().startswith("tfmq ")


def test_the_folder_of_the_docs_is_printed(offline: Cli) -> None:
    """Errors name pages of the docs: a reader must be able to open them."""
    assert offline("--docs").out.decode() == f"{ROOT}\n" and (ROOT / "docs" / "README.md").exists()


def test_an_installed_wheel_knows_where_its_docs_are(
    offline: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, docs = tmp_path / "lib" / "site-packages", tmp_path / "share" / "doc" / "tfmq" / "docs"
    (site / "tfmq-9.dist-info").mkdir(parents=True)
    docs.mkdir(parents=True)
    (docs / "README.md").touch()
    (site / "tfmq-9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tfmq\nVersion: 9\n")
    record = site / "tfmq-9.dist-info" / "RECORD"
    record.write_text("tfmq/cli/main.py,,\n../../share/doc/tfmq/docs/README.md,,\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(main, "__file__", str(site / "tfmq" / "cli" / "main.py"))
    assert offline("--docs").out.decode() == f"{docs.parent}\n"
    (docs / "README.md").unlink()
    without = offline("--docs")
    assert without.code == 1 and "has no docs" in without.err


def test_the_wheel_has_every_page() -> None:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    shipped = {
        (target, path.relative_to(ROOT))
        for target, patterns in parser["options.data_files"].items()
        for pattern in re.split(r"[,\s]+", patterns)
        for path in ROOT.glob(pattern)
    }
    wanted = [*(ROOT / "docs").rglob("*.*"), *(ROOT / "conf").iterdir(), *(ROOT / "examples").rglob("*.md")]
    pages = [page.relative_to(ROOT) for page in wanted]
    assert [page for page in pages if (f"share/doc/tfmq/{page.parent}", page) not in shipped] == []


@pytest.mark.long
def test_no_broker_is_code_3_for_every_command_that_needs_one(offline: Cli) -> None:
    for command in (["status"], ["read", "orders"]):
        ran = offline(*command, "--servers", "127.0.0.1:1")
        assert ran.code == 3, command
        assert "127.0.0.1:1" in ran.err
        assert len(ran.err.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_no_reason_for_a_traceback(closed: str, broker: LiveServer, tmp_path: Path) -> None:
    program = f"{shlex.quote(sys.executable)} -c 'from tfmq.cli.main import main; main()' status"
    ran = subprocess.run(
        ["bash", "-c", f"{program} --servers {broker.address} {closed}; echo $? >code"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr.decode()
    assert (tmp_path / "code").read_text() == "0\n"


@pytest.mark.long
def test_a_full_disk_of_the_output_is_not_reported_as_the_broker_s(broker: LiveServer, topic: str) -> None:
    program = f"{shlex.quote(sys.executable)} -c 'from tfmq.cli.main import main; main()'"
    ran = subprocess.run(
        ["bash", "-c", f"{program} send {topic} x --json --servers {broker.address} >/dev/full"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "the output, or a file here, could not be written" in ran.stderr.decode()
    assert "stays done" in ran.stderr.decode() and len(ran.stderr.splitlines()) == 1
