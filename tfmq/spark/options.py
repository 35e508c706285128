"""All options of the Spark source and sink: name, accepted values, default, use and meaning.

docs/spark.md has a row for each option, and a test compares those rows with this module. Options that Spark's Kafka
source also has keep their names and meanings here. Spark passes option names in lower case, so case is ignored.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from tfmq import units
from tfmq.errors import BadRequest
from tfmq.limits import is_valid_name

_TIMEOUT_ADVICE: Final = "how long to wait for a broker is the option timeout here."
_GROUP_ADVICE: Final = "the group that shows a stream's progress is the option groupId here."

KAFKA_ADVICE: Final = {
    "kafka.bootstrap.servers": "the broker's address is the option servers here.",
    "bootstrap.servers": "the broker's address is the option servers here.",
    "topics": "it is subscribe for reading, and topic for writing.",
    "includeHeaders": "the column attributes always has the headers: leave it out.",
    "kafka.group.id": _GROUP_ADVICE,
    "groupIdPrefix": _GROUP_ADVICE,
    "fetchOffset.numRetries": _TIMEOUT_ADVICE,
    "fetchOffset.retryIntervalMs": _TIMEOUT_ADVICE,
    "kafkaConsumer.pollTimeoutMs": _TIMEOUT_ADVICE,
    "auto.offset.reset": "where a query begins is the option startingOffsets here.",
    "kafka.": "a broker's client has no settings here but the option timeout: leave it out.",
    "kafkaConsumer.": "nothing is kept between micro-batches here: leave it out.",
}
"""Option of Spark's Kafka source -> what to use instead. A name that ends with a dot is a prefix of options."""


def kafka_advice(name: str) -> str | None:
    """Return what to use instead of an option of Spark's Kafka source; None for other names."""
    for known, advice in KAFKA_ADVICE.items():
        is_prefix = known.endswith(".") and name.lower().startswith(known.lower())
        if is_prefix or name.lower() == known.lower():
            return f"tfmq has no option {(name if is_prefix else known)!r}: {advice}"
    return None


# Parsers of option values. Each raises ValueError with a text that completes the sentence "NAME must be ...".
NUMBER_MAX = (1 << 63) - 1


def parse_text(value: str) -> str:
    """Return the text without spaces at both ends. Raises ValueError if nothing is left."""
    if not value.strip():
        raise ValueError("a text that is not empty")
    return value.strip()


def parse_topics(value: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(each.strip() for each in value.split(",") if each.strip()))
    if not found or not all(map(is_valid_name, found)):
        raise ValueError('names of topics with commas between them, like "orders,payments", each of A-Z a-z 0-9 . _ -')
    return found


def parse_name(value: str) -> str:
    if not is_valid_name(value.strip()):
        raise ValueError("a name, 1 to 249 of A-Z a-z 0-9 . _ - and neither . nor ..")
    return value.strip()


def parse_pattern(value: str) -> str:
    """Return the regular expression as text, after checking that it compiles."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f'a regular expression, like "orders-.*" ({error})') from None
    return parse_text(value)


def parse_flag(value: str) -> bool:
    return choice_parser("true", "false")(value) == "true"


def _parse_integer(what: str, low: int, value: str) -> int:
    """Parse a decimal number from `low` to NUMBER_MAX. `what`: text of the ValueError for other values."""
    if not re.fullmatch("[0-9]+", value.strip()):
        raise ValueError(what)
    digits = value.strip().lstrip("0") or "0"
    if len(digits) > len(str(NUMBER_MAX)) or int(digits) > NUMBER_MAX:
        raise ValueError(f"{what}, at most {NUMBER_MAX}")
    if int(digits) < low:
        raise ValueError(what)
    return int(digits)


parse_count = partial(_parse_integer, "a whole number from 1 on", 1)
parse_version = partial(_parse_integer, "a whole number from 0 on", 0)
parse_timestamp = partial(_parse_integer, "milliseconds since 1970, like 1700000000000", 0)


def size_option(value: str) -> int:
    """Parse a size in bytes from 1 to NUMBER_MAX, like 64m as Spark writes it, or 64MiB."""
    size = units.parse_size(value)
    if size is None or not 0 < size <= NUMBER_MAX:
        raise ValueError("a size in bytes from 1 on, or like 64m, 64MiB, 1g")
    return size


def duration_option(value: str) -> float:
    """Parse a duration above 0 s, like 500ms, 30s, 15m."""
    seconds = units.parse_duration(value)
    if not seconds or seconds >= 1e9:
        limit = ", of less than 11000 days" if seconds else ""
        raise ValueError(f"a time in seconds above 0, or like 500ms, 30s, 15m{limit}")
    return seconds


def choice_parser(*words: str) -> Callable[[str], str]:
    """Return a parser that accepts one of `words`, in any case."""

    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in words:
            raise ValueError(" or ".join(words))
        return word

    return parse


def _parse_topic_object(example: str, value: str) -> dict[str, Any]:
    """Parse a JSON object whose keys are topics; the values are not checked. `example`: shown in the ValueError."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"a JSON object of topics, like {example}")
    return found


