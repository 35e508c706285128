"""`tfmq completion` prints what a shell can evaluate."""

import logging
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tfmq.admin import Admin
from tfmq.cli.main import commands, main
from tools.rigs.live_server import LiveServer


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    result = CliRunner().invoke(commands, ["completion", shell])
    assert result.exit_code == 0
    assert "_TFMQ_COMPLETE" in result.output


def test_another_shell_is_wrong_usage() -> None:
    result = CliRunner().invoke(commands, ["completion", "csh"])
    assert result.exit_code == 2
    assert "csh" in result.output


def completed(
    words: str, servers: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What bash is offered for the last of the words; nothing else is written."""
    given = words.split(" ")
    logger = logging.getLogger("tfmq")
    monkeypatch.setattr(logger, "propagate", True)  # what `main` changes is as before when the test is over
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setenv("_TFMQ_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(given) - 1))
    monkeypatch.setenv("TFMQ_SERVERS", servers)
    monkeypatch.setattr(sys, "argv", ["tfmq"])
    with pytest.raises(SystemExit):
        main()
    shown = capfd.readouterr()
    assert shown.err == ""
    return [line.removeprefix("plain,") for line in shown.out.split()]


def test_the_shell_completes_topics_and_groups(
    topic: str, broker: LiveServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"completed-by-the-shell-{topic}"  # other tests have topics at this broker, of names like its own
    with Admin(broker.address) as admin:
        admin.create_topic(topic)
        admin.reset_group(f"readers-of-{topic}", topic, "latest", create=True)
    for words in ("read", "send", "topic show", "delay list --topic", "group reset some", "dlq list --topic"):
        assert completed(f"tfmq {words} {topic[:30]}", broker.address, capfd, monkeypatch) == [topic], words
    for words in ("group show", "read orders -g", "group reset"):
        found = completed(f"tfmq {words} readers-of-{topic[:30]}", broker.address, capfd, monkeypatch)
        assert found == [f"readers-of-{topic}"], words


def test_without_a_broker_nothing_is_offered_and_nothing_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed("tfmq read or", "127.0.0.1:1", capfd, monkeypatch) == []
    assert completed("tfmq read or", "file:/nowhere", capfd, monkeypatch) == []


@pytest.mark.parametrize("words", ["read", "group show", "delay show", "schedule show", "tx show"])
def test_completing_starts_no_broker(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed(f"tfmq {words} d", f"file:{tmp_path / 'data'}", capfd, monkeypatch) == []
    assert not (tmp_path / "data").exists()
