"""What people type who come from Spark's Kafka source, and what it is here: names of options, in lower case."""

from __future__ import annotations

from typing import Final

_TIMEOUT: Final = "how long a broker is waited for says the option timeout here."
_GROUP: Final = "the group that shows a stream's progress is the option groupId here."

ADVICE: Final = {
    "kafka.bootstrap.servers": (
        "kafka.bootstrap.servers",
        "the broker's address is the option servers here.",
    ),
    "bootstrap.servers": ("bootstrap.servers", "the broker's address is the option servers here."),
    "topics": ("topics", "it is subscribe for reading, and topic for writing."),
    "includeheaders": ("includeHeaders", "the column attributes always has the headers: leave it out."),
    "kafka.group.id": ("kafka.group.id", _GROUP),
    "groupidprefix": ("groupIdPrefix", _GROUP),
    "fetchoffset.numretries": ("fetchOffset.numRetries", _TIMEOUT),
    "fetchoffset.retryintervalms": ("fetchOffset.retryIntervalMs", _TIMEOUT),
    "kafkaconsumer.polltimeoutms": ("kafkaConsumer.pollTimeoutMs", _TIMEOUT),
    "auto.offset.reset": ("auto.offset.reset", "where a query begins is the option startingOffsets here."),
}
"""Name -> the name as it is written, and what to do."""
_CLIENT: Final = (
    ("kafka.", "a broker's client has no settings here but the option timeout: leave it out."),
    ("kafkaconsumer.", "nothing is kept between micro-batches here: leave it out."),
)
"""Beginnings of names, and what to do about all of them."""


def advice(name: str) -> str | None:
    """A sentence about an option of Kafka's; None for any other name."""
    known = ADVICE.get(name.lower())
    if known is not None:
        return f"tfmq has no option {known[0]!r}: {known[1]}"
    for beginning, what in _CLIENT:
        if name.lower().startswith(beginning):
            return f"tfmq has no option {name!r}: {what}"
    return None