parse_partition_lists = partial(_parse_topic_object, '{"orders": [0, 1]}')
parse_partition_times = partial(_parse_topic_object, '{"orders": {"0": 1700000000000}}')


def parse_offsets(value: str) -> str | dict[str, Any]:
    """Parse "earliest", "latest", or a JSON object with offsets as described in `tfmq.spark.offsets`."""
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        return _parse_topic_object('{"orders": {"0": 4096, "1": -2}}', value)
    except ValueError as error:
        raise ValueError(f"earliest, latest, or {error}") from None


Side = Literal["source", "sink", "both"]
QueryKind = Literal["batch", "stream", "both"]

SPARK_OPTIONS = (
    "checkpointlocation",
    "queryname",
    "asyncprogresstrackingenabled",
    "asyncprogresstrackingcheckpointintervalms",
)
"""Options of Spark itself. Spark passes them to the data source as well, which must ignore them."""


class Option(NamedTuple):
    """One option. `side`: whether the source (reading), the sink (writing) or both have the option.

    `accepts`, `meaning` and `default` are texts for docs/spark.md. `parse` converts the option's text, or raises a
    ValueError whose text completes the sentence "NAME must be ...". `query`: whether the option is for batch queries
    (`spark.read`, `write`), streams (`readStream`, `writeStream`) or both.
    """

    name: str
    accepts: str
    parse: Callable[[str], Any]
    meaning: str
    default: str = ""
    side: Side = "source"
    query: QueryKind = "both"


