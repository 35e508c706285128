"""Every argument of a consumer: taken, or refused with a sentence that names it."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.client.consumer.test_core import filled, offset_of
from tests.client.scripted_broker import Broker, Script, consumer_options
from tfmq.client.consumer.options import (
    EARLIEST,
    LATEST,
    StartPosition,
    Subscription,
    open_storage,
    seek_position,
    start_position,
)
from tfmq.errors import BadRequest, UnknownPartition
from tfmq.message import Ordinal
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.sql import SqlOffsets
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire
from tfmq.protocol.commands import BY_OFFSET, BY_ORDINAL, BY_TIME_MS, PartitionRow, TopicRow
from tfmq.zookeeper.offsets import ZooKeeperOffsets


def test_the_defaults() -> None:
    options = consumer_options(topics="orders")
    assert (options.read, options.skip_damage, options.reset, options.commits) == (0, False, None, "auto")
    assert options.tags is None
    assert options.storage is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read", "all"),
        ("on_damage", "ignore"),
        ("on_out_of_range", "skip"),
        ("commits", "never"),
        ("group", "a/b"),
        ("group", ""),
        ("start", "first"),
        ("offsets", "disk"),
        ("tags", ""),
        ("tags", ["x" * 300]),
        ("tags", []),
        ("tags", [str(n) for n in range(65)]),
        ("timeout", 0),
        ("session", float("inf")),
        ("save_every", float("nan")),
        ("fetch_bytes", 0),
        ("retries", -1),
        ("retries", True),
        ("strategy", "random"),
        ("coordinator", "etcd://here"),
        ("where", "tag == 'a'"),
        ("on_assigned", 1),
        ("on_revoked", "f"),
        ("prefetch_bytes", 1 << 40),
        ("tags", 5),
        ("tags", "paid|sent"),
        ("broadcast", 5),
        ("broadcast", "a b"),
        ("broadcast", ""),
        ("broadcast", None),
        ("standby", True),
        ("dead_letters", 5),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: Any) -> None:
    arguments = {"topics": "orders", "group": "g", name: value}
    with pytest.raises(BadRequest):
        consumer_options(**arguments)


def test_an_expression_over_tags_is_the_tags_in_it() -> None:
    def tags(given: Any) -> Any:
        return consumer_options(topics="orders", tags=given).tags

    assert tags("a || b") == tags(["a", "b"]) == tags("a||b") == {"a", "b"}
    assert tags(["a || b", "c"]) == {"a", "b", "c"}
    assert tags("*") is None and tags("a || *") is None, "everything, with a tag or without"
    for wrong in ("a ||", "||", [3]):
        with pytest.raises(BadRequest):
            tags(wrong)


def test_a_broadcast_has_a_group_of_its_own_on_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "shop 1")
    arguments = {"topics": "orders", "group": "prices"}
    assert consumer_options(**arguments, broadcast=True).group == "prices-shop_1"
    assert consumer_options(**arguments, broadcast="left").group == "prices-left"
    assert consumer_options(**arguments).group == "prices"


def test_a_group_that_zookeeper_coordinates_has_its_offsets_there() -> None:
    from tfmq.zookeeper.offsets import ZooKeeperOffsets

    arguments = {"topics": "orders", "group": "g", "coordinator": "zookeeper://127.0.0.1:1/meta"}
    options = consumer_options(**arguments)
    assert isinstance(options.storage, ZooKeeperOffsets)
    assert options.coordinator == "zookeeper://127.0.0.1:1/meta"
    assert isinstance(consumer_options(**arguments, offsets="file:/x").storage, FileOffsets)


def test_what_is_not_known_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        consumer_options(topics="orders", retry=3)


@pytest.mark.parametrize(
    "arguments",
    [{"commits": "manual"}, {"offsets": "file:x"}, {"broadcast": True}, {"coordinator": "zookeeper://here/x"}],
)
def test_saving_needs_a_group(arguments: Any) -> None:
    with pytest.raises(BadRequest, match="group"):
        consumer_options(topics="orders", **arguments)


def test_a_single_bar_is_no_expression_over_tags_and_a_list_may_have_tags_with_one() -> None:
    for wrong in ("paid|sent", "paid | sent", "a || b|c", "a|||b"):
        with pytest.raises(BadRequest, match=r'"paid \|\| sent" is both'):
            consumer_options(topics="orders", tags=wrong)
    assert consumer_options(topics="orders", tags=["paid|sent"]).tags == {"paid|sent"}


def test_a_machine_that_is_named_is_named_as_a_group_is() -> None:
    arguments = {"topics": "orders", "group": "prices"}
    with pytest.raises(BadRequest, match="broadcast='a b'"):
        consumer_options(**arguments, broadcast="a b")
    assert consumer_options(**arguments, broadcast="a_b").group == "prices-a_b"


@pytest.mark.parametrize("where", ["dead.db", Path("dead.db"), "topic:dead"])
def test_a_store_of_dead_letters_without_a_group_is_refused(where: Any) -> None:
    with pytest.raises(BadRequest, match="dead_letters= needs a group"):
        consumer_options(topics="orders", dead_letters=where)
    assert consumer_options(topics="orders", dead_letters=None).dead_letters is None


@pytest.mark.parametrize(
    "reading",
    [
        {"topics": "orders"},
        {"topics": ["bills", "orders"]},
        {"topics": re.compile("o.*")},
        {"topics": "orders", "partitions": [0]},
        {"partitions": [("orders", 3)]},
    ],
)
def test_what_a_consumer_reads_does_not_keep_its_dead_letters(reading: Any) -> None:
    with pytest.raises(BadRequest, match="reads orders itself"):
        consumer_options(**reading, group="g", dead_letters="topic:orders")
    assert consumer_options(**reading, group="g", dead_letters="topic:dead").dead_letters == "topic:dead"


async def _coroutine(given: Any) -> None: ...


def _generator(given: Any) -> Any:
    yield given


async def _generator_too(given: Any) -> Any:
    yield given


class _Called:
    async def __call__(self, given: Any) -> None: ...


FUNCTIONS = [_coroutine, partial(_coroutine), _Called()]
FACES = [tfmq.Consumer, tfmq.aio.Consumer, tfmq.twisted.Consumer]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("function", [*FUNCTIONS, _generator, _generator_too])
def test_a_filter_is_a_plain_function_in_every_api_variant(face: Any, function: Any) -> None:
    with pytest.raises(BadRequest, match="where="):
        face("127.0.0.1:1", topics="orders", where=function)


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked"])
def test_coroutine_functions_are_for_those_who_await(name: str) -> None:
    for function in FUNCTIONS:
        with pytest.raises(BadRequest, match=rf"{name}= is a coroutine function.*tfmq\.aio\.Consumer"):
            tfmq.Consumer("127.0.0.1:1", topics="orders", group="g", **{name: function})
        tfmq.aio.Consumer("127.0.0.1:1", topics="orders", group="g", **{name: function})
        tfmq.twisted.Consumer("127.0.0.1:1", topics="orders", group="g", **{name: function})


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", ["on_assigned", "on_revoked"])
def test_a_generator_is_refused_as_a_callback_in_any_api_variant(face: Any, name: str) -> None:
    for function in (_generator, _generator_too):
        with pytest.raises(BadRequest, match=f"{name}= contains a yield"):
            face("127.0.0.1:1", topics="orders", group="g", **{name: function})


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    "arguments", [{"timeout": "a"}, {"timeout": -1}, {"timeout": True}, {"max_messages": "a"}, {"max_messages": 0}]
)
def test_what_poll_takes(face: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(arguments))):
        stepped(face("127.0.0.1:1", topics="orders").poll(**arguments))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("message", ["x", 36, ("orders", 0)])
def test_what_commit_takes(face: Any, message: Any) -> None:
    with pytest.raises(BadRequest, match="takes a message that this consumer delivered"):
        stepped(face("127.0.0.1:1", topics="orders", group="g").commit(message))


def stepped(called: Any) -> None:
    """The first step of what was called, in the way of its face. Raises what that raises."""
    if hasattr(called, "addErrback"):
        failures: list[Any] = []
        called.addErrback(failures.append)
        failures[0].raiseException()
    called.send(None)


# The argument `offsets` of a consumer: the words for each storage, and what is none.


def test_the_words_for_a_storage(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    assert open_storage("broker") is None
    assert isinstance(open_storage(f"file:{path}"), FileOffsets)
    own = FileOffsets(str(path))
    assert open_storage(own) is own
    assert isinstance(open_storage(f"sql:sqlite:///{tmp_path / 'offsets.db'}"), SqlOffsets)
    assert isinstance(open_storage("zookeeper://127.0.0.1:2181/meta"), ZooKeeperOffsets)
    for wrong in ("disk", "file:", "sql:", "zookeeper:", "zookeeper://", 5):
        with pytest.raises(BadRequest):
            open_storage(wrong)  # type: ignore[arg-type]


def test_what_is_not_used_is_not_loaded() -> None:
    program = (
        "import sys, tfmq; tfmq.Consumer(topics='t', group='g', offsets='file:x');"
        " sys.exit(any(name in sys.modules for name in ('sqlalchemy', 'kazoo')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Where a consumer starts, and where it continues when that is configured: what may be written, and what is read then.

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_767_268_800_000
NAME = PartitionName("orders", 0)


@pytest.fixture
def broker() -> Broker:
    return Broker()


def test_every_way_to_start() -> None:
    assert start_position("earliest") == EARLIEST
    assert start_position("latest") == LATEST
    assert start_position(0) == StartPosition(BY_OFFSET, 0, exact=True)
    assert start_position(Ordinal(7)) == StartPosition(BY_ORDINAL, 7)
    assert start_position(NOON) == StartPosition(BY_TIME_MS, NOON_MS)


@pytest.mark.parametrize("start", ["first", -1, 1 << 63, True, None, 1.5, Ordinal(-1), datetime(2026, 1, 1)])
def test_what_is_no_start_is_refused(start: Any) -> None:
    with pytest.raises(BadRequest):
        start_position(start)


def test_a_seek_takes_exactly_one_place_and_the_record_at_or_before_an_offset() -> None:
    assert seek_position(offset=5) == StartPosition(BY_OFFSET, 5)
    assert seek_position(ordinal=5) == StartPosition(BY_ORDINAL, 5)
    assert seek_position(time=NOON) == StartPosition(BY_TIME_MS, NOON_MS)
    assert seek_position(to="latest") == LATEST
    for wrong in ({}, {"offset": 1, "ordinal": 1}, {"to": "middle"}, {"offset": -1}):
        with pytest.raises(BadRequest):
            seek_position(**wrong)


# A consumer that starts there


@pytest.mark.parametrize(
    ("start", "expected"),
    [("earliest", [b"0", b"1", b"2"]), ("latest", []), (Ordinal(2), [b"2"]), (0, [b"0", b"1", b"2"])],
)
def test_start(broker: Broker, start: Any, expected: list[bytes]) -> None:
    filled(broker, 3)
    assert Script(broker, start=start).poll() == expected


def test_start_applies_only_where_the_group_has_no_offset(broker: Broker) -> None:
    filled(broker, 3)
    first = Script(broker, group="g")
    first.poll(count=1)
    first.close(processed=True)
    assert Script(broker, group="g", start="latest").poll() == [b"1", b"2"]


def test_an_offset_of_a_topic_that_was_deleted_and_made_anew_does_not_count(broker: Broker) -> None:
    filled(broker, 3)
    first = Script(broker, group="g")
    first.poll()
    first.close(processed=True)
    filled(broker, 2)
    assert Script(broker, group="g").poll() == [b"0", b"1"]


def test_it_waits_for_a_topic_that_is_not_there_and_never_makes_it(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(broker, start="latest")
    assert script.poll(10) == []
    assert [each for each in caplog.messages if "orders" in each] == [
        "orders does not exist yet; waiting for it. Reading never creates a topic."
    ]
    assert not any(request.create for request in broker.sent(wire.Metadata))
    filled(broker, 2)
    assert script.poll(3) == [b"0", b"1"], "what came after we began to wait is news"


def test_a_partition_that_appears_later_is_read_from_its_start(broker: Broker) -> None:
    filled(broker, 2)
    script = Script(broker, group="g", start="latest")
    assert script.poll() == []
    broker.grow("orders").append(b"new")
    assert script.poll(10) == [b"new"]
    script.close()
    broker.grow("orders").append(b"newer")
    assert Script(broker, group="g", start="latest").poll() == [b"new", b"newer"]


def test_a_pattern_finds_topics_that_appear_later(broker: Broker) -> None:
    filled(broker, 1, "a.1")
    filled(broker, 1, "b")
    script = Script(broker, topics=re.compile(r"a\..*"))
    assert script.poll() == [b"0"]
    filled(broker, 1, "a.2")
    assert [m.topic for m in script.messages(10)] == ["a.2"]


def test_partitions_may_be_named(broker: Broker) -> None:
    broker.create("orders", 3)
    for log in broker.topics["orders"][1]:
        log.append(b"x")
    assert [m.partition for m in Script(broker, partitions=[("orders", 1)]).messages()] == [1]
    assert sorted(m.partition for m in Script(broker, topics="orders", partitions=[0, 2]).messages()) == [0, 2]


# A consumer that is moved


def test_seek_goes_back_and_forward(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker)
    script.poll()
    script.run(script.core.seek(*NAME, ordinal=3))
    assert script.poll() == [b"3", b"4"]
    script.run(script.core.seek(*NAME, offset=log.pieces[1].offset + 5))
    assert script.poll(count=2) == [b"1", b"2"]
    script.run(script.core.seek(*NAME, to="latest"))
    assert script.poll() == []


def test_a_seek_before_the_first_poll_and_in_the_middle_of_a_loop(broker: Broker) -> None:
    filled(broker)
    script = Script(broker)
    script.run(script.core.seek(*NAME, ordinal=2))
    seen = []
    for message in script.loop():
        seen.append(message.payload)
        if len(seen) == 2:
            script.run(script.core.seek(*NAME, ordinal=0))
        if len(seen) == 4:
            break
    assert seen == [b"2", b"3", b"0", b"1"]


def test_a_seek_back_is_saved_as_it_is(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g")
    script.poll()
    script.commit()
    script.run(script.core.seek(*NAME, ordinal=0))
    script.close(processed=True)
    assert broker.saved("g") == 0


def test_a_seek_cancels_the_waiting_fetch_at_the_broker(broker: Broker) -> None:
    filled(broker)
    script = Script(broker)
    script.poll(), script.poll(0.1)
    script.run(script.core.seek(*NAME, to="latest"))
    assert len(broker.sent(wire.Cancel)) == 1


def test_pause_keeps_back_what_was_ready_and_resume_brings_it(broker: Broker) -> None:
    log = broker.create("orders")
    log.append(*[b"%d" % n for n in range(4)])
    script = Script(broker)
    loop = script.loop()
    assert next(loop).payload == b"0"
    script.run(script.core.pause(*NAME))
    assert script.poll(1) == []
    script.run(script.core.resume(*NAME))
    assert script.poll() == [b"1", b"2", b"3"]


def test_partitions_that_it_does_not_read_are_refused(broker: Broker) -> None:
    filled(broker)
    script = Script(broker)
    with pytest.raises(UnknownPartition, match="orders-7"):
        script.run(script.core.pause("orders", 7))


def test_lag_counts_messages(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g")
    lag = script.run(script.core.lag())
    assert (lag, lag.partitions) == (5, {NAME: 5})
    script.poll(count=2)
    assert script.run(script.core.lag()) == 3
    script.close(processed=True)
    again = Script(broker, group="g")
    assert again.run(again.core.lag()) == 3, "the ordinal of a saved offset is asked for"


def test_position_and_committed(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    assert script.run(script.core.committed(*NAME)) is None
    script.poll(count=2)
    assert script.run(script.core.position(*NAME)) == offset_of(log, 2)
    script.commit()
    assert script.run(script.core.committed(*NAME)) == offset_of(log, 2)


# What a user names, and what that means with the topics that are there.


def row(name: str, partitions: int, incarnation: int = 7) -> TopicRow:
    return TopicRow(name, incarnation, [PartitionRow(n, "open") for n in range(partitions)], {})


ROWS = [row("a", 2), row("b", 3, 8)]


def wanted(topics: Any = None, partitions: Any = None) -> list[str]:
    return [str(name) for name in Subscription.from_arguments(topics, partitions).subscribed_partitions(ROWS)]


def test_topics_patterns_and_partitions() -> None:
    assert wanted("a") == ["a-0", "a-1"]
    assert wanted(["b", "a"]) == ["a-0", "a-1", "b-0", "b-1", "b-2"]
    assert wanted(re.compile("[b-z]")) == ["b-0", "b-1", "b-2"]
    assert wanted(["a", "b"], [1]) == ["a-1", "b-1"]
    assert wanted(None, [("a", 0), ("b", 2)]) == ["a-0", "b-2"]


def test_each_partition_comes_with_the_incarnation_of_its_topic() -> None:
    assert Subscription.from_arguments("b", None).subscribed_partitions(ROWS)[PartitionName("b", 0)] == 8


def test_a_pattern_must_match_the_whole_name() -> None:
    assert Subscription.from_arguments(re.compile("a"), None).subscribed_partitions([row("ab", 1)]) == {}


def test_what_is_asked_and_what_is_missing() -> None:
    subscription = Subscription.from_arguments(["x", "a"], None)
    assert subscription.topics_to_request() == ["a", "x"]
    assert subscription.missing_names(subscription.subscribed_partitions(ROWS)) == ["x"]
    single = Subscription.from_arguments(None, [("a", 1), ("a", 9)])
    assert single.missing_names(single.subscribed_partitions(ROWS)) == ["a-9"]
    assert Subscription.from_arguments(re.compile("x"), None).topics_to_request() is None


@pytest.mark.parametrize(
    ("topics", "partitions"),
    [
        (None, None),
        ([], None),
        ("", None),
        ("a/b", None),
        ("..", None),
        (["a", 5], None),
        ("a", []),
        ("a", [-1]),
        ("a", [("a", 1)]),
        (None, []),
        (None, [1]),
        (None, [("a", "1")]),
        (None, [("a", True)]),
        (5, None),
        ([[]], None),
        (re.compile(b"a"), None),
        ("a", 5),
        ("a", "0"),
        (None, 5),
        (None, "ab"),
        (None, [None]),
    ],
)
def test_what_names_nothing_is_refused(topics: Any, partitions: Any) -> None:
    with pytest.raises(BadRequest):
        Subscription.from_arguments(topics, partitions)
