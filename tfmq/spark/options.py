"""All options of the Spark source and sink: name, accepted values, default, use and meaning.

docs/spark.md has a row for each; a test compares them. Names and meanings are those of Spark's Kafka source where
it has them. Spark passes option names in lower case, so they are not case-sensitive.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from tfmq.errors import BadRequest
from tfmq.limits import valid_name

_TIMEOUT: Final = "how long to wait for a broker is the option timeout here."
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
"""Options of Spark's Kafka source, in lower case -> (the name as written, what to use instead)."""
_CLIENT: Final = (
    ("kafka.", "a broker's client has no settings here but the option timeout: leave it out."),
    ("kafkaconsumer.", "nothing is kept between micro-batches here: leave it out."),
)
"""Prefixes of Kafka option names, and what to do about them."""


def advice(name: str) -> str | None:
    """Return what to use instead of an option of Spark's Kafka source; None for other names."""
    known = ADVICE.get(name.lower())
    if known is not None:
        return f"tfmq has no option {known[0]!r}: {known[1]}"
    for beginning, what in _CLIENT:
        if name.lower().startswith(beginning):
            return f"tfmq has no option {name!r}: {what}"
    return None


# The parsers of option values. Each raises ValueError whose text completes the sentence "NAME must be ...".
NUMBER_MAX = (1 << 63) - 1
_DIGITS = re.compile("[0-9]+")


def text(value: str) -> str:
    """Parse a text that is not empty."""
    if not value.strip():
        raise ValueError("a text that is not empty")
    return value.strip()


def names(value: str) -> tuple[str, ...]:
    """Parse topic names separated by commas."""
    found = tuple(dict.fromkeys(each.strip() for each in value.split(",") if each.strip()))
    if not found or not all(map(valid_name, found)):
        raise ValueError(
            'names of topics with commas between them, like "orders,payments", each of A-Z a-z 0-9 . _ -'
        )
    return found


def name(value: str) -> str:
    """Parse a valid group name."""
    if not valid_name(value.strip()):
        raise ValueError("a name, 1 to 249 of A-Z a-z 0-9 . _ -")
    return value.strip()


