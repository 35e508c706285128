"""The course of a replay, against a real broker; its tasks run in this process, without Spark."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.scale import scaled, seeded
from tests.spark.pipelines.killing import runs_of
from tests.spark.pipelines.messages import (
    archived,
    arrived,
    content,
    count_of,
    in_topic,
    require_same,
    run_inline,
    send,
    some,
)
from tfmq.admin import Admin
from tfmq.errors import BadRequest, Damaged, UnknownTopic
from tfmq.message import Message
from tfmq.protocol.commands import CommitMember
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines import replay
from tfmq.spark.pipelines.archive_folder import ArchiveFolder
from tfmq.spark.pipelines.parquet_files import read_batches
from tfmq.spark.pipelines.replay import ReplayFilter, ReplayOptions, ReplayResult, ReplayRun
from tfmq.spark.pipelines.spark_jobs import Progress
from tfmq.spark.settings import SinkSettings
from tfmq.spark.sink_task import CommitGroupClient, collect_commit, write_rows
from tools.rigs.live_server import LiveServer

STEPS: dict[str, Any] = {"piece_bytes": 3 << 10, "step_bytes": 9 << 10}
"""Of the archive: several steps for a few hundred messages, each of which is one of the replay at least."""


@pytest.fixture
def folder(spark_server: LiveServer, topic: str, tmp_path: Path) -> Path:
    """An archive of the test's topic, which has a few hundred messages."""
    send(spark_server.address, topic, some(seeded(topic), 250))
    archived(tmp_path / "archive", topic, SourceAddress(spark_server.address, None, 10.0), **STEPS)
    return tmp_path / "archive"


def replayed(
    server: LiveServer, folder: Path, topic: str, to: str, run: Callable[..., Any] = run_inline, **wishes: Any
) -> ReplayResult:
    choice = ReplayFilter(topic, *wishes.pop("choice", ()))
    wish = ReplayOptions(folder, choice, server.address, to, 10.0, **wishes)
    with Admin(server.address) as admin:
        return ReplayRun(wish, admin, run).replay_new(lambda total: nullcontext(Progress(topic, total)))


def test_the_identical_messages_come_back_in_their_partitions_and_order(
    spark_server: LiveServer, topic: str, folder: Path
) -> None:
    outcome = replayed(spark_server, folder, topic, f"{topic}-again")
    assert (outcome.messages, outcome.earlier_steps, outcome.topic_created) == (250, 0, True)
    assert outcome.steps > 3
    require_same(spark_server.address, topic, f"{topic}-again")
    assert len(in_topic(spark_server.address, topic)) == 2


def test_a_second_run_sends_nothing_and_a_grown_archive_only_what_is_new(
    spark_server: LiveServer, topic: str, folder: Path
) -> None:
    first = replayed(spark_server, folder, topic, "again")
    second = replayed(spark_server, folder, topic, "again")
    assert (second.steps, second.messages, second.earlier_steps) == (0, 0, first.steps)
    send(spark_server.address, topic, some(seeded("more"), 30))
    archived(folder, topic, SourceAddress(spark_server.address, None, 10.0), **STEPS)
    assert replayed(spark_server, folder, topic, "again").messages == 30
    require_same(spark_server.address, topic, "again")


@pytest.mark.long
def test_another_broker_gets_the_topic_of_the_same_name(
    spark_server: LiveServer, topic: str, folder: Path, tmp_path: Path
) -> None:
    other = LiveServer(tmp_path / "other" / "data", "topics.partitions=5")
    (tmp_path / "other").mkdir()
    other.start()
    assert replayed(other, folder, topic, topic).topic_created
    require_same(spark_server.address, topic, topic, other.address)
    other.stop()


def test_partitions_and_times_are_chosen_row_by_row(spark_server: LiveServer, topic: str, folder: Path) -> None:
    time.sleep(0.01)
    send(spark_server.address, topic, some(seeded("later"), 50))
    folder = folder.with_name("whole")  # files that have both times
    archived(folder, topic, SourceAddress(spark_server.address, None, 10.0))
    rows = in_topic(spark_server.address, topic)
    middle = rows[1][-1][-1]
    since = round(middle.timestamp() * 1000)
    replayed(spark_server, folder, topic, "late", choice=((1,), since, None))
    replayed(spark_server, folder, topic, "early", choice=((1,), None, since))
    late = [row for row in rows[1] if row[-1] >= middle]
    early = [row for row in rows[1] if row[-1] < middle]
    assert late and early
    assert content(arrived(spark_server.address, "late", len(late))) == content({1: late})
    assert content(arrived(spark_server.address, "early", len(early))) == content({1: early})
    past = round((middle + timedelta(days=1)).timestamp() * 1000)
    assert replayed(spark_server, folder, topic, "none", choice=((), past, None)).messages == 0


