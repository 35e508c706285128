"""Three API variants, one contract: blocking, asyncio and Twisted have the same names, parameters and docs."""

import inspect
import re
from typing import Any

import pytest

import tfmq
from tfmq import aio, twisted
from tfmq.client.admin.admin import AdminCore
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.producer.xa import XaBranches

API_VARIANTS = {
    "Producer": (tfmq.Producer, aio.Producer, twisted.Producer),
    "Consumer": (tfmq.Consumer, aio.Consumer, twisted.Consumer),
    "Admin": (tfmq.Admin, aio.Admin, twisted.Admin),
    "Transaction": (tfmq.Transaction, aio.Transaction, twisted.Transaction),
    "XAResource": (tfmq.XAResource, aio.XAResource, twisted.XAResource),
}
OTHERS = [
    pytest.param(variants[0], other, id=f"{other.__module__}.{name}")
    for name, variants in API_VARIANTS.items()
    for other in variants[1:]
]
WITHOUT_WAITING = {"Producer": {"send_nowait"}}
"""Only who gets an acknowledged result from `send` needs another way to wait for nothing."""
ACKNOWLEDGED = {"send", "send_many", "send_arrow"}
REACTOR = {"reactor"}
"""A loop runs around those who await; a reactor may be another one than the installed."""


def public(variant: type) -> dict[str, Any]:
    """Methods, inherited ones included."""
    members = {name: inspect.getattr_static(variant, name) for name in dir(variant) if not name.startswith("_")}
    return {name: each for name, each in members.items() if callable(each)}


def parameters(member: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(member).parameters.values())


@pytest.mark.parametrize(("blocking", "other"), OTHERS)
def test_the_names_are_the_same(blocking: type, other: type) -> None:
    assert set(public(other)) == set(public(blocking)) | WITHOUT_WAITING.get(blocking.__name__, set())


@pytest.mark.parametrize(("blocking", "other"), OTHERS)
def test_the_parameters_are_the_same(blocking: type, other: type) -> None:
    for name, member in public(blocking).items():
        assert parameters(member) == parameters(public(other)[name]), name


@pytest.mark.parametrize(("blocking", "other"), OTHERS)
def test_they_are_made_with_the_same_arguments(blocking: type, other: type) -> None:
    theirs = [each for each in parameters(other) if each.name not in REACTOR]
    mine = parameters(blocking)
    assert [each.name for each in theirs] == [each.name for each in mine]
    assert [each.default for each in theirs] == [each.default for each in mine]
    assert [each.kind for each in theirs] == [each.kind for each in mine]


@pytest.mark.parametrize("variant", [tfmq, aio, twisted], ids=lambda variant: variant.__name__)
def test_a_client_shows_its_arguments_without_a_broker(variant: Any) -> None:
    servers, name = "127.0.0.1:1", variant.__name__
    assert repr(variant.Producer(servers, group="shop")) == f"<{name}.Producer 127.0.0.1:1 group='shop'>"
    assert repr(variant.Admin([servers, "b:2"])) == f"<{name}.Admin 127.0.0.1:1,b:2>"
    consumer = variant.Consumer(servers, topics="orders", group="billing")
    assert repr(consumer) == f"<{name}.Consumer 127.0.0.1:1 topics='orders' group='billing'>"
    assert "topics='o.*'" in repr(variant.Consumer(servers, topics=re.compile("o.*")))
    assert "topics=['a', 'b']" in repr(variant.Consumer(servers, topics=["a", "b"]))


@pytest.mark.parametrize(("blocking", "other"), OTHERS)
def test_the_docs_are_the_same(blocking: type, other: type) -> None:
    """What one API variant adds is appended; what is said of all of them is said in all of them."""
    for name, member in public(blocking).items():
        assert member.__doc__, name
        assert (public(other)[name].__doc__ or "").startswith(member.__doc__), name
    for name in WITHOUT_WAITING.get(blocking.__name__, ()):
        assert public(other)[name].__doc__


@pytest.mark.parametrize(
    "variant", [*API_VARIANTS["Producer"], *API_VARIANTS["Consumer"]], ids=lambda variant: variant.__module__
)
def test_every_argument_has_a_line_of_its_own_in_the_docs(variant: type) -> None:
    described = re.findall(r"^    (\w+): ", (inspect.getdoc(variant) or "").partition("Args:\n")[2], re.MULTILINE)
    assert described == [each.name for each in parameters(variant) if each.name not in REACTOR]


