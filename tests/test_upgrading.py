"""Data folders, clients and servers of the oldest supported commit, with those of today (docs/upgrading.md)."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.paths import ROOT, TESTS
from tests.server.wire import running
from tfmq.cli.main import run

OLDEST = "043cd0c7"
ARCHIVE = TESTS / "golden" / f"data-{OLDEST}.tar.xz"
SECONDS = 20.0


def extracted(archive: Path, folder: Path) -> dict[str, Any]:
    """Extract an archive of tools/make_golden_folder.py, and return what it says of its contents."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    contents: dict[str, Any] = json.loads((folder / "contents.json").read_text())
    return contents


def verified(data: Path) -> None:
    assert run(["log", "verify", "--records", str(data)]) == 0


def read(servers: str, topic: str, count: int, group: str | None = None) -> list[Any]:
    """`count` messages of a topic, and all that follow at once."""
    found: list[Any] = []
    with tfmq.Consumer(servers, topics=topic, group=group) as consumer:
        while len(found) < count:
            messages = consumer.poll(timeout=SECONDS)
            assert messages, f"{topic}: {len(found)} of {count}"
            found += messages
        found += consumer.poll(timeout=0.05)
    return found


def texts(messages: list[Any]) -> list[str]:
    return sorted(message.text for message in messages)


def check_messages(servers: str, topics: dict[str, list[dict[str, Any]]]) -> None:
    for topic, expected in topics.items():
        found = read(servers, topic, len(expected))
        assert texts(found) == sorted(each["payload"] for each in expected), topic
        if topic == "plain":
            shown = [
                {
                    "payload": message.text,
                    "offset": message.offset,
                    "id": str(message.id),
                    "key": message.key,
                    "tag": message.tag,
                    "properties": dict(message.properties),
                }
                for message in found
            ]
            assert shown == expected


@pytest.mark.parametrize("state", ["stopped", "killed"])
def test_the_oldest_data_folder_is_opened_read_and_continued(state: str, tmp_path: Path) -> None:
    contents = extracted(ARCHIVE, tmp_path)
    data, topics = tmp_path / state, contents["topics"]
    verified(data)
    with running(data) as (process, (host, port)):
        servers = f"{host}:{port}"
        delayed, doubt, reader = contents["delayed"], contents["in_doubt"], contents["groups"]["readers"]
        topics["delayed"] += [{"payload": each} for each in delayed["due"]]
        check_messages(servers, topics)
        unread = read(servers, reader["topic"], len(topics[reader["topic"]]) - reader["read"], group="readers")
        assert [each.text for each in unread] == [each["payload"] for each in topics["plain"][reader["read"] :]]
        with tfmq.Admin(servers) as admin, tfmq.Producer(servers) as producer:
            assert admin.topic("small").settings["flush.messages"] == 1
            assert [(each.xid, each.state) for each in admin.transactions()] == [(doubt["xid"], "prepared")]
            for handle in delayed["pending"].values():
                assert admin.describe_delayed(handle).state == "pending"
            assert admin.cancel(delayed["pending"]["to cancel"]) == "cancelled"
            assert admin.cancel(delayed["cancelled"]) == "cancelled"
            assert admin.cancel(delayed["due_handle"]) == "delivered"
            shown = [(each.name, each.cron, each.timezone, each.state) for each in admin.schedules()]
            assert shown == [("yearly", "0 0 1 1 *", "Europe/Berlin", "paused")]
            producer.resume(doubt["xid"]).commit()
            for topic in topics:
                producer.send(topic, "continued").result()
        for topic, expected in topics.items():
            more = ["continued", *([doubt[topic]] if topic in doubt else [])]
            found = texts(read(servers, topic, len(expected) + len(more)))
            assert found == sorted([each["payload"] for each in expected] + more)
        code, _, log = process.stop()
    assert code == 0 and "Traceback" not in log
    verified(data)


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the oldest supported commit."""
    folder = tmp_path_factory.mktemp("oldest")
    archive = folder / "code.tar"
    made = subprocess.run(["git", "archive", "-o", str(archive), OLDEST, "tfmq", "journal"], cwd=ROOT, timeout=60)
    if made.returncode:
        pytest.skip(f"cannot be had here: this checkout does not have commit {OLDEST}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


def written(archive: Path, client: Path, server: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/make_golden_folder.py"), str(archive)]
    command += ["--client", str(client), "--server", str(server)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert made.returncode == 0, made.stderr


@pytest.mark.long
@pytest.mark.parametrize("is_client_old", [True, False], ids=["old client", "old server"])
def test_clients_and_servers_of_both_versions_understand_each_other(
    is_client_old: bool, oldest: Path, tmp_path: Path
) -> None:
    client, server = (oldest, ROOT) if is_client_old else (ROOT, oldest)
    written(tmp_path / "data.tar.xz", client, server)
    contents = extracted(tmp_path / "data.tar.xz", tmp_path)
    with running(tmp_path / "killed") as (_, (host, port)):
        check_messages(f"{host}:{port}", contents["topics"])


@pytest.mark.long
@pytest.mark.parametrize("state", ["stopped", "killed"])
def test_the_oldest_server_refuses_a_folder_of_today_in_a_sentence(state: str, oldest: Path, tmp_path: Path) -> None:
    written(tmp_path / "data.tar.xz", ROOT, ROOT)
    extracted(tmp_path / "data.tar.xz", tmp_path)
    before = contents_of(tmp_path / state)
    command = [sys.executable, "-m", "tfmq.server.main", "--data", str(tmp_path / state), "--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, cwd=oldest, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "was written by a newer version of tfmq" in ended.stderr and "Start the newer version." in ended.stderr
    assert contents_of(tmp_path / state) == before, "nothing was changed"


def contents_of(folder: Path) -> dict[str, bytes]:
    """The content of each file of a data folder but the lock and the space kept for deletions."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("lock", "reserve")
    }