def test_another_number_of_partitions_is_refused_or_keys_choose_anew(
    spark_server: LiveServer, topic: str, folder: Path
) -> None:
    with Admin(spark_server.address) as admin:
        admin.create_topic("wider", 5)
        admin.create_topic("narrow", 1)
    with pytest.raises(BadRequest, match=f"narrow has 1 partition, and the archived {topic} had 2"):
        replayed(spark_server, folder, topic, "narrow")
    with pytest.raises(BadRequest, match=f"wider has 5 partitions, and the archived {topic} had 2"):
        replayed(spark_server, folder, topic, "wider")
    assert replayed(spark_server, folder, topic, "wider", repartition=True).messages == 250

    def by_key(rows: dict[int, list[tuple[Any, ...]]]) -> dict[Any, list[tuple[Any, ...]]]:
        found: dict[Any, list[tuple[Any, ...]]] = {}
        for partition in content(rows).values():
            for row in partition:
                found.setdefault(row[0], []).append(row)
        found[None] = sorted(found[None], key=repr)
        return found

    wider = arrived(spark_server.address, "wider", 250)
    assert by_key(wider) == by_key(in_topic(spark_server.address, topic))
    assert len(wider) == 5
    with Admin(spark_server.address) as admin:
        admin.create_topic("sent", 5)
    messages = [Message(b"", key=row[2]) for rows in wider.values() for row in rows if row[2] is not None]
    send(spark_server.address, "sent", messages)
    places = {row[2]: partition for partition, rows in in_topic(spark_server.address, "sent").items() for row in rows}
    assert places == {row[2]: partition for partition, rows in wider.items() for row in rows if row[2] is not None}


def test_a_topic_does_not_get_its_own_messages_unless_that_is_meant(
    spark_server: LiveServer, topic: str, tmp_path: Path
) -> None:
    send(spark_server.address, topic, some(seeded(topic), 10))
    with Admin(spark_server.address) as admin:
        node = admin.status()["node"]
    address = SourceAddress(spark_server.address, None, 10.0)
    archived(tmp_path / "a", topic, address, node=node)
    with pytest.raises(BadRequest, match="its own messages would be appended a second time"):
        replayed(spark_server, tmp_path / "a", topic, topic)
    assert replayed(spark_server, tmp_path / "a", topic, topic, into_itself=True).messages == 10
    assert replayed(spark_server, tmp_path / "a", topic, topic, into_itself=True).messages == 0


def test_a_missing_or_damaged_file_is_reported_by_name(spark_server: LiveServer, topic: str, folder: Path) -> None:
    path = max(folder.rglob("*.parquet"))
    whole = path.read_bytes()
    name = str(path.relative_to(folder))
    path.unlink()
    with pytest.raises(Damaged, match=f"misses {name}"):
        replayed(spark_server, folder, topic, "hurt")
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(Damaged, match=f"{name} in the archive .* is damaged"):
        replayed(spark_server, folder, topic, "hurt")
    path.write_bytes(whole)
    replayed(spark_server, folder, topic, "hurt")
    require_same(spark_server.address, topic, "hurt")


def test_a_missing_file_is_reported_before_anything_is_sent(spark_server: LiveServer, topic: str, folder: Path) -> None:
    last = ArchiveFolder.open(folder).manifest(topic, ArchiveFolder.open(folder).steps(topic)[-1])
    (folder / last.files[-1].path).unlink()
    with pytest.raises(Damaged, match=f"misses {last.files[-1].path}"):
        replayed(spark_server, folder, topic, "nothing")
    assert in_topic(spark_server.address, "nothing") == {}


def test_what_is_not_archived_is_reported(spark_server: LiveServer, topic: str, folder: Path) -> None:
    with pytest.raises(UnknownTopic, match=f"has no topic 'other'; it has {topic}"):
        replayed(spark_server, folder, "other", "x")
    with pytest.raises(BadRequest, match="has partitions 0 to 1, not 2"):
        replayed(spark_server, folder, topic, "x", choice=((2,), None, None))
    with pytest.raises(BadRequest, match="is no archive of tfmq"):
        replayed(spark_server, folder.parent, topic, "x")


class Stopped(Exception):
    """A run that ends here."""


