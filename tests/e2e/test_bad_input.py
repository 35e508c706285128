"""What a person gets wrong: one clear sentence, the right exit code, no traceback, and nothing lost."""

import os
import pwd
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tfmq as client
from journal.record.format import make_record
from tests.e2e import neighbours
from tests.e2e.commands import tfmq, tfmq_server
from tests.e2e.neighbours import http_server, neighbour
from tests.e2e.reading import payloads
from tests.scale import SEED, scaled
from tests.server.wire import Wire
from tfmq.cli import main
from tfmq.client.connection import connection
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import COMMANDS
from tools.rigs.live_server import LiveServer

WRONG_NAMES = ["", ".", "..", "a/b", "../a", "a b", "ä", "a\0b", "a\nb", "x" * 250, "a:b", "*"]
NOBODY = "nobody"


def closed_port() -> str:
    with neighbour(neighbours.silent) as address:
        return address


# Names


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_wrong_topic_name_is_refused_by_the_client(broker: LiveServer, name: str) -> None:
    with client.Producer(broker.address) as producer, pytest.raises(client.BadRequest, match="name") as refused:
        producer.send(name, b"x")
    assert refused.value.outcome == "not done"
    with client.Admin(broker.address) as admin:
        for ask in (admin.create_topic, admin.delete_topic, admin.topic):
            with pytest.raises((client.BadRequest, client.UnknownTopic)) as answered:
                ask(name)
            assert answered.value.outcome == "not done"
    with pytest.raises(client.BadRequest, match="name"):
        client.Consumer(broker.address, topics=name).poll(0.1)
    with pytest.raises(client.BadRequest, match="name"):
        client.Consumer(broker.address, topics="orders", group=name or "/").poll(0.1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["", "..", "a/b", "ä"])
def test_a_wrong_topic_name_is_refused_by_the_command(broker: LiveServer, name: str) -> None:
    for arguments in (["send", name, "x"], ["topic", "create", name]):
        ended = tfmq(*arguments, servers=broker.address)
        assert ended.code == 2, ended
        assert ended.out == b""
        assert "name" in ended.sentence
    assert tfmq("read", name, servers=broker.address).code in (1, 2)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_wrong_name_on_the_wire_is_an_error_and_the_connection_goes_on(broker: LiveServer, name: str) -> None:
    host, _, port = broker.address.rpartition(":")
    wire = Wire((host, int(port)))
    before = sorted(path.name for path in broker.data.iterdir())
    for request in (
        commands.CreateTopic(name, 1, {}),
        commands.Metadata([name], True),
        commands.JoinGroup(name, "", ["orders"], 10_000),
        commands.JoinGroup("group", name, ["orders"], 10_000) if name else commands.JoinGroup(".", "", [], 10_000),
    ):
        wire.send(request)
        header = wire.receive().header
        assert header[0] < 0, (request, header)
        assert header[3] == "not done"
    assert wire.ask(commands.Ping())[0] > 0
    assert sorted(path.name for path in broker.data.iterdir()) == before
    wire.close()


# Addresses


@pytest.mark.long
def test_no_server_listens() -> None:
    address = closed_port()
    for arguments in (["send", "orders", "x"], ["status"]):
        ended = tfmq(*arguments, servers=address)
        assert ended.code == 3
        assert ended.err.splitlines() == [
            f"tfmq: Nothing listens at {address} yet: waiting 2 s.",
            f"tfmq: Nothing listens at {address}: start tfmq-server, or correct the address.",
        ]
    with client.Producer(address) as producer:
        delivery = producer.send("orders", b"x")
        with pytest.raises(client.ConnectionFailed) as failed:
            delivery.result(30)
    assert failed.value.outcome == "not done"
    assert isinstance(failed.value, ConnectionError)


