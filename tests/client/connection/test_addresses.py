"""`file:PATH`: which broker is joined or started, and what is reported; real locks, simulated brokers."""

from __future__ import annotations

import fcntl
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

from journal.disk import RealDisk
from tfmq.client.connection import addresses
from tfmq.client.connection.addresses import (
    ADDRESS_NAME,
    LOCK_NAME,
    LOG_NAME,
    BrokerAddress,
    Credentials,
    LocalBrokerAddress,
    TlsFiles,
    data_folder_of,
    parse_servers,
    with_password,
    without_password,
)
from tfmq.data_dir import STARTING_NAME
from tfmq.errors import BadRequest, ConnectionFailed
from tfmq.replication.local_state import LocalState, LocalStateFile, Role


class Brokers:
    """Starts nothing; holds what a broker would hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = 0
        self.held: list[int] = []

    def start(self, path: str, descriptor: int) -> None:
        self.started += 1
        self.held.append(os.dup(descriptor))  # as the process that inherits it

    def lock(self) -> None:
        descriptor = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, b"4711\n", 0)
        self.held.append(descriptor)

    def ready(self, address: str = "127.0.0.1:1234", process: int = 4711) -> None:
        (self.path / ADDRESS_NAME).write_text(f"{address} {process}\n")

    def die(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)
        self.held.clear()


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    return Brokers(tmp_path)


def not_ready(folder: LocalBrokerAddress) -> str:
    with pytest.raises(ConnectionFailed) as caught:
        folder.resolve()
    assert caught.value.retriable
    return caught.value.sentence


def test_one_that_runs_is_joined(brokers: Brokers) -> None:
    brokers.lock()
    brokers.ready()
    folder = LocalBrokerAddress(str(brokers.path), brokers.start)
    assert folder.resolve() == BrokerAddress("127.0.0.1", 1234)
    assert brokers.started == 0


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("0.0.0.0:5", BrokerAddress("127.0.0.1", 5)),
        ("[::]:5", BrokerAddress("::1", 5)),
        ("[::1]:5", BrokerAddress("::1", 5)),
        ("here:5", BrokerAddress("here", 5)),
    ],
)
def test_one_that_listens_everywhere_is_reached_on_this_machine(
    brokers: Brokers, said: str, meant: BrokerAddress
) -> None:
    brokers.lock()
    brokers.ready(said)
    assert LocalBrokerAddress(str(brokers.path), brokers.start).resolve() == meant


def test_the_first_starts_one_and_the_others_wait_for_it(brokers: Brokers) -> None:
    folders = [LocalBrokerAddress(str(brokers.path), brokers.start) for _ in range(5)]
    for _ in range(3):
        for folder in folders:
            assert "starts" in not_ready(folder)
    assert brokers.started == 1
    brokers.lock()
    assert all("not ready" in not_ready(folder) for folder in folders)
    brokers.ready()
    assert {folder.resolve() for folder in folders} == {BrokerAddress("127.0.0.1", 1234)}
    assert brokers.started == 1


def test_what_a_kill_left_is_not_believed(brokers: Brokers) -> None:
    brokers.lock()
    brokers.ready()
    folder = LocalBrokerAddress(str(brokers.path), brokers.start)
    folder.resolve()
    brokers.die()
    assert "starts" in not_ready(folder)
    assert brokers.started == 1
    assert not (brokers.path / ADDRESS_NAME).exists()
    brokers.lock()
    brokers.ready("127.0.0.1:77")
    assert folder.resolve().port == 77


def test_the_address_of_the_one_before_is_not_that_of_the_one_that_starts(brokers: Brokers) -> None:
    brokers.ready(process=99)
    brokers.lock()  # started by hand, on its way to be ready
    assert "held by process 4711" in not_ready(LocalBrokerAddress(str(brokers.path), brokers.start))
    assert brokers.started == 0


def test_a_start_that_fails_is_reported_with_its_last_words_and_tried_again_by_the_next(brokers: Brokers) -> None:
    folder = LocalBrokerAddress(str(brokers.path), brokers.start)
    not_ready(folder)
    (brokers.path / LOG_NAME).write_text("tfmq-server: starting\ntfmq-server: the disk is on fire.\n")
    brokers.die()
    with pytest.raises(ConnectionFailed, match="the disk is on fire") as caught:
        folder.resolve()
    assert not caught.value.retriable
    not_ready(folder)
    assert brokers.started == 2


def test_a_broker_that_cannot_be_started_frees_the_way_for_others(tmp_path: Path) -> None:
    def refuse(path: str, descriptor: int) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(ConnectionFailed, match="No such file") as caught:
        LocalBrokerAddress(str(tmp_path), refuse).resolve()
    assert not caught.value.retriable
    brokers = Brokers(tmp_path)
    not_ready(LocalBrokerAddress(str(tmp_path), brokers.start))
    assert brokers.started == 1


def test_a_path_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConnectionFailed, match="cannot be used for a broker") as caught:
        LocalBrokerAddress(str(tmp_path / "file" / "below")).resolve()
    assert not caught.value.retriable


def test_a_path_is_that_of_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert str(LocalBrokerAddress("data")) == f"file:{tmp_path}/data"
    assert str(LocalBrokerAddress("~/data")) == "file:/home/me/data"


@pytest.mark.parametrize("said", ["127.0.0.1:99x", "127.0.0.1:", "", "127.0.0.1:70000"])
def test_an_address_that_cannot_be_read_is_none(brokers: Brokers, said: str) -> None:
    brokers.lock()
    brokers.ready(said)
    assert "has no address yet" in not_ready(LocalBrokerAddress(str(brokers.path), brokers.start))
    assert brokers.started == 0


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(BadRequest, match="path"):
        LocalBrokerAddress("a\0b")


@pytest.mark.parametrize("name", [LOG_NAME, STARTING_NAME])
def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path, name: str) -> None:
    victim, data = tmp_path / "victim", tmp_path / "data"
    victim.write_text("mine")
    data.mkdir()
    (data / name).symlink_to(victim)
    with pytest.raises(ConnectionFailed, match="cannot be used") as caught:
        LocalBrokerAddress(str(data)).resolve()
    assert not caught.value.retriable
    assert victim.read_text() == "mine"


def test_a_folder_that_is_made_is_not_for_everybody(tmp_path: Path, brokers: Brokers) -> None:
    before = os.umask(0)
    try:
        not_ready(LocalBrokerAddress(str(tmp_path / "new"), brokers.start))
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o027 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="cannot be had here: another user")
def test_a_folder_of_another_user_is_reported_in_one_sentence() -> None:
    with tempfile.TemporaryDirectory() as data:
        folder = LocalBrokerAddress(data)
        os.seteuid(65534)
        try:
            with pytest.raises(ConnectionFailed, match="be used for a broker: Permission denied") as caught:
                folder.resolve()
        finally:
            os.seteuid(0)
    assert not caught.value.retriable


def test_a_shell_that_starts_nothing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no process can be had any more."""
    monkeypatch.setattr(addresses, "_BACKGROUND_SCRIPT", "exit 2")
    with pytest.raises(ConnectionFailed, match="cannot be started") as caught:
        LocalBrokerAddress(str(tmp_path)).resolve()
    assert not caught.value.retriable


