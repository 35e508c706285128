"""Every argument of a consumer: taken, or refused with a sentence that names it."""

from typing import Any

import pytest

from tfmq.client.consumer_options import consumer_options
from tfmq.errors import BadRequest, NotSupported


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
        ("prefetch_bytes", 1 << 40),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: Any) -> None:
    arguments = {"topics": "orders", "group": "g", name: value}
    with pytest.raises(BadRequest):
        consumer_options(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retries", 5),
        ("retries", 0),
        ("dead_letters", "topic:dead"),
        ("hooks", [object()]),
        ("offsets", "sql:sqlite://"),
        ("offsets", "zookeeper://here"),
        ("tags", "a || b"),
        ("tags", "*"),
    ],
)
def test_what_belongs_to_a_later_release_says_so(name: str, value: Any) -> None:
    with pytest.raises(NotSupported, match="later release"):
        consumer_options(**{"topics": "orders", "group": "g", name: value})


@pytest.mark.parametrize("arguments", [{"commits": "manual"}, {"offsets": "file:x"}])
def test_saving_needs_a_group(arguments: Any) -> None:
    with pytest.raises(BadRequest, match="group"):
        consumer_options(topics="orders", **arguments)