@pytest.mark.long
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (http_server, "HTTP"),
        (partial(neighbour, neighbours.redis), "Redis"),
        (partial(neighbour, neighbours.ssh), "SSH"),
        (partial(neighbour, neighbours.noise), "A frame of 4294901244 bytes"),
        (partial(neighbour, neighbours.hangs_up), "lost"),
    ],
)
def test_something_else_answers_there(other: Any, words: str) -> None:
    opened: AbstractContextManager[str] = other()
    with opened as address:
        ended = tfmq("status", servers=address)
        assert ended.code == 3, ended
        assert words in ended.sentence
        assert address in ended.sentence
        if other is not http_server:
            return
        refused = tfmq_server("--data", tempfile.gettempdir() + "/never-made", "--listen", address)
        assert refused.code == 1
        assert f"{address} is taken: an HTTP server answers there" in refused.sentence


@pytest.mark.usefixtures("impatient_clients")
def test_a_port_that_takes_connections_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "HELLO_TIMEOUT_SECONDS", 0.5)
    with neighbour(neighbours.silent) as address:
        assert main.run(["status", "--servers", address]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"tfmq: {address} accepted the connection but did not reply to HELLO")
    assert len(said.err.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "servers", ["nonsense:port", "host:99999", "http://127.0.0.1:1", ",", "127.0.0.1:0", "a:b:c", "host/path"]
)
def test_an_address_that_is_none_is_wrong_usage(servers: str) -> None:
    ended = tfmq("status", "--servers", servers)
    assert ended.code == 2, ended
    assert ended.sentence


# Transactions


class Mischief:
    """Requests of transactions that a seeded stranger makes up: most of them well formed, few that make sense."""

    def __init__(self, seed: int, incarnation: int, first_id: int) -> None:
        self._source = random.Random(seed)
        self._incarnation = incarnation
        self._ids = [first_id, first_id + 1, first_id + 2, 1 << 39]
        self._known = [("a", 1 << 40)]
        self._next = dict.fromkeys(self._ids, 0)
        self._number = 0

    def request(self) -> tuple[int, list[Any], bytes]:
        """Command, fields, body."""
        choose, luck = self._source.choice, self._source.random
        command = choose([each for each in COMMANDS if each.code in range(50, 84) or each.code == 21])
        producer_id = choose(self._ids)
        following = self._next[producer_id]
        sequence = choose([following, following, following, 0, following + 1])
        record = make_record(b"hello", producer_id << 24 | sequence)
        likely = self._likely(producer_id, sequence, record)
        fields = [likely.get(name) if luck() < 0.97 else self._wild() for name in command.request.names]
        if luck() < 0.05:
            del fields[self._source.randrange(len(fields) + 1) :]
        return command.code, fields, record if command.body and luck() < 0.9 else b""

    def learn(self, code: int, fields: list[Any], reply: list[Any]) -> None:
        """What a request was answered: what comes next follows from it now and then."""
        if code == 50 and reply[0] == 0:
            self._known = [*self._known[-2:], (reply[3], reply[2])]
        elif code == 21 and reply[0] == 0:
            self._next[fields[3]] = max(self._next[fields[3]], fields[4] + 1)
        elif code == 57 and reply[0] == 0 and fields[2]:
            self._next[fields[0]] = max(self._next[fields[0]], fields[2][0][3] + 1)

    def _likely(self, producer_id: int, sequence: int, record: bytes) -> dict[str, Any]:
        choose, here = self._source.choice, self._incarnation
        self._number += choose([0, 1, 1])
        xid, epoch = choose(self._known)
        block = [[len(record), 1, zlib.crc32(record)]]
        batch = ["orders", here, 0, sequence, 1, len(record), block]
        return {
            "producer_id": producer_id,
            "number": self._number,
            "xid": choose([xid, xid, "order 1", ""]),
            "timeout_ms": choose([None, 1, 5000, 1 << 31]),
            "group": choose(["shop", "query"]),
            "member": choose([None, None, ["query", choose([3, 4]), choose(["run-1", "run-2"])]]),
            "epoch": choose([epoch, epoch, epoch, epoch + 1, 0]),
            "one_phase": choose([True, False]),
            "heuristic": choose([True, False]),
            "ttl_ms": choose([None, None, 1000]),
            "offsets": choose([[], [], [["g", "", 0, [["orders", here, 0, choose([0, 5])]]]]]),
            "states": choose([None, ["open"], ["nonsense"]]),
            "after": choose([0, 3, ""]),
            "limit": choose([1, 1000]),
            "batches": choose([[], [batch], [batch, batch]]),
            "wait_ms": choose([0, 1]),
            "sequence": sequence,
            "run": choose(["run-1", "run-2"]),
            "transactions": choose([[], [[xid, epoch]], [[xid, epoch], [xid, epoch]], [["b", 1 << 62]]]),
            "rows": choose([0, 7]),
            "other_total": choose([True, False]),
            "topic": choose(["orders", "orders", "orders", "nowhere"]),
            "incarnation": here,
            "partition": choose([0, 0, 0, 7]),
            "count": 1,
            "acks": choose([1, 2]),
            "blocks": block,
            "transaction": choose([epoch, epoch, None]),
        }

    def _wild(self) -> Any:
        wild: tuple[Any, ...] = (None, -1, 1 << 63, "", "x" * 300, b"\xff", [], [[]], {}, [None] * 20, 1.5, True)
        return self._source.choice(wild)


