"""Whoever comes from Kafka is told what his options are called here."""

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.options import KAFKA_OPTIONS, OPTIONS, Side, kafka_advice, parse_options


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "kafka.bootstrap.servers",
            "no option 'kafka.bootstrap.servers': the broker's address is the option servers",
        ),
        (
            "Bootstrap.Servers",
            "no option 'bootstrap.servers': the broker's address is the option servers here.",
        ),
        ("topics", "no option 'topics': it is subscribe for reading, and topic for writing."),
        ("includeheaders", "no option 'includeHeaders': the column attributes always has the headers"),
        ("kafka.security.protocol", "a broker's client has no settings here but the option timeout"),
        ("kafkaconsumer.cache.capacity", "nothing is kept between micro-batches"),
        ("fetchoffset.numretries", "no option 'fetchOffset.numRetries': how long to wait for a broker"),
    ],
)
@pytest.mark.parametrize("where", ["source", "sink"])
def test_options_of_kafkas_are_refused_with_what_to_write(name: str, sentence: str, where: Side) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_options({name: "x"}, where, "batch")
    assert sentence in str(caught.value)


def test_none_of_them_is_an_option_here() -> None:
    assert not KAFKA_OPTIONS.keys() & {each.name.lower() for each in OPTIONS}
    assert all(name == shown.lower() for name, (shown, _) in KAFKA_OPTIONS.items())
    assert kafka_advice("subscrib") is None