def pattern(value: str) -> str:
    """Parse a regular expression: check that it compiles."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f'a regular expression, like "orders-.*" ({error})') from None
    return text(value)


def flag(value: str) -> bool:
    """Parse true or false."""
    found = {"true": True, "false": False}.get(value.strip().lower())
    if found is None:
        raise ValueError("true or false")
    return found


def count(value: str) -> int:
    """Parse an integer from 1 on."""
    found = _whole(value, "a whole number from 1 on")
    if not found:
        raise ValueError("a whole number from 1 on")
    return found


def _whole(value: str, what: str) -> int:
    """Parse decimal digits, at most NUMBER_MAX. Raises ValueError that begins with `what`."""
    found = _DIGITS.fullmatch(value.strip())
    if not (found and value.strip().isascii()):
        raise ValueError(what)
    digits = found[0].lstrip("0") or "0"
    if len(digits) > len(str(NUMBER_MAX)) or int(digits) > NUMBER_MAX:
        raise ValueError(f"{what}, at most {NUMBER_MAX}")
    return int(digits)


_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,19})\s*(b|[kmgt]?)(?:i?b)?", re.IGNORECASE)


def size(value: str) -> int:
    """Parse bytes, also with a unit as in Spark: 64m, 1g; or 64MiB. All units are binary."""
    found = _SIZE.fullmatch(value.strip())
    number = int(found[1]) * _UNITS[found[2].lower()] if found else 0
    if not 0 < number <= NUMBER_MAX:
        raise ValueError("a size in bytes from 1 on, or like 64m, 64MiB, 1g")
    return number


_TIMES = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"([0-9]{1,19}(?:\.[0-9]+)?)\s*(ms|s|min|m|h|d)?", re.IGNORECASE)
_TIME_MAX = 1e9


def seconds(value: str) -> float:
    """Parse seconds, also with a unit: 500ms, 30s, 15m."""
    found = _TIME.fullmatch(value.strip())
    number = float(found[1]) * _TIMES[(found[2] or "").lower()] if found else 0.0
    if number >= _TIME_MAX:
        raise ValueError("a time in seconds above 0, or like 500ms, 30s, 15m, of less than 11000 days")
    if not number > 0:
        raise ValueError("a time in seconds above 0, or like 500ms, 30s, 15m")
    return number


def one_of(*words: str) -> Callable[[str], str]:
    """Return a parser that accepts one of `words`, in any case."""

    def read(value: str) -> str:
        if value.strip().lower() not in words:
            raise ValueError(" or ".join(words))
        return value.strip().lower()

    return read


def moment(value: str) -> int:
    """Parse milliseconds since 1970."""
    return _whole(value, "milliseconds since 1970, like 1700000000000")


def version(value: str) -> int:
    """Parse an integer from 0 on."""
    return _whole(value, "a whole number from 0 on")


def lists_by_topic(value: str) -> dict[str, Any]:
    """Parse a JSON object of topics; the values, lists of partitions, are not checked here."""
    return _by_topic(value, '{"orders": [0, 1]}')


def times_by_topic(value: str) -> dict[str, Any]:
    """Parse a JSON object of topics; the values, times by partition, are not checked here."""
    return _by_topic(value, '{"orders": {"0": 1700000000000}}')


def _by_topic(value: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"a JSON object of topics, like {example}")
    return found


def place(value: str) -> str | dict[str, Any]:
    """Parse earliest, latest, or a JSON object of topics."""
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        return _by_topic(value, '{"orders": {"0": 4096, "1": -2}}')
    except ValueError as error:
        raise ValueError(f"earliest, latest, or {error}") from None


Where = Literal["source", "sink", "both"]
Query = Literal["batch", "stream", "both"]

SPARK_OPTIONS = frozenset(
    (
        "checkpointlocation",
        "queryname",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
    )
)
"""Spark's own options, which it passes to the data source, too."""

CREATE_TABLE = "provider"
"""Option of a table in a catalog, which Spark creates and later reads without any options."""


class Option(NamedTuple):
    """One option; `parse` converts its text, or raises ValueError.

    The text of the ValueError completes the sentence "NAME must be ...". `query`: whether the option is for batch
    queries (`spark.read`, `write`), streams (`readStream`, `writeStream`) or both.
    """

    name: str
    takes: str
    default: str
    where: Where
    query: Query
    read: Callable[[str], Any]
    meaning: str