def test_a_topic_that_is_deleted_meanwhile_is_reported(spark_server: LiveServer, topic: str, folder: Path) -> None:
    def deleting(work: Any, items: Any, progress: Any, title: str) -> Any:
        found = run_inline(work, items, progress, title)
        with Admin(spark_server.address) as admin:
            admin.delete_topic("gone")
        return found

    with pytest.raises(UnknownTopic):
        replayed(spark_server, folder, topic, "gone", deleting)
    assert replayed(spark_server, folder, topic, "gone").messages == 250
    require_same(spark_server.address, topic, "gone")


@pytest.mark.long
@pytest.mark.parametrize("when", ["before the tasks", "behind the tasks", "behind the commit"])
def test_a_run_that_fails_at_a_step_is_gone_on_with(
    spark_server: LiveServer, topic: str, folder: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(3))

    def failing(work: Any, items: Any, progress: Any, title: str) -> Any:
        last = next(left) == 2
        if last and when == "before the tasks":
            raise Stopped
        found = run_inline(work, items, progress, title)
        if last and when == "behind the tasks":
            raise Stopped
        return found

    class Losing(replay.CommitGroupClient):
        """The answer to the third commit is lost."""

        def commit(self, request: Any) -> Any:
            found = super().commit(request)
            if request.sequence == 3:
                raise Stopped
            return found

    to = f"{topic[:100]}-{len(when)}"
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        if when == "behind the commit":
            patched.setattr(replay, "CommitGroupClient", Losing)
        replayed(spark_server, folder, topic, to, failing if when != "behind the commit" else run_inline)
    outcome = replayed(spark_server, folder, topic, to)
    assert outcome.earlier_steps == (3 if when == "behind the commit" else 2)
    require_same(spark_server.address, topic, to)


@pytest.mark.long
def test_killed_at_any_point_the_next_run_gives_the_same(spark_server: LiveServer, topic: str, folder: Path) -> None:
    """SIGKILL at any call of a run; each time the target has the first steps, whole."""
    generator = seeded(topic)
    was = content(in_topic(spark_server.address, topic))
    with runs_of("replay", spark_server.address, str(folder), topic, "whole") as run:
        whole = run()
    assert whole.code == 0
    kills, number, most = 0, 0, whole.calls
    while kills < max(2, scaled(80)):
        number, before = number + 1, kills
        to = f"killed-{number}"
        with runs_of("replay", spark_server.address, str(folder), topic, to) as run:
            while (ended := run(generator.randrange(1, most))).code:
                assert ended.code == -9
                kills += 1
                there = content(in_topic(spark_server.address, to))
                assert all(was[partition][: len(rows)] == rows for partition, rows in there.items())
        require_same(spark_server.address, topic, to)
        most = most * 3 // 4 if kills == before else most  # how many calls a run has depends on what it waits for


def test_messages_whose_attributes_cannot_be_decoded_are_copied_as_they_are(
    spark_server: LiveServer, topic: str, tmp_path: Path
) -> None:
    given = [b"\xc1", b"\x82\x01\x05", b"\x81\x02\xa1\xff", None, b"\x80", b"\x82\xa1z\x01\x02\xa1k", b"\x81\x02\xa1k"]
    rows = {"value": [b"v"] * len(given), "attributes": given, "partition": [0] * len(given)}
    settings = SinkSettings(spark_server.address, topic, 10.0, lenient=True)
    member = CommitMember(topic[-60:].lstrip("-"), 1, "run")
    verdict = collect_commit([write_rows(settings, member, iter([pa.RecordBatch.from_pydict(rows)]))])
    assert verdict is not None
    with CommitGroupClient(spark_server.address, 10.0) as client:
        client.commit(verdict)
    found = [each["attributes"] for each in archived_rows(spark_server, topic, tmp_path / "one", len(given))]
    assert found == given
    assert replayed(spark_server, tmp_path / "one", topic, f"{topic}-b").messages == len(given)
    again = archived_rows(spark_server, f"{topic}-b", tmp_path / "two", len(given))
    assert [(each["attributes"], each["key"]) for each in again] == list(
        zip(given, [None] * 5 + [b"k"] * 2, strict=True)
    )


def archived_rows(server: LiveServer, topic: str, to: Path, count: int) -> list[dict[str, Any]]:
    """What an archive of partition 0 has, once the topic has so many messages."""
    deadline = time.monotonic() + 60
    while count_of(server.address, topic) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    archived(to, topic, SourceAddress(server.address, None, 10.0))
    folder = ArchiveFolder.open(to)
    files = folder.manifest(topic, 1).files
    return [row for file in files for batch in read_batches(to, file) for row in batch.to_pylist()]
