"""`tfmq-server`: the readiness line, what stands in the way of a start, each as one sentence and no traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from journal.errors import Corrupt, Full, JournalError, Locked, NewerFormat
from tests.server.wire import Process, Wire, running
from tfmq.config import Config, load
from tfmq.errors import ConfigError, NotAllowed
from tfmq.protocol import commands
from tfmq.server.main import _announce, _stop, exit_code, main, notify_systemd, reload, startup_sentence


def refused(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and the one line of a start that does not happen."""
    code, out, err = Process(*arguments, environment=environment).finish()
    assert out == ""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("tfmq-server: ")]
    assert len(lines) == 1, err
    return code, lines[0]


@pytest.mark.long
def test_one_line_on_standard_output_says_where_it_is_ready(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, (host, port)):
        assert host == "127.0.0.1"
        assert Wire((host, port)).ask(commands.Ping())[0] > 0
        code, out, log = process.stop()
    assert (code, out) == (0, "")
    assert "stopping on SIGTERM" in log
    assert "stopped" in log


@pytest.mark.long
def test_systemd_is_notified(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(30)
        process = Process(
            "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", environment={"NOTIFY_SOCKET": path}
        )
        process.ready()
        assert manager.recv(100) == b"READY=1"
        process.process.terminate()
        assert manager.recv(100) == b"STOPPING=1"
        assert process.finish()[0] == 0


@pytest.mark.long
def test_a_second_server_on_the_folder_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, _):
        code, line = refused("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
        assert code == 1
        assert "in use by another tfmq server" in line
        assert str(process.process.pid) in line


@pytest.mark.long
def test_a_port_taken_by_another_tfmq_is_said_so(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (_, (host, port)):
        code, line = refused("--data", str(tmp_path / "other"), "--listen", f"{host}:{port}")
        assert code == 1
        assert f"{host}:{port} is taken: another tfmq server (tfmq " in line


def test_a_misspelt_key_is_refused_with_the_likely_one(tmp_path: Path) -> None:
    code, line = refused("--data", str(tmp_path), "--set", "flush.mesages=5")
    assert code == 2
    assert 'did you mean "flush.messages"' in line


def test_an_address_that_others_reach_needs_leave(tmp_path: Path) -> None:
    code, line = refused("--data", str(tmp_path), "--listen", "0.0.0.0:0")
    assert code == 2
    assert "server.insecure = true" in line
    with running(tmp_path / "data", "--listen", "0.0.0.0:0", "--set", "server.insecure=true") as (_, address):
        assert Wire(("127.0.0.1", address[1])).ask(commands.Ping())


@pytest.mark.long
def test_a_file_in_place_of_the_data_folder_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    code, line = refused("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    assert code == 1
    assert "no folder" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="cannot be had here: root has rights everywhere")
def test_a_folder_without_rights_is_said_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code, line = refused("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    assert code == 1
    assert "no rights" in line


def test_unknown_options_are_wrong_usage() -> None:
    code, _, err = Process("--no-such-option").finish()
    assert code == 2
    assert "--no-such-option" in err


def test_check_config_shows_no_password_and_refuses_what_a_start_refuses() -> None:
    url = "postgresql+psycopg://ann:secret-of-ann@127.0.0.1:1/tfmq"
    code, out, err = Process("--check-config", "--set", f"replicate.url={url}").finish()
    assert code == 0 and "ann:***@127.0.0.1:1/tfmq" in out and "secret-of-ann" not in out + err
    code, out, err = Process("--check-config", "--set", "replicate.url=file:///no/such/folder").finish()
    assert code == 2 and out == "" and "replicate.url: The store file:///no/such/folder is no folder" in err


def test_check_config_prints_every_value_and_where_it_is_from(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[flush]\nmessages = 7\n")
    process = Process(
        "--config", str(file), "--check-config", "--set", "flush.seconds=3", environment={"TFMQ_TOPICS_PARTITIONS": "4"}
    )
    code, out, _ = process.finish()
    origins = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert code == 0
    assert origins["flush.messages"] == ["7", str(file)]
    assert origins["flush.seconds"] == ["3", "--set flush.seconds"]
    assert origins["topics.partitions"] == ["4", "TFMQ_TOPICS_PARTITIONS"]
    assert origins["server.listen"][1] == "default"


@pytest.mark.long
def test_the_log_is_json_where_that_is_asked_for(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--log-json") as (process, _):
        log = process.stop()[2]
    entries = [json.loads(line) for line in log.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(entries[0])


@pytest.mark.long
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, address):
        held = [Wire(address) for _ in range(3)]
        os.kill(process.process.pid, signal.SIGTERM)
        os.kill(process.process.pid, signal.SIGINT)
        code, _, _ = process.finish()
        assert code in (0, 1)
        assert len(held) == 3
    with running(tmp_path / "data") as (_, address):
        assert Wire(address).ask(commands.Ping())


@pytest.mark.long
def test_sighup_reads_the_configuration_again_and_never_ends_the_server(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[retention]\nseconds = 60\n")
    with running(tmp_path / "data", "--config", str(file)) as (process, address):

        def hang_up(word: str) -> str:
            """The line of the log that answers the signal."""
            process.process.send_signal(signal.SIGHUP)
            assert process.process.stderr is not None
            line = next(line for line in process.process.stderr if "SIGHUP" in line)
            assert word in line
            return line

        wire = Wire(address)
        hang_up("nothing that can change at run time has changed")
        file.write_text(
            '[server]\nlog_level = "debug"\nlisten = "127.0.0.1:1"\n'
            "[retention]\nseconds = 3600\n[limits]\nconnections = 1\n"
        )
        line = hang_up('server.log_level = "debug" (was "info"), retention.seconds = 3600 (was 60)')
        assert "needs a restart: server.listen" not in line, "--listen comes before the file"
        settings = wire.ask(commands.Status())[0]["settings"]
        assert settings["retention.seconds"] == 3600 and settings["limits.connections"] == 1
        with pytest.raises(AssertionError, match=r"limits\.connections"):
            Wire(address)
        file.write_text("[retention]\nsecond = 1\n")
        line = hang_up("the configuration stays as it was: There is no key retention.second")
        assert " ERROR " in line
        file.write_text('[server]\nzookeeper = "127.0.0.1:1"\n')
        assert "needs a restart: server.zookeeper" in hang_up("retention.seconds = 0 (was 3600)")
        assert wire.ask(commands.Ping())
        wire.close()
        assert process.stop()[0] == 0


def test_a_wrong_configuration_changes_nothing_and_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the valid keys beside the wrong one. The server gets the first configuration only, and never a mixture."""
    levels: list[str] = []
    monkeypatch.setattr("tfmq.server.main.set_up_logging", lambda level, as_json: levels.append(level))
    given: list[Config] = []
    service = SimpleNamespace(config=load(sets=["retention.seconds=60"]), reload=given.append)
    file = tmp_path / "server.toml"
    wrong = {
        '[server]\nlog_level = "debug"\n[retention]\nseconds = 5\nsecond = 5\n': "did you mean",
        '[server]\nlog_level = "debug"\n[retention]\nseconds = "often"\n': "retention.seconds must be",
        "[retention\nseconds = 5\n": "is not TOML",
        '[retention]\nseconds = 5\n[limits]\nfetch_bytes = "64MiB"\n': "limits.fetch_bytes must be",
    }
    for text, words in wrong.items():
        file.write_text(text)
        caplog.clear()
        reload(service, partial(load, str(file), again=True))  # type: ignore[arg-type]
        (record,) = caplog.records
        assert record.levelname == "ERROR" and words in record.getMessage()
        assert record.getMessage().startswith("SIGHUP: the configuration stays as it was: ")
    file.unlink()
    reload(service, partial(load, str(file), again=True))  # type: ignore[arg-type]
    assert "cannot be read" in caplog.records[-1].getMessage()
    assert given == [] and levels == []
    file.write_text('[server]\nlog_level = "debug"\n[retention]\nseconds = 5\n[delay]\ntick_ms = 20\n')
    with caplog.at_level("INFO"):
        reload(service, partial(load, str(file), again=True))  # type: ignore[arg-type]
    assert caplog.records[-1].getMessage() == (
        'SIGHUP: server.log_level = "debug" (was "info"), retention.seconds = 5 (was 60);'
        " needs a restart: delay.tick_ms"
    )
    assert levels == ["debug"]
    assert [(each.retention.seconds, each.delay.tick_ms) for each in given] == [(5, 10)]


def test_help_shows_an_example() -> None:
    code, out, _ = Process("--help").finish()
    assert code == 0
    assert "tfmq-server --data" in out
    assert "--check-config" in out


def test_the_version_is_printed() -> None:
    code, out, _ = Process("--version").finish()
    assert code == 0
    assert out.startswith("tfmq-server")


@pytest.mark.long
def test_a_folder_with_other_things_in_it_is_not_taken_for_data(tmp_path: Path) -> None:
    for name in ("todo.txt", "zebra.txt"):
        (tmp_path / name).write_text("")
    code, line = refused("--data", str(tmp_path), "--listen", "127.0.0.1:0")
    assert code == 2
    assert "(todo.txt and 1 more)" in line and "empty folder" in line
    assert sorted(os.listdir(tmp_path)) == ["todo.txt", "zebra.txt"]


# The line on standard output, and systemd's datagram.


def test_the_line_is_exactly_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _announce(str(tmp_path), "ready", "127.0.0.1:8367")
    assert capsys.readouterr().out == "ready 127.0.0.1:8367\n"


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified_where_it_asks(tmp_path: Path, abstract: bool) -> None:
    path = f"@tfmq-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + path[1:] if abstract else path)
        manager.settimeout(10)
        assert notify_systemd("READY=1", {"NOTIFY_SOCKET": path})
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_no_client_is_notified_without_a_request(environment: dict[str, str]) -> None:
    assert not notify_systemd("READY=1", environment)


# Every reason not to start is one sentence that says what to do.


def system(number: int, path: str = "/data/x") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Locked("/data/lock", "4711"), ["/data", "process 4711", "--data"]),
        (Locked("/data/lock"), ["another tfmq server", "--data"]),
        (NewerFormat("/data/meta/format", 9, 1), ["newer version", "9", "up to 1"]),
        (Full("no space"), ["no space left", "Make some"]),
        (
            Corrupt("/data/meta/node", 0, 9, "its checksum"),
            ["damaged", "/data/meta/node", "tfmq log repair /data", "backup"],
        ),
        (
            Corrupt("/data/transactions/0000000000000003.journal", 64, 96, "its checksum"),
            ["journal of transactions", "from 64 to 96", "tfmq log verify /data/transactions", "Nothing was changed"],
        ),
        (JournalError("odd"), ["cannot start", "odd"]),
        (system(errno.EACCES, "/no-such-entry"), ["may not use /:", "no rights"]),
        (system(errno.ENOENT, "/proc/x"), ["/proc/x cannot be created: No such file or directory.", "--data"]),
        (system(errno.EROFS), ["read-only"]),
        (system(errno.ENOSPC), ["no space left"]),
        (system(errno.ENOTDIR), ["no folder"]),
        (system(errno.EISDIR), ["/data/x is a folder", "Move it away", "tfmq log repair /data"]),
        (Corrupt("/data/delay", 0, 0, "it is missing. Put it back, then start again"), ["not whole", "start again"]),
        (system(errno.EMFILE), ["ulimit -n"]),
        (system(errno.EIO), ["cannot start", "/data/x"]),
        (NotAllowed("The port is taken."), ["The port is taken."]),
    ],
)
def test_a_reason_is_one_sentence_or_two_with_what_to_do(error: BaseException, words: list[str]) -> None:
    said = startup_sentence(error, "/data")
    assert said is not None
    assert all(word in said for word in words), said
    assert "\n" not in said
    assert exit_code(error) == 1


def test_missing_rights_are_reported_for_the_folder_that_exists(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "meta", tmp_path / "meta" / "version"):
        said = startup_sentence(system(errno.EACCES, str(path)), str(tmp_path))
        assert said is not None and said.startswith(f"The server may not use {tmp_path}: ")


def test_a_listen_address_whose_host_does_not_resolve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, *rest: object, **options: object) -> list[object]:
        if host == "nohost.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for host, found in (("nohost.example", True), ("192.0.2.1", False), ("", False)):
        ran = CliRunner().invoke(main, ["--listen", f"{host}:8398"])
        assert ran.exit_code == 2 and "server.insecure = true" in ran.stderr
        assert ("the host 'nohost.example' is not known (Name or service not known)" in ran.stderr) == found
    assert "not known" not in CliRunner().invoke(main, ["--set", "flush.mesages=1"]).stderr


def test_a_wrong_configuration_is_wrong_usage() -> None:
    assert exit_code(ConfigError("x")) == 2


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    assert startup_sentence(ZeroDivisionError(), "/data") is None


def test_a_primary_that_learns_during_its_stop_that_its_term_has_ended_stops(tmp_path: Path) -> None:
    ended: list[bool] = []
    service: Any = SimpleNamespace(on_restart=None)
    service.stop = lambda done: service.on_restart("another server is primary")
    _stop(SimpleNamespace(stop=lambda: ended.append(True)), service, str(tmp_path), "SIGTERM")
    assert ended == [True]