@pytest.mark.parametrize("name", API_VARIANTS)
def test_deferreds_give_what_coroutines_return(name: str) -> None:
    _, asynchronous, deferred = API_VARIANTS[name]
    for method, member in public(asynchronous).items():
        theirs, ours = returned(public(deferred)[method]), returned(member)
        assert theirs == (f"Deferred[{ours}]" if inspect.iscoroutinefunction(member) else ours), method


@pytest.mark.parametrize("name", sorted(set(API_VARIANTS) - {"XAResource"}))
def test_each_is_entered_and_left_in_its_own_way(name: str) -> None:
    blocking, *others = API_VARIANTS[name]
    assert hasattr(blocking, "__exit__")
    assert all(hasattr(other, "__aexit__") for other in others)


@pytest.mark.parametrize("name", ["Producer", "Consumer", "Admin"])
def test_each_is_made_of_the_same_parts(name: str) -> None:
    """What one variant has gained, and another not, is seen here even where no public name says so."""
    options = {"topics": "orders"} if name == "Consumer" else {}
    blocking, *others = [variant("127.0.0.1:1", **options) for variant in API_VARIANTS[name]]
    parts = vars(blocking).keys()
    for other in others:
        assert vars(other).keys() == parts, type(other).__module__
    if name == "Consumer":
        handlers = [variant._core.fetcher.failure_handler for variant in (blocking, *others)]
        assert {type(each) for each in handlers} == {type(blocking._handling)}


@pytest.mark.parametrize(("blocking", "other"), OTHERS)
def test_what_is_read_of_them_is_the_same(blocking: type, other: type) -> None:
    """Properties, inherited ones included, with their docs."""

    def read(variant: type) -> dict[str, str | None]:
        members = {name: inspect.getattr_static(variant, name) for name in dir(variant) if name[0] != "_"}
        return {name: inspect.getdoc(each) for name, each in members.items() if not callable(each)}

    assert read(other) == read(blocking)
    assert all(read(blocking).values())


@pytest.mark.parametrize(("blocking", "other"), OTHERS)
def test_calls_come_to_the_same(blocking: type, other: type) -> None:
    """As annotated; a send gives a blocking producer a handle, and those who await the acknowledged result."""
    for name, member in public(blocking).items():
        mine, theirs = returned(member), returned(public(other)[name])
        theirs = theirs.replace("AsyncIterator", "Iterator")
        if blocking is not tfmq.Producer or name not in ACKNOWLEDGED:
            assert theirs in (mine, f"Deferred[{mine}]"), name


def test_a_consumer_is_gone_through_in_its_own_way() -> None:
    blocking, *others = API_VARIANTS["Consumer"]
    assert {"__iter__", "__next__"} <= vars(blocking).keys()
    assert all({"__aiter__", "__anext__"} <= set(dir(other)) for other in others)


def returned(member: Any) -> str:
    found = inspect.signature(member).return_annotation
    return found if isinstance(found, str) else inspect.formatannotation(found)


@pytest.mark.parametrize(
    ("name", "core", "written"),
    [
        ("Admin", AdminCore, {"close"}),
        ("XAResource", XaBranches, {"end"}),
        ("Consumer", ConsumerCore, {"arrow_batches", "close", "on", "poll", "run", "stats", "stop"}),
    ],
)
def test_each_derived_method_runs_the_operation_of_its_name(name: str, core: type, written: set[str]) -> None:
    for variant in API_VARIANTS[name]:
        for method, member in public(variant).items():
            if method not in written:
                assert inspect.unwrap(member) is vars(core)[method], method
                assert (member.__module__, member.__qualname__) == (variant.__module__, f"{name}.{method}")


def test_the_twisted_client_runs_the_coroutines_of_the_asyncio_client() -> None:
    shared = {"Producer": {"send", "send_many", "cancel", "reschedule", "flush", "close", "stats"}}
    shared["Transaction"] = {"send", "send_many", "prepare", "commit", "rollback"}
    shared["Consumer"] = {"run", "close"}
    for name, methods in shared.items():
        for method in methods:
            coroutine = inspect.unwrap(getattr(aio, name).__dict__[method])
            assert inspect.unwrap(getattr(twisted, name).__dict__[method]) is coroutine, method


def test_wrong_arguments_are_refused_in_the_words_of_python() -> None:
    with pytest.raises(TypeError, match=r"^Admin\.create_topic\(\) missing 1 required positional argument: 'name'"):
        tfmq.Admin("127.0.0.1:1").create_topic()  # type: ignore[call-arg]