OPTIONS: tuple[Option, ...] = (
    Option("servers", "HOST:PORT", "", "both", "both", text, "The broker. A source takes it or `path`."),
    Option(
        "path",
        "a folder",
        "",
        "source",
        "both",
        text,
        "The DATA folder of a broker, whose segment files are read directly, while it runs or not. Every executor must"
        " see the folder under this name.",
    ),
    Option(
        "subscribe",
        "topics, with commas",
        "",
        "source",
        "both",
        names,
        "The topics to read. One of `subscribe`, `subscribePattern` and `assign` must be given.",
    ),
    Option(
        "subscribePattern",
        "a regular expression",
        "",
        "source",
        "both",
        pattern,
        "All topics whose whole name matches it, in Python's syntax; also those created later.",
    ),
    Option(
        "assign",
        'JSON, `{"orders": [0, 1]}`',
        "",
        "source",
        "both",
        lists_by_topic,
        "Only these partitions.",
    ),
    Option(
        "startingOffsets",
        "`earliest`, `latest`, JSON",
        "`earliest` (batch), `latest` (stream)",
        "source",
        "both",
        place,
        "Where to begin. JSON gives an offset for each partition, -2 for its beginning, -1 for its end. A stream that"
        " has a checkpoint continues from the checkpoint.",
    ),
    Option(
        "startingTimestamp",
        "ms since 1970",
        "",
        "source",
        "both",
        moment,
        "Begin at the first message appended then or later. Instead of `startingOffsets`.",
    ),
    Option(
        "startingOffsetsByTimestamp",
        'JSON, `{"orders": {"0": 1700000000000}}`',
        "",
        "source",
        "both",
        times_by_topic,
        "The same, with a time for each partition.",
    ),
    Option(
        "startingOffsetsByTimestampStrategy",
        "`error`, `latest`",
        "`error`",
        "source",
        "both",
        one_of("error", "latest"),
        "What to do if nothing was appended then or later: stop, or begin at the end.",
    ),
    Option(
        "endingOffsets",
        "`latest`, JSON",
        "`latest`",
        "source",
        "batch",
        place,
        "Where to end, the offset itself not included. In JSON -1 is the end as it is when the query is planned.",
    ),
    Option(
        "endingTimestamp",
        "ms since 1970",
        "",
        "source",
        "batch",
        moment,
        "End before the first message appended then or later. Instead of `endingOffsets`.",
    ),
    Option(
        "endingOffsetsByTimestamp",
        'JSON, `{"orders": {"0": 1700000000000}}`',
        "",
        "source",
        "batch",
        times_by_topic,
        "The same, with a time for each partition.",
    ),
    Option(
        "failOnDataLoss",
        "`true`, `false`",
        "`true`",
        "source",
        "both",
        flag,
        "Whether a query stops where messages are gone that it has not read: by retention, with a topic that was"
        " deleted, by damage. `false`: it continues after them, and logs the loss.",
    ),
    Option(
        "maxOffsetsPerTrigger",
        "messages",
        "no limit",
        "source",
        "stream",
        count,
        "Maximum number in a micro-batch, shared in proportion to what waits in each partition.",
    ),
    Option(
        "maxBytesPerTrigger",
        "bytes, or 64m",
        "no limit",
        "source",
        "stream",
        size,
        "Approximate bytes in a micro-batch: each partition ends with the message in which its share ends. Instead of"
        " `maxOffsetsPerTrigger`.",
    ),
    Option(
        "minOffsetsPerTrigger",
        "messages",
        "1",
        "source",
        "stream",
        count,
        "Wait for this number of messages, at most for `maxTriggerDelay`. Not with `Trigger.AvailableNow`.",
    ),
    Option(
        "maxTriggerDelay",
        "a time, 15m",
        "15m",
        "source",
        "stream",
        seconds,
        "How long `minOffsetsPerTrigger` waits.",
    ),
    Option(
        "minPartitions",
        "a number",
        "one for each partition",
        "source",
        "both",
        count,
        "Split large partitions, so that about this number of tasks or more share the work.",
    ),
    Option(
        "maxRecordsPerPartition",
        "messages",
        "no limit",
        "source",
        "both",
        count,
        "Maximum number for one task.",
    ),
    Option(
        "groupId",
        "a name",
        "",
        "source",
        "stream",
        name,
        "The group in the broker that gets the query's progress, so that `tfmq group` shows its lag. The checkpoint"
        " decides where the query continues, not the group.",
    ),
    Option(
        "verify",
        "`chunk`, `message`, `none`",
        "`chunk`",
        "source",
        "both",
        one_of("chunk", "message", "none"),
        "Which checksums are verified: one for each block of at most 64 KiB, those of all messages as well, or none.",
    ),
    Option(
        "topic",
        "a name",
        "",
        "sink",
        "both",
        text,
        "The topic to write to. Without it each row names its topic in a column `topic`.",
    ),
    Option(
        "transactionTtl",
        "a time, 24h",
        "`transaction.group_ttl_seconds` of the broker",
        "sink",
        "both",
        seconds,
        "How long the rows of a finished task wait in the broker for the commit. It must be longer than a whole batch"
        " may take. Rows of a query that never restarts are discarded after it.",
    ),
    Option(
        "allowOtherTotal",
        "`true`, `false`",
        "`false`",
        "sink",
        "both",
        flag,
        "For queries that return other rows when they are run again: a batch that is already committed is skipped"
        " even if it has another number of rows now. `false`: the query stops then.",
    ),
    Option(
        "txnAppId",
        "a name",
        "",
        "sink",
        "batch",
        text,
        "With `txnVersion`: a batch write is done once, however often it is run. The versions of one application's"
        " writes must increase.",
    ),
    Option(
        "txnVersion",
        "a whole number",
        "",
        "sink",
        "batch",
        version,
        "The number of this write among those of `txnAppId`; one that is already committed is skipped.",
    ),
    Option(
        "timeout",
        "a time, 30s",
        "30s",
        "both",
        "both",
        seconds,
        "How long to wait for a broker that does not respond.",
    ),
)


