"""Every argument of a consumer: taken, or refused with a sentence that names it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tfmq.client.consumer.options import consumer_options
from tfmq.errors import BadRequest
from tfmq.offsets.file import FileOffsets


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
    [
        {"commits": "manual"},
        {"offsets": "file:x"},
        {"broadcast": True},
        {"coordinator": "zookeeper://here/x"},
    ],
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
def test_a_filter_is_a_plain_function_in_every_face(face: Any, function: Any) -> None:
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
def test_a_generator_tells_nobody_in_any_face(face: Any, name: str) -> None:
    for function in (_generator, _generator_too):
        with pytest.raises(BadRequest, match=f"{name}= contains a yield"):
            face("127.0.0.1:1", topics="orders", group="g", **{name: function})


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    "arguments",
    [{"timeout": "a"}, {"timeout": -1}, {"timeout": True}, {"max_messages": "a"}, {"max_messages": 0}],
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
