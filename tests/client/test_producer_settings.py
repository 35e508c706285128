"""A producer's arguments: checked when it is made, each refusal names its value."""

from typing import Any

import pytest

import tfmq
from tfmq.client.producer.core import ProducerSettings
from tfmq.errors import BadRequest
from tfmq.protocol.commands import ACKS_WRITTEN

FINE = ProducerSettings(None, None, None, 5.0, 1000, 10_000, None, None, 30.0, ())


def test_units_are_seconds_inside() -> None:
    options = FINE._replace(acks="written", linger_ms=20).send_options()
    assert (options.acks, options.linger_seconds, options.timeout) == (ACKS_WRITTEN, 0.02, 30.0)


def test_a_batch_is_no_larger_than_the_buffer() -> None:
    assert FINE._replace(buffer_bytes=100).send_options().batch_bytes == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"acks": "all"},
        {"group": "a b"},
        {"linger_ms": -1},
        {"timeout": 0},
        {"batch_bytes": 9 << 20},
        {"buffer_bytes": "1"},
        {"codec": "json"},
    ],
)
def test_what_makes_no_sense_is_refused_by_its_value(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        FINE._replace(**wrong).send_options()
    assert str(next(iter(wrong.values()))) in caught.value.sentence


@pytest.mark.parametrize("codec", [{"orders": "json"}, {"no topic!": tfmq.codecs.json}])
def test_one_codec_by_topic_is_checked_topic_by_topic(codec: Any) -> None:
    FINE._replace(codec={"orders": tfmq.codecs.json}).send_options()
    with pytest.raises(BadRequest, match=r"'json' is none|names 'no topic!'"):
        FINE._replace(codec=codec).send_options()
