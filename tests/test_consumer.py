"""The two faces of the consumer: the same names, parameters and meaning, and nothing touched when one is made."""

import inspect
from typing import Any

import pytest

from tfmq import aio_consumer
from tfmq.consumer import Consumer
from tfmq.errors import BadRequest

BLOCKING_ONLY = {"__iter__", "__next__", "__enter__", "__exit__"}
ASYNCIO_ONLY = {"__aiter__", "__anext__", "__aenter__", "__aexit__"}


def surface(face: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(face).items()
        if inspect.isfunction(member) and (not name.startswith("_") or name.startswith("__"))
    }


def test_both_api_variants_have_the_same_methods_with_the_same_parameters() -> None:
    blocking, asynchronous = surface(Consumer), surface(aio_consumer.Consumer)
    assert blocking.keys() - BLOCKING_ONLY == asynchronous.keys() - ASYNCIO_ONLY
    for name in blocking.keys() - BLOCKING_ONLY:
        ours, theirs = inspect.signature(blocking[name]), inspect.signature(asynchronous[name])
        assert ours.parameters == theirs.parameters, name
        if name == "arrow_batches":  # The others return an AsyncIterator.
            continue
        assert (ours.return_annotation, blocking[name].__doc__) == (
            theirs.return_annotation,
            asynchronous[name].__doc__,
        ), name


def test_every_public_method_says_what_it_does() -> None:
    for face in (Consumer, aio_consumer.Consumer):
        assert face.__doc__
        for name, member in surface(face).items():
            assert name.startswith("__") or member.__doc__, name


@pytest.mark.parametrize("face", [Consumer, aio_consumer.Consumer])
def test_making_one_touches_nothing_and_checks_its_arguments(face: Any) -> None:
    face("192.0.2.1:9", topics="orders", group="g")
    assert face[dict] is not None
    with pytest.raises(BadRequest):
        face(topics="orders", read="all")
    with pytest.raises(BadRequest):
        face("http://here", topics="orders")
    with pytest.raises(BadRequest):
        face(topics="orders", retries=-1)
    with pytest.raises(TypeError):
        face("here", "orders")