def test_whatever_a_stranger_asks_of_transactions_is_answered_and_nothing_else_suffers(broker: LiveServer) -> None:
    host, _, port = broker.address.rpartition(":")
    wire = Wire((host, int(port)))
    (topics,) = wire.ask(commands.Metadata(["orders"], True))
    (first_id, _) = wire.ask(commands.LeaseProducerIds(3))
    mischief = Mischief(SEED, topics[0][1], first_id)
    codes = Counter[str]()
    for number in range(max(4000, scaled(50_000))):
        code, fields, body = mischief.request()
        wire.socket.sendall(b"".join(frames.encode((code, number, *fields), body)))
        header = wire.receive().header
        assert header[1] == number, (SEED, number)
        mischief.learn(code, fields, header)
        codes[header[2] if header[0] else "done"] += 1
    assert "internal_error" not in codes, (SEED, codes)
    assert len(codes) >= 12, f"too little was tried: {codes}"
    assert "Traceback" not in broker.log.read_text()
    with client.Producer(broker.address) as producer:
        assert producer.send("bystanders", b"x").result(30).durability == "synced"
    with client.Admin(broker.address) as admin:
        admin.transactions(["open", "prepared", "applying"])


# Configuration


@pytest.mark.long
def test_wrong_keys_anywhere_are_refused_with_the_likely_one(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    data = str(tmp_path / "data")
    for text, words in (
        ("[flush]\nmesages = 5\n", 'did you mean "flush.messages"'),
        ("[flsh]\nmessages = 5\n", "flush"),
        ("[flush]\nmessages = -1\n", "flush.messages must be"),
        ('[topic."orders"]\nflush.mesages = 5\n', "flush.messages"),
        ("[flush\n", "line 1"),
        ("[transaction]\ntimeout = 5\n", 'did you mean "transaction.timeout_seconds"'),
        ("[transaction]\ntimeout_seconds = 0\n", "transaction.timeout_seconds must be"),
        ("[transaction]\ntimeout_seconds = 5000\n", "more than limits.transaction_seconds = 900"),
    ):
        file.write_text(text)
        ended = tfmq_server("--data", data, "--config", str(file))
        assert ended.code == 2, text
        assert words in ended.sentence, ended
        assert str(file) in ended.sentence
    assert tfmq_server("--data", data, "--config", str(tmp_path / "none.toml")).code == 2
    assert tfmq_server("--data", data, "--listen", "nonsense").code == 2
    assert not Path(data).exists()


def test_a_wrong_variable_of_the_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMQ_FLUSH_MESSAGES", "many")
    ended = tfmq_server("--data", str(tmp_path / "data"))
    assert ended.code == 2
    assert "TFMQ_FLUSH_MESSAGES" in ended.sentence


# The data folder


def filled(folder: Path) -> LiveServer:
    """A broker that was stopped, with one message in it."""
    server = LiveServer(folder / "data")
    server.start()
    with client.Producer(server.address) as producer:
        producer.send("orders", b"precious").result(30)
    server.stop()
    return server


def still_there(server: LiveServer) -> None:
    server.start()
    assert payloads(server.address, "orders") == [b"precious"]
    server.stop()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which names who held it last."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.long
def test_a_folder_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    server = filled(tmp_path)
    version = server.data / "meta" / "version"
    ours = version.read_bytes()
    version.write_bytes(b'{"format": 2, "node": "%s"}' % (b"f" * 32))
    before = contents(server.data)
    ended = tfmq_server("--data", str(server.data), "--listen", "127.0.0.1:0")
    assert ended.code == 1
    assert "newer version" in ended.sentence
    assert contents(server.data) == before
    version.write_bytes(ours)
    still_there(server)


@pytest.mark.long
def test_a_second_server_leaves_the_first_alone(tmp_path: Path) -> None:
    server = filled(tmp_path)
    server.start()
    for _ in range(2):
        ended = tfmq_server("--data", str(server.data), "--listen", "127.0.0.1:0")
        assert ended.code == 1
        assert "in use by another tfmq server" in ended.sentence
    for command in ("verify", "repair"):
        looked = tfmq("log", command, str(server.data))
        assert looked.code == 1
        assert "a server is running" in looked.sentence
    with client.Producer(server.address) as producer:
        producer.send("orders", b"more").result(30)
    server.kill()
    server.start()
    assert payloads(server.address, "orders") == [b"precious", b"more"]
    server.stop()


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that other users may enter; pytest's own are closed to them."""
    path = Path(tempfile.mkdtemp(prefix="tfmq-rights-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def another_user() -> int:
    if os.geteuid() != 0:
        pytest.skip("cannot be had here: becoming another user needs root")
    try:
        return pwd.getpwnam(NOBODY).pw_uid
    except KeyError:
        pytest.skip(f"cannot be had here: there is no user {NOBODY}")


@pytest.mark.long
def test_a_user_without_rights_gets_an_error(reachable: Path) -> None:
    user = another_user()
    server = filled(reachable)
    server.data.chmod(0o700)
    listen = ("--listen", "127.0.0.1:0")
    before = contents(server.data)
    ended = tfmq_server("--data", str(server.data), *listen, user=user)
    assert ended.code == 1
    assert "no rights" in ended.sentence
    assert f"user {user}" in ended.sentence
    fresh = tfmq_server("--data", str(reachable / "fresh"), *listen, user=user)
    assert fresh.code == 1
    assert "no rights" in fresh.sentence
    looked = tfmq("log", "verify", str(server.data), user=user)
    assert looked.code == 1
    assert "Permission denied" in looked.sentence
    server.data.chmod(0o755)
    (server.data / "orders-0").chmod(0o700)
    assert tfmq_server("--data", str(server.data), *listen, user=user).code == 1
    assert contents(server.data) == before
    still_there(server)


@pytest.mark.long
def test_a_low_port_is_not_for_everybody(reachable: Path) -> None:
    user = another_user()
    low = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if not low.exists() or int(low.read_text()) <= 80:
        pytest.skip("cannot be had here: every user may listen at every port")
    home = reachable / "home"
    home.mkdir()
    os.chown(home, user, user)
    ended = tfmq_server("--data", str(home / "data"), "--listen", "127.0.0.1:80", user=user)
    assert ended.code == 1
    assert "may not be used by this user" in ended.sentence or "is taken" in ended.sentence