OPTIONS: tuple[Option, ...] = (
    Option(
        "servers",
        "HOST:PORT",
        parse_text,
        "The broker; of a replicated one all servers: `A,B,C`. A source takes it or `path`.",
        side="both",
    ),
    Option(
        "password",
        "text",
        parse_text,
        "The password of the user in `servers`, `tfmq://USER@HOST:PORT`. Spark does not show it.",
        default="`$TFMQ_PASSWORD` of the driver",
        side="both",
    ),
    Option(
        "path",
        "a folder",
        parse_text,
        "The DATA folder of a broker, whose segment files are read directly, while it runs or not. Every executor must"
        " see the folder under this name.",
    ),
    Option(
        "subscribe",
        "topics, with commas",
        parse_topics,
        "The topics to read. One of `subscribe`, `subscribePattern` and `assign` must be given.",
    ),
    Option(
        "subscribePattern",
        "a regular expression",
        parse_pattern,
        "All topics whose whole name matches it, in Python's syntax; also those created later.",
    ),
    Option("assign", 'JSON, `{"orders": [0, 1]}`', parse_partition_lists, "Only these partitions."),
    Option(
        "startingOffsets",
        "`earliest`, `latest`, JSON",
        parse_offsets,
        "Where to begin. JSON gives an offset for each partition, -2 for its beginning, -1 for its end. A stream that"
        " has a checkpoint continues from the checkpoint.",
        default="`earliest` (batch), `latest` (stream)",
    ),
    Option(
        "startingTimestamp",
        "ms since 1970",
        parse_timestamp,
        "Begin at the first message appended then or later. Instead of `startingOffsets`.",
    ),
    Option(
        "startingOffsetsByTimestamp",
        'JSON, `{"orders": {"0": 1700000000000}}`',
        parse_partition_times,
        "The same, with a time for each partition.",
    ),
    Option(
        "startingOffsetsByTimestampStrategy",
        "`error`, `latest`",
        choice_parser("error", "latest"),
        "What to do if nothing was appended then or later: stop, or begin at the end.",
        default="`error`",
    ),
    Option(
        "endingOffsets",
        "`latest`, JSON",
        parse_offsets,
        "Where to end, the offset itself not included. In JSON -1 is the end as it is when the query is planned.",
        default="`latest`",
        query="batch",
    ),
    Option(
        "endingTimestamp",
        "ms since 1970",
        parse_timestamp,
        "End before the first message appended then or later. Instead of `endingOffsets`.",
        query="batch",
    ),
    Option(
        "endingOffsetsByTimestamp",
        'JSON, `{"orders": {"0": 1700000000000}}`',
        parse_partition_times,
        "The same, with a time for each partition.",
        query="batch",
    ),
    Option(
        "failOnDataLoss",
        "`true`, `false`",
        parse_flag,
        "Whether a query stops where messages are gone that it has not read: by retention, with a topic that was"
        " deleted, by damage. `false`: it continues after them, and logs the loss.",
        default="`true`",
    ),
    Option(
        "maxOffsetsPerTrigger",
        "messages",
        parse_count,
        "Maximum number in a micro-batch, shared in proportion to what waits in each partition.",
        default="no limit",
        query="stream",
    ),
    Option(
        "maxBytesPerTrigger",
        "bytes, or 64m",
        size_option,
        "Approximate bytes in a micro-batch: each partition ends with the message in which its share ends. Instead of"
        " `maxOffsetsPerTrigger`.",
        default="no limit",
        query="stream",
    ),
    Option(
        "minOffsetsPerTrigger",
        "messages",
        parse_count,
        "Wait for this number of messages, at most for `maxTriggerDelay`. Not with `Trigger.AvailableNow`.",
        default="1",
        query="stream",
    ),
    Option(
        "maxTriggerDelay",
        "a time, 15m",
        duration_option,
        "How long `minOffsetsPerTrigger` waits.",
        default="15m",
        query="stream",
    ),
    Option(
        "minPartitions",
        "a number",
        parse_count,
        "Split large partitions, so that about this number of tasks or more share the work.",
        default="one for each partition",
    ),
    Option("maxRecordsPerPartition", "messages", parse_count, "Maximum number for one task.", default="no limit"),
    Option(
        "groupId",
        "a name",
        parse_name,
        "The group in the broker that gets the query's progress, so that `tfmq group` shows its lag. The checkpoint"
        " decides where the query continues, not the group.",
        query="stream",
    ),
    Option(
        "verify",
        "`chunk`, `message`, `none`",
        choice_parser("chunk", "message", "none"),
        "Which checksums are verified: one for each block of at most 64 KiB, those of all messages as well, or none.",
        default="`chunk`",
    ),
    Option(
        "topic",
        "a name",
        parse_text,
        "The topic to write to. Without it each row names its topic in a column `topic`.",
        side="sink",
    ),
    Option(
        "transactionTtl",
        "a time, 24h",
        duration_option,
        "How long the rows of a finished task wait in the broker for the commit. It must be longer than a whole batch"
        " may take. Rows of a query that never restarts are discarded after it.",
        default="`transaction.group_ttl_seconds` of the broker",
        side="sink",
    ),
    Option(
        "allowOtherTotal",
        "`true`, `false`",
        parse_flag,
        "For queries that return other rows when they are run again: a batch that is already committed is skipped"
        " even if it has another number of rows now. `false`: the query stops then.",
        default="`false`",
        side="sink",
    ),
    Option(
        "txnAppId",
        "a name",
        parse_text,
        "With `txnVersion`: a batch write is done once, however often it is run. The versions of one application's"
        " writes must increase.",
        side="sink",
        query="batch",
    ),
    Option(
        "txnVersion",
        "a whole number",
        parse_version,
        "The number of this write among those of `txnAppId`; one that is already committed is skipped.",
        side="sink",
        query="batch",
    ),
    Option(
        "timeout",
        "a time, 30s",
        duration_option,
        "How long to wait for a broker that does not respond.",
        default="30s",
        side="both",
    ),
)


