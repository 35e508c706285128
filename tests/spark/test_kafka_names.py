"""Whoever comes from Kafka is told what his options are called here."""

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.options import ADVICE, OPTIONS, Where, advice, chosen


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
def test_options_of_kafkas_are_refused_with_what_to_write(name: str, sentence: str, where: Where) -> None:
    with pytest.raises(BadRequest) as caught:
        chosen({name: "x"}, where, "batch")
    assert sentence in str(caught.value)


def test_none_of_them_is_an_option_here() -> None:
    assert not ADVICE.keys() & {each.name.lower() for each in OPTIONS}
    assert all(name == shown.lower() for name, (shown, _) in ADVICE.items())
    assert advice("subscrib") is None
