"""Servers that share a store, as their users meet them: a lost machine, a hand-over, wrong settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfmq
from tests.replica_servers import QUICK, addresses, primary_and_standby
from tests.scale import SEED, scaled
from tests.server.test_access_control import user
from tests.server.test_http_users import basic
from tfmq.access.users import save_users
from tfmq.spark.file_reader import FolderLogReader
from tools.rigs.failover import ReplicaServer, run

TFMQ = [sys.executable, "-c", "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ReplicaServer]]:
    with primary_and_standby(tmp_path, "replicate.read=true") as made:
        yield made


def read(servers: list[ReplicaServer], topic: str, count: int) -> list[str]:
    found: list[str] = []
    until = time.monotonic() + 30
    with tfmq.Consumer(addresses(servers), topics=topic) as consumer:
        while len(found) < count and time.monotonic() < until:
            found += [message.text for message in consumer.poll(timeout=1.0)]
        return found + [message.text for message in consumer.poll(timeout=0.2)]


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until, "too late"
        time.sleep(0.05)


def test_a_lost_machine_loses_nothing_that_was_acknowledged(servers: list[ReplicaServer]) -> None:
    one, two = servers
    with tfmq.Producer(addresses(servers), timeout=60) as producer:
        results = [producer.send("orders", str(number)).result() for number in range(20)]
        assert {result.durability for result in results} == {"replicated"}
        later = producer.send("orders", "later", delay=4).result()
        transaction = producer.begin(xid="in doubt")
        transaction.send("orders", "of a transaction")
        transaction.prepare()
        one.kill()
        shutil.rmtree(one.data)
        results = [producer.send("orders", str(number)).result(60) for number in range(20, 40)]
        two.wait_for("ready")
        producer.resume("in doubt").commit()
        assert later.delayed is not None
    found = read(servers, "orders", 42)
    assert sorted(found) == sorted([*map(str, range(40)), "later", "of a transaction"])
    assert [each for each in found if each.isdigit()] == list(map(str, range(40)))
    one.start()
    one.wait_for("standby")
    with tfmq.Producer(addresses(servers)) as producer:
        assert producer.send("orders", "after").result().durability == "replicated"


def test_a_standby_serves_readers_and_goes_on_with_them_as_primary(servers: list[ReplicaServer]) -> None:
    one, two = servers
    with (
        tfmq.Producer(addresses(servers), timeout=60) as producer,
        tfmq.Consumer(two.address, topics="orders", standby=True) as consumer,
    ):
        for number in range(3):
            producer.send("orders", str(number)).result()
        found = [message.text for message in consumer.poll(timeout=30)]
        while len(found) < 3:
            found += [message.text for message in consumer.poll(timeout=30)]
        command = [*TFMQ, "read", "orders", "--standby", "--servers", two.address]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (printed.returncode, printed.stdout, printed.stderr) == (0, "0\n1\n2\n", "")
        assert two.state == "standby"
        with FolderLogReader(str(two.data)) as reader:
            (log,) = reader.partitions("orders")
            assert reader.bounds(log).end_ordinal == 3
        with pytest.raises(tfmq.NotPrimary), tfmq.Admin(two.address, timeout=2) as other:
            other.topics()
        one.kill()
        producer.send("orders", "3").result(60)
        assert found + [message.text for message in consumer.poll(timeout=30)] == list("0123")


def test_a_standby_is_promoted_without_a_loss_and_the_old_primary_follows(servers: list[ReplicaServer]) -> None:
    one, two = servers
    with tfmq.Producer(addresses(servers), timeout=60) as producer:
        producer.send("orders", "before").result()
        asked = subprocess.run(
            [*TFMQ, "replica", "promote", "--servers", two.address], capture_output=True, text=True, timeout=60
        )
        assert asked.returncode == 0, asked.stderr
        two.wait_for("ready")
        one.wait_for("standby")
        producer.send("orders", "after").result()
    assert read(servers, "orders", 2) == ["before", "after"]
    shown = subprocess.run(
        [*TFMQ, "replica", "status", "--json", "--servers", addresses(servers)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [row["role"] for row in json.loads(shown.stdout)] == ["standby", "primary"], shown.stderr


def test_a_server_that_is_stopped_leaves_its_place_at_once_and_comes_back(servers: list[ReplicaServer]) -> None:
    one, two = servers
    with tfmq.Producer(addresses(servers), timeout=60) as producer:
        producer.send("orders", "before").result()
        assert one.stop() == 0
        two.wait_for("ready")
        producer.send("orders", "between").result()
        one.start()
        one.wait_for("standby")
        assert two.stop() == 0
        one.wait_for("ready")
        producer.send("orders", "after").result()
    assert read(servers, "orders", 3) == ["before", "between", "after"]
    assert not list(one.data.glob("replica/deposed*")), "a clean stop leaves nothing to move aside"


@pytest.mark.parametrize(
    ("settings", "sentence", "code"),
    [
        (["replicate.url=ftp://host/x"], "replicate.url", 2),
        (["replicate.url=file:///no/such/folder"], "replicate.url", 2),
        (["replicate.url=file:///tmp", "replicate.lease_seconds=1"], "replicate.lease_seconds", 2),
        (["replicate.url=file:///tmp", "replicate.mode=half"], "replicate.mode", 2),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, settings: list[str], sentence: str, code: int) -> None:
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    command = [sys.executable, "-m", "tfmq.server.main", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code and sentence in ended.stderr and ended.stdout == ""
    assert len(ended.stderr.strip().splitlines()) == 1 and "Traceback" not in ended.stderr


def test_a_standby_answers_over_http_and_has_the_page_when_it_is_primary(
    tmp_path: Path, servers: list[ReplicaServer]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    save_users(str(tmp_path / "users"), {"ann": user("ann", "monitor"), "bob": user("bob")})
    (tmp_path / "three").mkdir()
    settings = (servers[0].settings[0], *QUICK, f"http.listen={where}", f"server.users={tmp_path / 'users'}")
    three = ReplicaServer(tmp_path / "three" / "data", *settings)
    three.start()
    three.wait_for("standby")

    def asked(path: str, name: str = "") -> tuple[int, str]:
        request = urllib.request.Request(f"http://{where}{path}", headers=basic(name) if name else {})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert asked("/live")[0] == 200 and asked("/ready") == (503, '{"ready": false}\n')
    assert "standby" in asked("/ready", "ann")[1]
    assert (asked("/metrics")[0], asked("/metrics", "bob")[0]) == (401, 403)
    assert "tfmq_replication_primary 0.0" in asked("/metrics", "ann")[1]
    status, sentence = asked("/", "bob")
    assert status == 503 and f"clients reach the primary at {servers[0].address}" in sentence
    status, sentence = asked("/")
    assert status == 401 and servers[0].address not in sentence
    save_users(str(tmp_path / "users"), {"ann": user("ann", "monitor"), "bob": user("bob", "monitor")})
    assert three.process is not None
    three.process.send_signal(signal.SIGHUP)
    wait_until(lambda: asked("/metrics", "bob")[0] == 200)
    servers[1].kill()
    assert servers[0].stop() == 0
    three.wait_for("ready")
    assert asked("/")[0] == 401 and "<html" in asked("/", "ann")[1]
    assert "tfmq_replication_primary 1.0" in asked("/metrics", "ann")[1]
    assert "CRITICAL" not in three.log.read_text()
    three.kill()


def test_a_server_stops_in_time_while_its_store_does_not_answer(tmp_path: Path, servers: list[ReplicaServer]) -> None:
    url = servers[0].settings[0].removeprefix("replicate.url=")
    with tfmq.Producer(servers[0].address) as producer:
        producer.send("orders", b"x" * 200_000).result()
    subprocess.run([*TFMQ, "replica", "snapshot", url], check=True, capture_output=True, timeout=60)
    chunks = [each for each in (tmp_path / "store" / "chunks").rglob("*") if each.is_file()]
    for chunk in chunks:
        chunk.unlink()
        os.mkfifo(chunk)  # who opens it waits
    (tmp_path / "three").mkdir()
    three = ReplicaServer(tmp_path / "three" / "data", servers[0].settings[0], *QUICK)
    three.start()
    three.wait_for("standby")
    time.sleep(0.5)  # it downloads
    began = time.monotonic()
    assert chunks and three.stop() == 0 and time.monotonic() - began < 10


def test_a_store_of_another_broker_is_refused(tmp_path: Path, servers: list[ReplicaServer]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    alone = ReplicaServer(other / "data")
    alone.start()
    alone.wait_for("ready")
    assert alone.stop() == 0
    url = servers[0].settings[0]
    command = [sys.executable, "-m", "tfmq.server.main", "--data", str(alone.data), "--listen", "127.0.0.1:0"]
    ended = subprocess.run([*command, "--set", url], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "another broker" in ended.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_kills_and_freezes_of_primaries_lose_and_double_nothing(tmp_path: Path) -> None:
    outcome = run(max(2, scaled(100)), max(1, scaled(30)), SEED, tmp_path)
    assert outcome.faults == [] and outcome.counts["probes"] > 0