def chosen(given: Mapping[str, str], where: Where, query: Query) -> dict[str, Any]:
    """Parse the options in `given`; the result has their documented spelling as keys.

    `query` "both": the kind of query is not known yet. Raises BadRequest that names an unknown option, one for
    another use, or an invalid value.
    """
    known = {each.name.lower(): each for each in OPTIONS}
    found = {}
    if CREATE_TABLE in given:
        raise BadRequest(
            "Spark keeps no options of a table for a source in Python: write CREATE TEMPORARY VIEW instead of CREATE"
            " TABLE."
        )
    for key, value in given.items():
        if key.lower() in SPARK_OPTIONS:
            continue
        option = known.get(key.lower())
        if option is None:
            raise BadRequest(advice(key) or f"tfmq has no option {key!r}.{nearest(key, _names(where))}")
        found[option.name] = _value(option, value, where, query)
    return found


def _names(where: Where) -> list[str]:
    return [each.name for each in OPTIONS if each.where in (where, "both")]


_INSTEAD = {
    "path": 'save() takes no name here: name the topic with option("topic", NAME), or a column topic.',
    "subscribe": "subscribe is an option of the source, not of the sink: the topic to write to is topic.",
    "topic": "topic is an option of the sink, not of the source: the topics to read are subscribe.",
}
"""Messages for options of the wrong side that are easily confused."""

_VERBS: dict[tuple[Where, Query], str] = {
    ("source", "batch"): "spark.read",
    ("source", "stream"): "spark.readStream",
    ("sink", "batch"): "write",
    ("sink", "stream"): "writeStream",
}


def _value(option: Option, value: str, where: Where, query: Query) -> Any:
    """Parse one option. Raises BadRequest if it is invalid or not for this kind of query."""
    if option.where not in (where, "both") and option.name in _INSTEAD:
        raise BadRequest(_INSTEAD[option.name])
    if option.where not in (where, "both"):
        raise BadRequest(
            f"{option.name} is an option of the {option.where}, not of the {where}: leave it out here."
        )
    if query != "both" and option.query not in (query, "both"):
        raise BadRequest(
            f"{option.name} is an option of {_VERBS[where, option.query]} only: leave it out here."
        )
    try:
        return option.read(value)
    except ValueError as error:
        raise BadRequest(f"{option.name} must be {error}, not {value!r}.") from None


def only_one(given: Mapping[str, Any], *exclusive: str, required: bool = False) -> str:
    """Return which of the `exclusive` options is given, "" if none.

    Raises BadRequest for two, and for none if one is `required`.
    """
    there = [name for name in exclusive if name in given]
    if len(there) > 1:
        raise BadRequest(f"{there[0]} and {there[1]} exclude each other: give one of them.")
    if not there and required:
        raise BadRequest(f"Give one of the options {', '.join(exclusive[:-1])} and {exclusive[-1]}.")
    return there[0] if there else ""


def nearest(word: str, words: list[str]) -> str:
    """Return " Did you mean 'X'?" for the word most like `word`, else "". Ignores case."""
    lower = {each.lower(): each for each in words}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return f" Did you mean {lower[found[0]]!r}?" if found else ""
