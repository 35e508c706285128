"""Every option of the Spark source and sink, once: its name, what it takes, its default, where it holds, and what it
means. docs/spark.md has a row for each; a test compares them.

Names and meanings are those of Spark's Kafka source where that has them. Spark hands option names over in lower case,
so case never matters here.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tfmq.errors import BadRequest
from tfmq.spark.kafka_names import advice
from tfmq.spark.option_values import (
    count,
    flag,
    lists_by_topic,
    moment,
    name,
    names,
    one_of,
    pattern,
    place,
    seconds,
    size,
    text,
    times_by_topic,
    version,
)

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
"""What Spark passes on although it is meant for itself."""

CREATE_TABLE = "provider"
"""Comes with a table of a catalog, which Spark makes and then reads without any options."""


class Option(NamedTuple):
    """One option. `read` makes a value of its text, or raises ValueError whose text ends the sentence "NAME must be".

    `query` says for which kind of query it is: `spark.read` and `write`, `readStream` and `writeStream`, or both.
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
        "All topics whose whole name matches it, in Python's syntax; also those that are made later.",
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
        " has a checkpoint goes on where that says.",
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
        "What to do where nothing was appended then or later: stop, or begin at the end.",
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
        " deleted, by damage. `false`: it goes on behind them, and says so in the log.",
    ),
    Option(
        "maxOffsetsPerTrigger",
        "messages",
        "no limit",
        "source",
        "stream",
        count,
        "At most so many in a micro-batch, shared among the partitions by what waits in each.",
    ),
    Option(
        "maxBytesPerTrigger",
        "bytes, or 64m",
        "no limit",
        "source",
        "stream",
        size,
        "About so many bytes in a micro-batch: each partition ends with the message in which its share ends. Instead of"
        " `maxOffsetsPerTrigger`.",
    ),
    Option(
        "minOffsetsPerTrigger",
        "messages",
        "1",
        "source",
        "stream",
        count,
        "Wait until so many are there, at most for `maxTriggerDelay`. Not with `Trigger.AvailableNow`.",
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
        "Cut large partitions into pieces, so that about so many tasks or more share the work.",
    ),
    Option(
        "maxRecordsPerPartition",
        "messages",
        "no limit",
        "source",
        "both",
        count,
        "At most so many for one task.",
    ),
    Option(
        "groupId",
        "a name",
        "",
        "source",
        "stream",
        name,
        "The group in the broker that gets the query's progress, so that `tfmq group` shows its lag. The checkpoint"
        " decides where the query goes on, not the group.",
    ),
    Option(
        "verify",
        "`chunk`, `message`, `none`",
        "`chunk`",
        "source",
        "both",
        one_of("chunk", "message", "none"),
        "Which checksums are proven: one for each block of at most 64 KiB, those of all messages as well, or none.",
    ),
    Option(
        "topic",
        "a name",
        "",
        "sink",
        "both",
        text,
        "The topic to write to. Without it the rows say it, in a column `topic`.",
    ),
    Option(
        "transactionTtl",
        "a time, 24h",
        "`transaction.group_ttl_seconds` of the broker",
        "sink",
        "both",
        seconds,
        "How long the rows of a finished task wait in the broker for the commit. It must be longer than a whole batch"
        " may take; what a query left that never comes back goes after it.",
    ),
    Option(
        "allowOtherTotal",
        "`true`, `false`",
        "`false`",
        "sink",
        "both",
        flag,
        "For queries that give other rows when they are run again: a batch that is committed already is passed over"
        " even if it has another number of rows now. `false`: the query stops then.",
    ),
    Option(
        "txnAppId",
        "a name",
        "",
        "sink",
        "batch",
        text,
        "With `txnVersion`: a batch write is done once, however often it is run. The writes of one application have"
        " versions that only go up.",
    ),
    Option(
        "txnVersion",
        "a whole number",
        "",
        "sink",
        "batch",
        version,
        "The number of this write among those of `txnAppId`; one that is done already is passed over.",
    ),
    Option(
        "timeout",
        "a time, 30s",
        "30s",
        "both",
        "both",
        seconds,
        "How long a broker that does not answer is waited for.",
    ),
)


def chosen(given: Mapping[str, str], where: Where, query: Query) -> dict[str, Any]:
    """The values of the options that are given, by their names. Raises BadRequest for one that is unknown, belongs
    elsewhere, or has a wrong value; the sentence names it. `query` "both": it is not known yet which it will be.
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
"""What to say to options of the other end that are easily mistaken."""

_VERBS: dict[tuple[Where, Query], str] = {
    ("source", "batch"): "spark.read",
    ("source", "stream"): "spark.readStream",
    ("sink", "batch"): "write",
    ("sink", "stream"): "writeStream",
}


def _value(option: Option, value: str, where: Where, query: Query) -> Any:
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
    """Which of these options is given, "" if none. Raises BadRequest for two, and for none of what is required."""
    there = [name for name in exclusive if name in given]
    if len(there) > 1:
        raise BadRequest(f"{there[0]} and {there[1]} exclude each other: give one of them.")
    if not there and required:
        raise BadRequest(f"Give one of the options {', '.join(exclusive[:-1])} and {exclusive[-1]}.")
    return there[0] if there else ""


def nearest(word: str, words: list[str]) -> str:
    """' Did you mean 'subscribe'?' for the nearest of `words`, in any case, or nothing."""
    lower = {each.lower(): each for each in words}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return f" Did you mean {lower[found[0]]!r}?" if found else ""