def parse_options(given: Mapping[str, str], side: Side, query: QueryKind) -> dict[str, Any]:
    """Parse the options in `given` (name -> text). The keys of the result are the option names as in docs/spark.md.

    `side`: whether a source or a sink got the options · `query`: kind of query, "both" if it is not known yet. Raises
    BadRequest for an unknown option, an option for another side or kind of query, or an invalid value.
    """
    known = {each.name.lower(): each for each in OPTIONS}
    found = {}
    if "provider" in given:  # Spark gives this option for a catalog table, and later reads the table without options
        raise BadRequest(
            "Spark keeps no options of a table for a source in Python: write CREATE TEMPORARY VIEW instead of CREATE"
            " TABLE."
        )
    for key, value in given.items():
        if key.lower() in SPARK_OPTIONS:
            continue
        option = known.get(key.lower())
        if option is None:
            names = [each.name for each in OPTIONS if each.side in (side, "both")]
            raise BadRequest(kafka_advice(key) or f"tfmq has no option {key!r}.{suggest(key, names)}")
        found[option.name] = _parse_value(option, value, side, query)
    return found


_WRONG_SIDE = {
    "path": 'save() takes no name here: name the topic with option("topic", NAME), or a column topic.',
    "subscribe": "subscribe is an option of the source, not of the sink: the topic to write to is topic.",
    "topic": "topic is an option of the sink, not of the source: the topics to read are subscribe.",
}
"""Option -> error text if the option is used on the wrong side (source or sink), for options that users confuse."""

_SPARK_METHODS: dict[tuple[Side, QueryKind], str] = {
    ("source", "batch"): "spark.read",
    ("source", "stream"): "spark.readStream",
    ("sink", "batch"): "write",
    ("sink", "stream"): "writeStream",
}


def _parse_value(option: Option, value: str, side: Side, query: QueryKind) -> Any:
    """Parse the value of one option. Raises BadRequest if it is invalid, or the option is for another side or query."""
    if option.side not in (side, "both"):
        advice = f"{option.name} is an option of the {option.side}, not of the {side}: leave it out here."
        raise BadRequest(_WRONG_SIDE.get(option.name, advice))
    if query != "both" and option.query not in (query, "both"):
        raise BadRequest(f"{option.name} is an option of {_SPARK_METHODS[side, option.query]} only: leave it out here.")
    try:
        return option.parse(value)
    except ValueError as error:
        raise BadRequest(f"{option.name} must be {error}, not {value!r}.") from None


def exclusive_option(given: Mapping[str, Any], *exclusive: str, required: bool = False) -> str:
    """Return the name of the option in `exclusive` that is given; "" if none of these options is given.

    Raises BadRequest if two of these options are given, or if none is given and `required` is true.
    """
    there = [name for name in exclusive if name in given]
    if len(there) > 1:
        raise BadRequest(f"{there[0]} and {there[1]} exclude each other: give one of them.")
    if not there and required:
        raise BadRequest(f"Give one of the options {', '.join(exclusive[:-1])} and {exclusive[-1]}.")
    return there[0] if there else ""


def suggest(word: str, words: list[str]) -> str:
    """Return " Did you mean 'X'?" with X from `words` that is most like `word`; "" if none is similar. Ignores case."""
    lower = {each.lower(): each for each in words}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return f" Did you mean {lower[found[0]]!r}?" if found else ""