def test_the_broker_that_is_started_finds_the_package_of_this_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_BACKGROUND_SCRIPT", 'printf %s "$4" >package-folder')
    with pytest.raises(ConnectionFailed):
        LocalBrokerAddress(str(tmp_path)).resolve()
    assert (Path((tmp_path / "package-folder").read_text()) / "tfmq" / "server" / "main.py").exists()


def test_a_folder_with_other_things_in_it_is_not_taken(brokers: Brokers) -> None:
    (brokers.path / "todo.txt").write_text("water the flowers\n")
    (brokers.path / "todo-1").mkdir()
    with pytest.raises(ConnectionFailed, match=r"has other files in it \(todo-1 and 1 more\)") as caught:
        LocalBrokerAddress(str(brokers.path), brokers.start).resolve()
    assert not caught.value.retriable
    assert brokers.started == 0
    assert sorted(each.name for each in brokers.path.iterdir()) == ["todo-1", "todo.txt"]


@pytest.mark.parametrize("role", ["primary", "standby"])
def test_a_folder_of_a_server_with_replicas_is_not_taken(
    brokers: Brokers, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that only asks would otherwise start a broker whose changes reach no replica."""
    (brokers.path / "meta").mkdir()
    LocalStateFile(RealDisk(), str(brokers.path)).write(LocalState("00ff", role))
    folder = LocalBrokerAddress(str(brokers.path), brokers.start)
    with pytest.raises(ConnectionFailed, match=f"is the folder of a {role}, .*: start tfmq-server with") as caught:
        folder.resolve()
    assert not caught.value.retriable and brokers.started == 0
    monkeypatch.setenv("TFMQ_REPLICATE_URL", "s3://bucket/orders")
    assert "starts" in not_ready(folder) and brokers.started == 1


@pytest.mark.parametrize(
    "names", [[], ["lost+found", "server.log"], ["starting", "lock"], ["meta", "a", "b"], ["orders-0/log.mark"]]
)
def test_an_empty_folder_is_taken_and_one_of_a_broker(brokers: Brokers, names: list[str]) -> None:
    for name in names:
        (brokers.path / name).parent.mkdir(exist_ok=True)
        (brokers.path / name).touch()
    assert "starts" in not_ready(LocalBrokerAddress(str(brokers.path / "."), brokers.start))
    assert brokers.started == 1


# Addresses as users write them.


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("broker:9000", [("broker", 9000)]),
        ("broker", [("broker", 8367)]),
        (":9000", [("127.0.0.1", 9000)]),
        ("a:1, b:2,,a:1", [("a", 1), ("b", 2)]),
        ("tfmq://broker:1/", [("broker", 1)]),
        (["a:1", "b:2,c:3"], [("a", 1), ("b", 2), ("c", 3)]),
        ("[::1]:99", [("::1", 99)]),
        ("[::1]", [("::1", 8367)]),
    ],
)
def test_what_is_understood(written: str | list[str], meant: list[tuple[str, int]]) -> None:
    assert parse_servers(written) == tuple(BrokerAddress(*each) for each in meant)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("", "list of servers is empty"),
        ([], "list of servers is empty"),
        ("broker:http", "'http' in 'broker:http' is not a port"),
        ("broker:0", "1 to 65535"),
        ("broker:70000", "1 to 65535"),
        ("http://broker", "http:// is another protocol"),
        ("::1:99", "more than one colon"),
        ("[::1", "an IPv6 one"),
        ("broker/path", "without a path"),
        ("8367", "^'8367' is a port: write 127.0.0.1:8367"),
        ("broker, 8368", "^'8368' is a port: write 127.0.0.1:8368"),
    ],
)
def test_what_is_not(written: str | list[str], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence.replace("[", r"\[")):
        parse_servers(written)


ME, YOU = Credentials("me", "secret"), Credentials("you", "s3cret")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tfmq://me:secret@broker", [("broker", 8367, None, ME)]),
        ("me:secret@broker:1", [("broker", 1, None, ME)]),
        ("tfmqs://me:secret@[::1]:2?ca=x@y", [("::1", 2, TlsFiles("x@y"), ME)]),
        ("tfmq://me:a%40b%3A%2F%2C%3F%25%20c@h", [("h", 8367, None, Credentials("me", "a@b:/,?% c"))]),
        ("tfmq://me:a:b#c@h", [("h", 8367, None, Credentials("me", "a:b#c"))]),
        ("tfmq://me:%C3%A4%c3%a4@h", [("h", 8367, None, Credentials("me", "ää"))]),
        ("a,tfmq://me:secret@b,c", [("a", 8367, None, None), ("b", 8367, None, ME), ("c", 8367, None, ME)]),
        (["me:secret@a", "b,you:s3cret@c", "d"], [(n, 8367, None, ME if n < "c" else YOU) for n in "abcd"]),
        ("you@a", [("a", 8367, None, Credentials("you", "of-the-environment"))]),
        ("you:@a", [("a", 8367, None, Credentials("you", "of-the-environment"))]),
        ("me:secret@", [("127.0.0.1", 8367, None, ME)]),
    ],
)
def test_addresses_with_a_user(
    written: str | list[str], meant: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFMQ_PASSWORD", "of-the-environment")
    assert parse_servers(written) == tuple(BrokerAddress(*each) for each in meant)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("tfmq://me@broker", r"user me has no password: set \$TFMQ_PASSWORD, or write tfmq://me:PASSWORD@HOST:PORT"),
        ("tfmqs://me@broker", r"write tfmqs://me:PASSWORD@HOST:PORT"),
        ("tfmq://:secret@broker", "an @ without a user"),
        ("tfmq://m%2fe:secret@broker", "cannot be one: a name has 1 to 249"),
        ("tfmq://me:secret@secret@broker", "must be percent-encoded: .* %40 for @"),
        ("tfmq://me:secret%@broker", "%25 for %"),
        ("tfmq://me:secret%4@broker", "%25 for %"),
        ("tfmq://me:secret%ff@broker", "UTF-8"),
        ("tfmq://me:sec/secret@broker", "%2F for /"),
        ("tfmq://me:secret,secret@broker", "%2C for a comma"),
        ("tfmqs://me:1?secret@broker", r"%3F for \?"),
        ("tfmqs://a,tfmqs://me:1?ca=x&secret@broker", r"%3F for \?"),
        ("tfmqs://me:secret@a?ca=x.pem,tfmqs://me:secret@b:8367", "the files follow the last one"),
        ("tfmqs://me:secret@a?ca=x.pem,me:secret@b", "the files follow the last one"),
        ("kafka://me:secret@broker", "write tfmq://USER:PASSWORD@HOST:PORT or tfmqs://"),
        ("me:secret@:::", "write tfmq://USER:PASSWORD@HOST:PORT"),
        ("me:secret@broker:secret", "write tfmq://USER:PASSWORD@HOST:PORT"),
        ("me:secret@broker?ca=x", "write tfmqs://"),
        (["file:secret", "me:secret@broker"], "not shown.*: file: must be"),
        ([b"me:secret@broker"], "not list"),
    ],
)
def test_a_wrong_address_with_a_user_is_not_shown(written: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFMQ_PASSWORD", raising=False)
    with pytest.raises(BadRequest, match=sentence) as caught:
        if data_folder_of(written) is None:
            parse_servers(written)
    assert type(caught.value) is BadRequest, "wrong usage: the exit code 2"
    assert "secret" not in "".join(traceback.format_exception(caught.value, chain=True)).replace(repr(written), "")


def test_no_password_is_printed() -> None:
    (address,) = parse_servers("tfmqs://me:secret@a")
    assert str(address) == f"{address}" == "tfmqs://me@a:8367"
    assert "secret" not in repr(address) and "secret" not in repr([address]) and "me" in repr(address)
    assert str(parse_servers("me:secret@[::1]")[0]) == "tfmq://me@[::1]:8367"


def test_the_password_of_an_address_for_another_process() -> None:
    for written, with_it in (
        ("me@a", "me:p%40%2F@a"),
        ("tfmqs://me@a,you:s3@b?ca=c@d", "tfmqs://me:p%40%2F@a,you:s3@b?ca=c@d"),
        ("a:1", "a:1"),
        ("file:a@b", "file:a@b"),
    ):
        assert with_password(written, "p@/") == with_it
    assert without_password("tfmq://me:p%40@a,you:q@b,c") == "tfmq://me@a,you@b,c"
    assert without_password("me@a:1,b?ca=x:y@z") == "me@a:1,b?ca=x:y@z"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tfmqs://broker", [("broker", 8367, TlsFiles())]),
        ("tfmqs://a:1,b?ca=/x.pem", [("a", 1, TlsFiles("/x.pem")), ("b", 8367, TlsFiles("/x.pem"))]),
        ("tfmqs://[::1]:2/?certificate=c%20d&key=k", [("::1", 2, TlsFiles("", "c d", "k"))]),
        ("tfmqs://a?ca=~/x.pem", [("a", 8367, TlsFiles(os.path.expanduser("~/x.pem")))]),
        ("a,tfmqs://b,tfmq://c?ca=x", [("a", 8367, None), ("b", 8367, TlsFiles("x")), ("c", 8367, None)]),
        (["tfmqs://a?ca=x", "b"], [("a", 8367, TlsFiles("x")), ("b", 8367, TlsFiles("x"))]),
        (["tfmqs://a", "tfmq://b", "c"], [("a", 8367, TlsFiles()), ("b", 8367, None), ("c", 8367, None)]),
    ],
)
def test_addresses_with_tls(written: str | list[str], meant: list[tuple[str, int, TlsFiles | None]]) -> None:
    assert parse_servers(written) == tuple(BrokerAddress(*each) for each in meant)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("broker?ca=x", "names files for TLS: write tfmqs://"),
        ("tfmqs://broker?cafile=x", "follow ca=FILE, certificate=FILE and key=FILE"),
        ("tfmqs://broker?ca=", "follow ca=FILE"),
        ("tfmqs://a?ca=x.pem,b:8367", "the files follow the last one: tfmqs://HOST:PORT,HOST:PORT"),
        ("tfmqs://broker?ca=x&ca=y", "follow ca=FILE"),
        ("tfmqs://broker?key=x", "A key needs a certificate"),
    ],
)
def test_files_for_tls_that_are_not_understood(written: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        parse_servers(written)


def test_none_means_the_environment_then_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFMQ_SERVERS", raising=False)
    assert parse_servers() == (BrokerAddress("127.0.0.1", 8367),)
    monkeypatch.setenv("TFMQ_SERVERS", "elsewhere:1")
    assert parse_servers() == (BrokerAddress("elsewhere", 1),)


def test_addresses_print_as_they_are_written() -> None:
    assert [str(each) for each in parse_servers("a:1,[::1]:2")] == ["a:1", "[::1]:2"]
    assert [str(each) for each in parse_servers("tfmqs://a:1,[::1]:2?ca=x")] == ["tfmqs://a:1", "tfmqs://[::1]:2"]


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("file:./data", "./data"),
        ("file:/var/lib/a,b", "/var/lib/a,b"),
        ("file:///var/lib/tfmq", "/var/lib/tfmq"),
        ("file://localhost/data", "/data"),
        (["file:~/data"], "~/data"),
        ("host:1", None),
        (["file", "host:1"], None),
        (None, None),
    ],
)
def test_a_folder_is_an_address(
    monkeypatch: pytest.MonkeyPatch, written: str | list[str] | None, path: str | None
) -> None:
    monkeypatch.delenv("TFMQ_SERVERS", raising=False)
    assert data_folder_of(written) == path


def test_the_environment_may_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMQ_SERVERS", "file:data")
    assert data_folder_of(None) == "data"
    assert data_folder_of("host:1") is None


@pytest.mark.parametrize("written", ["file:", "file://elsewhere/data", ["file:a", "host:1"], ["file:a", "file:b"]])
def test_a_folder_stands_alone_and_has_a_path(written: str | list[str]) -> None:
    with pytest.raises(BadRequest, match="the only address"):
        data_folder_of(written)
