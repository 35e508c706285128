"""All settings: section, key, type, default, accepted values and explanation.

A section is a frozen dataclass with a `setting` for each key. conf/server.toml and docs/configuration.md are generated
from this module.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from tfmq import limits
from tfmq.units import parse_duration, parse_size


class Kind(Protocol):
    """The values that a key accepts.

    `read` returns the value as the code uses it, or raises ValueError, whose text ends the sentence "KEY must be".
    `is_text`: whether the value in the configuration file may be a string. If not, it must be a number or a boolean.
    """

    text: str
    is_text: bool

    def read(self, value: Any) -> Any: ...


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Integer:
    def __init__(self, low: int, high: int, *, is_size: bool = False) -> None:
        self.low, self.high = low, high
        kind = "a size in bytes, or like 64MiB," if is_size else "a whole number"
        self.text = f"{kind} from {low} to {high}"
        self.is_text = is_size

    def read(self, value: Any) -> int:
        number = value if _is_number(value) else None
        if isinstance(value, str) and (self.is_text or value.strip().isdecimal()):
            number = parse_size(value)
        if number is None or not self.low <= number <= self.high or number != int(number):
            raise ValueError(self.text)
        return int(number)


def _without_exponent(number: float) -> str:
    return f"{number:.0f}" if number == int(number) else f"{number:g}"


class Duration:
    is_text = True

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        bounds = f"from {_without_exponent(low)} to {_without_exponent(high)} s"
        self.text = f"a time in seconds, or like 10s, 5min, 7d, {bounds}"

    def read(self, value: Any) -> float:
        number = value if _is_number(value) else parse_duration(value) if isinstance(value, str) else None
        if number is None or not self.low <= number <= self.high:
            raise ValueError(self.text)
        return number


class Boolean:
    text = "true or false"
    is_text = False
    _WORDS: ClassVar[dict[str, bool]] = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}

    def read(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in self._WORDS:
            return self._WORDS[value.lower()]
        raise ValueError(self.text)


class Choice:
    is_text = True

    def __init__(self, *words: str) -> None:
        self.words = words
        self.text = "one of " + ", ".join(f'"{word}"' for word in words)

    def read(self, value: Any) -> str:
        if value not in self.words:
            raise ValueError(self.text)
        return str(value)


class Text:
    """Any text; it must not be empty unless `empty` is true."""

    is_text = True

    def __init__(self, what: str, empty: bool = False) -> None:
        self.text, self.empty = what, empty

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not (value or self.empty) or "\0" in value:
            raise ValueError(self.text)
        return value


class Address:
    """HOST:PORT; an IPv6 host is in brackets; port 0 means a free port."""

    text = "HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:8367 or [::1]:8367"
    is_text = True
    _FORM = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*):([0-9]{1,5})")

    def read(self, value: Any) -> str:
        found = self._FORM.fullmatch(value) if isinstance(value, str) else None
        if found is None or int(found[2]) > 65_535:
            raise ValueError(self.text)
        return str(value)


class OptionalAddress(Address):
    """HOST:PORT, or empty."""

    text = f"empty or {Address.text}"

    def read(self, value: Any) -> str:
        if value == "":
            return ""
        try:
            return super().read(value)
        except ValueError:
            raise ValueError(self.text) from None


class ZooKeeperAddress:
    """The address of a ZooKeeper; only the client library checks it completely."""

    text = "empty or HOST:PORT,HOST:PORT/PATH of a ZooKeeper, such as 127.0.0.1:2181/meta"
    is_text = True
    _FORM = re.compile(r"(zookeeper://)?[A-Za-z0-9._:,\[\]-]+(/[A-Za-z0-9._/-]*)?")

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or (value and not self._FORM.fullmatch(value)):
            raise ValueError(self.text)
        return value


class DelayLevels:
    text = 'a list of times, such as ["1s", "5min"]'
    is_text = True

    def read(self, value: Any) -> tuple[float, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(self.text)
        return tuple(Duration(0.001, 1e9).read(item) for item in value)


class Setting(NamedTuple):
    kind: Kind
    line: str


def setting(default: Any, kind: Kind, line: str) -> Any:
    return field(default=default, metadata={"setting": Setting(kind, line)})


GIB = 1 << 30
YEARS = 100 * 365 * 86_400


@dataclass(frozen=True)
class Server:
    data: str = setting("./tfmq-data", Text("the path of a folder"), "The data folder.")
    listen: str = setting("127.0.0.1:8367", Address(), "The address for clients; port 0 takes a free port.")
    acks: str = setting(
        "synced", Choice("synced", "written", "none"), "What a send waits for if the client does not choose."
    )
    insecure: bool = setting(
        False,
        Boolean(),
        "Allow listening on other interfaces than loopback without TLS, or without users and certificates of clients.",
    )
    idle_exit_seconds: float = setting(
        0, Duration(0, YEARS), "Stop when no client was connected for this time; 0: never. For `file:PATH`."
    )
    log_level: str = setting("info", Choice("debug", "info", "warning", "error"), "Log level on standard error.")
    log_json: bool = setting(False, Boolean(), "Log lines are JSON objects.")
    zookeeper: str = setting(
        "", ZooKeeperAddress(), "Register this broker and its topics there; needs kazoo (tfmq[zookeeper])."
    )
    tls_certificate: str = setting(
        "",
        Text("the path of a PEM file", empty=True),
        "The server's certificate, followed by those between it and its authority. Then all clients must use TLS.",
    )
    tls_key: str = setting(
        "", Text("the path of a PEM file", empty=True), "The certificate's private key, unless it is in the same file."
    )
    tls_client_ca: str = setting(
        "",
        Text("the path of a PEM file", empty=True),
        "Authorities of which each client must show a certificate; without them, clients need none.",
    )
    users: str = setting(
        "",
        Text("the path of a file", empty=True),
        "The file of users, which `tfmq user` writes; without it everybody who can connect may do everything.",
    )


@dataclass(frozen=True)
class Http:
    listen: str = setting(
        "127.0.0.1:8368",
        OptionalAddress(),
        "The address for HTTP: health and metrics; empty: none. If the default is in use, the server has no HTTP.",
    )
    hosts: str = setting(
        "",
        Text("names separated by commas", empty=True),
        "Names by which browsers and monitoring reach the HTTP server, beside the host of http.listen, separated by"
        " commas.",
    )


@dataclass(frozen=True)
class Flush:
    messages: int = setting(1000, Integer(0, 10**9), "Fsync after this many messages; 0: after every batch.")
    seconds: float = setting(10.0, Duration(0, 86_400), "Fsync after this time; 0: after every batch.")
    method: Literal["auto", "fdatasync", "syncfs"] = setting(
        "auto", Choice("auto", "fdatasync", "syncfs"), "Fsync method: auto uses one syncfs for many files."
    )


@dataclass(frozen=True)
class Log:
    segment_bytes: int = setting(
        GIB,
        Integer(1 << 16, 1 << 40, is_size=True),
        "A segment file is closed before it passes this; a batch that is larger gets a file of its own.",
    )
    segment_seconds: float = setting(
        604_800,
        Duration(1, YEARS),
        "A segment file is closed this long after its first message, sooner where retention.seconds is shorter; the"
        " default applies only where retention.seconds is set.",
    )
    state_bytes: int = setting(
        64 << 20,
        Integer(1 << 16, 1 << 40, is_size=True),
        "Write a snapshot of the producers' state after this many bytes, for short starts.",
    )
    verify: str = setting(
        "blocks", Choice("blocks", "records"), "Checks before a write: checksums of blocks, or of every record."
    )


@dataclass(frozen=True)
class Retention:
    seconds: float = setting(
        0,
        Duration(0, YEARS),
        "Closed segments go when all in them is older: a message is kept at most this long plus"
        " log.segment_seconds (or twice this long, if less) plus two minutes; 0: never.",
    )
    bytes: int = setting(
        0,
        Integer(0, 1 << 60, is_size=True),
        "The oldest segments are deleted when a partition is larger than this; 0: never.",
    )
    action: str = setting(
        "delete", Choice("delete", "archive"), "Delete these segments, or archive: move them to DATA/archive."
    )


@dataclass(frozen=True)
class Verification:
    bytes_per_second: int = setting(
        4_000_000,
        Integer(0, 1 << 40, is_size=True),
        "Read closed segments again at this pace on average, and check them; 0: never.",
    )
    interval_seconds: float = setting(
        7 * 86_400,
        Duration(1, YEARS),
        "How long after its last check a closed segment is checked again, at the earliest.",
    )


@dataclass(frozen=True)
class Replicate:
    url: str = setting(
        "",
        Text(
            "the URL of a store, such as s3://bucket/prefix, file:///mnt/shared/orders or postgresql+psycopg://host/db",
            empty=True,
        ),
        "Replicate the data folder through this store, with all servers that have the same URL; empty: do not.",
    )
    mode: str = setting(
        "sync",
        Choice("sync", "async"),
        "sync: what is acknowledged as synced is in the store, too. async: it is there after `interval_seconds`.",
    )
    linger_ms: int = setting(
        50, Integer(1, 60_000), "sync: how long operations wait that no fsync sends, in milliseconds."
    )
    interval_seconds: float = setting(
        1, Duration(0.01, 3600), "async: how long operations wait until they are sent to the store."
    )
    heartbeat_seconds: float = setting(
        2, Duration(0.05, 3600), "How often an idle primary shows the standbys that it lives."
    )
    lease_seconds: float = setting(
        10, Duration(0.5, 86_400), "A standby that sees no sign of the primary for this time becomes primary."
    )
    history_seconds: float = setting(
        604_800, Duration(3600, YEARS), "How far back `tfmq replica restore --at` reaches; older objects are deleted."
    )
    read: bool = setting(False, Boolean(), "A standby serves consumers that were made with `standby=True`.")


@dataclass(frozen=True)
class Topics:
    auto_create: bool = setting(True, Boolean(), "Create a topic at the first send to it.")
    partitions: int = setting(1, Integer(1, limits.PARTITIONS_PER_TOPIC.cap), "Number of partitions of a new topic.")


@dataclass(frozen=True)
class Transaction:
    timeout_seconds: float = setting(
        60, Duration(0.001, 86_400), "Timeout of an unprepared transaction, unless its client asks for another."
    )
    outcome_seconds: float = setting(7 * 86_400, Duration(1, YEARS), "How long the outcome of a transaction is kept.")
    check_seconds: float = setting(
        60,
        Duration(0.001, 86_400),
        "Check back with the producer group when a transaction has been prepared for this time.",
    )
    alarm_seconds: float = setting(
        3600, Duration(0.001, YEARS), "Warn when a transaction has been prepared for longer than this."
    )
    group_ttl_seconds: float = setting(
        86_400,
        Duration(1, 365 * 86_400),
        "Timeout of a prepared member of a commit group, unless its writer asks for another.",
    )
    journal_file_bytes: int = setting(
        64 << 20, Integer(1 << 16, 1 << 40, is_size=True), "Size after which a new file of the journal is started."
    )


@dataclass(frozen=True)
class Delay:
    tick_ms: int = setting(10, Integer(1, 60_000), "Interval at which the broker delivers due delayed messages, in ms.")
    levels: tuple[float, ...] = setting(
        (), DelayLevels(), "Delays that clients can choose by number, starting with the first."
    )
    outcome_seconds: float = setting(
        86_400, Duration(1, YEARS), "How long after its due time the state of a delayed message is kept."
    )


SECTIONS: dict[str, type[Any]] = {
    "server": Server,
    "flush": Flush,
    "log": Log,
    "retention": Retention,
    "verification": Verification,
    "topics": Topics,
    "transaction": Transaction,
    "delay": Delay,
    "http": Http,
    "replicate": Replicate,
}


SETTINGS: dict[str, tuple[Setting, Any]] = {
    f"{section}.{each.name}": (each.metadata["setting"], each.default)
    for section, shape in SECTIONS.items()
    for each in fields(shape)
} | {
    f"limits.{name}": (
        Setting(
            Integer(1, limit.cap, is_size=limit.unit == "bytes"), f"Limit in {limit.unit}. Reason: {limit.reason}."
        ),
        int(limit),
    )
    for name, limit in limits.ALL.items()
    if limit.configurable
}
"""Every key -> (its metadata, its default), in the order of the reference pages."""

TOPIC_KEYS: tuple[str, ...] = (
    "flush.messages",
    "flush.seconds",
    "log.segment_bytes",
    "log.segment_seconds",
    "log.state_bytes",
    "log.verify",
    "retention.seconds",
    "retention.bytes",
    "retention.action",
    "topics.partitions",
)
"""Keys that can be set for one topic, in `[topic."NAME"]` or when it is created."""

RELOADED_LIMITS: tuple[str, ...] = (
    "connections",
    "connections_before_login",
    "hello_seconds",
    "requests_in_flight",
    "unsent_bytes",
    "unsent_seconds",
    "pending_bytes",
    "pending_bytes_per_session",
    "pending_requests",
    "parked_fetches",
    "parked_fetches_per_session",
    "fetch_bytes",
    "fetch_wait_ms",
    "topics",
    "partitions_per_topic",
    "partitions",
    "groups",
    "group_members",
    "group_owners",
    "group_subscriptions",
    "session_ms",
    "transactions",
    "transactions_per_session",
    "transactions_prepared",
    "transaction_seconds",
    "transaction_ttl_seconds",
    "delayed",
    "delayed_bytes",
    "schedules",
    "schedules_bytes",
    "schedule_payload_bytes",
)
"""Limits that the server reads at each use. Other limits are read once, at the start, or limit the content of files."""

RELOADED: frozenset[str] = frozenset(
    (
        "server.acks",
        "server.log_level",
        "server.log_json",
        "server.tls_certificate",
        "server.tls_key",
        "server.tls_client_ca",
        "topics.auto_create",
        "verification.bytes_per_second",
        "verification.interval_seconds",
        *TOPIC_KEYS,
        *(f"limits.{name}" for name in RELOADED_LIMITS),
    )
)
"""Keys whose new values take effect on SIGHUP. A change of any other key needs a restart."""
