"""What a task does with its rows, on a simulated broker: parts, messages to the driver, and the verdict about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tfmq.errors import BadRequest, GroupFenced, GroupStale, UnknownTopic
from tfmq.protocol.commands import CommitMember
from tfmq.spark.settings import SinkSettings
from tfmq.spark.sink_task import CommitGroupClient
from tfmq.testing.broker import SimulatedBroker

pytestmark = pytest.mark.usefixtures("spark_can_be_had")


class Task:
    """Tasks and the driver of one query."""

    def __init__(self, broker: SimulatedBroker, **options: Any) -> None:
        self.broker = broker
        self.settings = SinkSettings(broker.servers, "orders", **options)

    def write(self, sequence: int, *batches: list[bytes | None], run: str = "run-1") -> Any:
        from tfmq.spark.sink_task import write_rows

        rows = (pa.RecordBatch.from_pydict({"value": pa.array(each, pa.binary())}) for each in batches)
        return write_rows(self.settings, CommitMember("query", sequence, run), rows)

    def commit(self, *messages: Any, **options: Any) -> Any:
        from tfmq.spark.sink_task import collect_commit as verdict_of

        verdict = verdict_of(messages, **options)
        assert verdict is not None
        with CommitGroupClient(self.settings.servers, 30.0) as client:
            return client.commit(verdict)

    def visible(self) -> list[bytes | None]:
        return [each.payload for each in self.broker.sent("orders")]


@pytest.fixture
def task(tfmq_broker: SimulatedBroker) -> Task:
    return Task(tfmq_broker)


def test_all_tasks_together_are_the_verdict(task: Task) -> None:
    one, two = task.write(0, [b"a", None], [b"b"]), task.write(0, [b"c"])
    assert (one.rows, two.rows) == (3, 1)
    assert task.visible() == []
    assert task.commit(one, None, two).rows == 4
    assert sorted(each or b"" for each in task.visible()) == [b"", b"a", b"b", b"c"]


def test_the_owner_of_a_part_says_which_batch_it_is_of(task: Task) -> None:
    task.write(7, [b"a"])
    (found,) = task.broker.admin().transactions()
    assert (found.state, found.owner.partition(" at ")[0]) == ("prepared", "tfmq-spark batch 7")


def test_a_task_without_rows_asks_the_broker_for_nothing_and_counts(task: Task) -> None:
    task.broker.stop()
    empty = task.write(0, [], [])
    task.broker.start()
    assert (empty.rows, empty.transactions) == (0, ())
    assert task.commit(empty).rows == 0
    with pytest.raises(GroupStale, match="another total, 1"):
        task.commit(task.write(0, [b"a"], run="run-2"))


def test_rows_of_what_is_committed_are_counted_and_not_sent(task: Task) -> None:
    task.commit(task.write(0, [b"a", b"b"]))
    again = task.write(0, [b"a" * 100] * 20_000, [b"b"], run="run-2")
    assert (again.rows, again.transactions) == (20_001, ())
    with pytest.raises(GroupStale):
        task.commit(again)
    assert task.commit(task.write(0, [b"a", b"b"], run="run-3")).repeated
    assert task.visible() == [b"a", b"b"]


def test_with_any_total_the_rows_of_what_is_committed_are_not_even_read(tfmq_broker: SimulatedBroker) -> None:
    task = Task(tfmq_broker, allow_other_total=True)
    task.commit(task.write(0, [b"a"]))
    read: list[int] = []

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(100):
            read.append(number)
            yield pa.RecordBatch.from_pydict({"value": [b"x" * (2 << 20)]})

    from tfmq.spark.sink_task import write_rows

    written = write_rows(task.settings, CommitMember("query", 0, "run-2"), rows())
    assert len(read) == 2
    assert task.commit(written, other_total=True).rows == 1


def test_a_task_that_fails_leaves_nothing(task: Task) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"value": [b"x" * (2 << 20)]})
        raise ZeroDivisionError

    from tfmq.spark.sink_task import write_rows

    with pytest.raises(ZeroDivisionError):
        write_rows(task.settings, CommitMember("query", 0, "run-1"), rows())
    assert task.broker.admin().transactions(["open", "prepared"]) == []


def test_a_run_is_shut_out_with_what_it_prepared(task: Task) -> None:
    from tfmq.spark.sink_task import abort_run

    message = task.write(0, [b"a"])
    assert abort_run(task.settings, CommitMember("query", 0, "run-1")) is None
    assert task.broker.admin().transactions(["open", "prepared"]) == []
    with pytest.raises(GroupFenced):
        task.commit(message)
    with pytest.raises(GroupFenced):
        task.write(0, [b"late"])
    task.commit(task.write(0, [b"b"], run="run-2"))
    assert task.visible() == [b"b"]


def test_an_abort_that_cannot_be_reported_is_no_error_of_its_own(task: Task) -> None:
    from tfmq.spark.sink_task import abort_run

    task.broker.stop()
    error = abort_run(task.settings._replace(timeout=1.0), CommitMember("query", 0, "run-1"))
    assert error is not None
    task.broker.start()


def test_a_topic_that_is_not_there_is_reported(task: Task) -> None:
    with (
        SimulatedBroker({"topics.auto_create": False}) as broker,
        pytest.raises(UnknownTopic, match=r"There is no topic orders, and topics\.auto_create is off"),
    ):
        Task(broker).write(0, [b"a"])


def test_wrong_rows_leave_nothing(task: Task) -> None:
    from tfmq.spark.sink_task import write_rows

    settings = task.settings._replace(topic="")
    rows = pa.RecordBatch.from_pydict({"value": [b"a", b"b"], "topic": ["orders", "a/b"]})
    with pytest.raises(BadRequest, match="'a/b' in the column topic cannot be a topic"):
        write_rows(settings, CommitMember("query", 0, "run-1"), iter([rows]))
    assert task.broker.admin().transactions(["open", "prepared"]) == []


def test_no_decision_is_no_verdict() -> None:
    from tfmq.spark.sink_task import collect_commit as verdict_of

    assert verdict_of([]) is None and verdict_of([None, None]) is None
