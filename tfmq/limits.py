"""All limits on what a peer can make this process allocate: default, cap and reason.

A `Limit` is an `int` with its default as the value, so code compares with it directly. If the operator may change
a limit, it is the key `limits.name` of the configuration, and its effective value is passed to the code that needs
it. Limits marked `sent` are sent to a client in the reply to HELLO.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

KIB = 1 << 10
MIB = 1 << 20


class Limit(int):
    """One limit: an int (the default) with its name, hard cap, unit and reason.

    A limit without a `cap` cannot be configured. `name` is the name of the constant in lower case.
    """

    name: str
    cap: int
    unit: str
    sent: bool
    reason: str

    def __new__(cls, default: int, unit: str, reason: str, *, cap: int = 0, sent: bool = False) -> "Limit":
        limit = super().__new__(cls, default)
        limit.cap, limit.unit, limit.reason, limit.sent = cap or default, unit, reason, sent
        return limit

    @property
    def configurable(self) -> bool:
        return self.cap > int(self)


# Limits of a frame and its header
FRAME_BYTES = Limit(16 * MIB, "bytes", "memory one connection can claim with one length word", cap=256 * MIB, sent=True)
FRAME_BYTES_BEFORE_HELLO = Limit(64 * KIB, "bytes", "an unauthenticated peer gets little memory")
HEADER_BYTES = Limit(4 * MIB, "bytes", "the metadata of 20,000 partitions fits", sent=True)
HEADER_DEPTH = Limit(8, "levels", "no header needs more; deep nesting only serves an attack")
HEADER_ITEMS = Limit(1 << 19, "items", "bounds the objects that one header can make in memory")
TEXT_BYTES = Limit(8 * KIB, "bytes", "sentences and names; longer text is a mistake")
MAP_ITEMS = Limit(4096, "items", "settings, details and statistics have far fewer")

# Limits of a message, its attribute and its block
MESSAGE_BYTES = Limit(8 * MIB, "bytes", "one record is written and read in one piece", cap=63 * MIB, sent=True)
KEY_BYTES = Limit(64 * KIB, "bytes", "a key is compared and hashed whole")
TAG_BYTES = Limit(255, "bytes", "a tag is a word for filters, not content")
PROPERTIES = Limit(256, "properties", "an attribute is parsed whole for each message")
PROPERTY_BYTES = Limit(64 * KIB, "bytes", "larger values belong in the payload")
ATTRIBUTE_BYTES = Limit(256 * KIB, "bytes", "likewise, all properties together")
BLOCK_BYTES = Limit(64 * KIB, "bytes", "damage costs at most one block; a larger record has its own", sent=True)

# Limits of a request and of a connection
BATCH_RECORDS = Limit(1 << 20, "records", "bounds the checks of one request", sent=True)
BATCH_BLOCKS = Limit(1 << 16, "blocks", "bounds the checks of one request", sent=True)
FETCH_BYTES = Limit(8 * MIB, "bytes", "memory one fetch can claim", cap=128 * MIB, sent=True)
FETCH_BYTES_FIRST = Limit(
    65 * KIB, "bytes", "likewise, of a client that has received less than this; else as much as it has received"
)
FETCH_WAIT_MS = Limit(60_000, "ms", "the waiting fetch of a dead client ends after this time", cap=600_000, sent=True)
FETCH_TAGS = Limit(64, "tags", "each block is compared with each tag")
REQUESTS_IN_FLIGHT = Limit(
    4096, "requests", "pending replies of one connection; more requests get Busy", cap=65_536, sent=True
)
UNSENT_BYTES = Limit(64 * MIB, "bytes", "a client that does not read is disconnected", cap=1024 * MIB)
UNSENT_SECONDS = Limit(10, "seconds", "how long such a client may read nothing", cap=3600)
HELLO_SECONDS = Limit(10, "seconds", "an idle connection does not count against the limit without end", cap=300)
CONNECTIONS = Limit(10_000, "connections", "file descriptors and memory", cap=100_000)
CONNECTIONS_BEFORE_LOGIN = Limit(
    1_000, "connections", "that have not sent HELLO, or not logged in: a new one replaces the oldest", cap=100_000
)
LOGIN_MESSAGE_BYTES = Limit(4 * KIB, "bytes", "one message of a login; a proof has about 200")

# Limits of names and of what the broker stores: topics, groups, producers
NAME_LENGTH = Limit(249, "characters", "a topic's name and -PARTITION make a folder name")
CLIENT_ID_LENGTH = Limit(100, "characters", "the name that a client chose, for lists and the log")
TOPICS = Limit(20_000, "topics", "each has folders, files and memory", cap=100_000)
PARTITIONS_PER_TOPIC = Limit(4096, "partitions", "likewise", cap=10_000, sent=True)
PARTITIONS = Limit(20_000, "partitions", "likewise, in the whole broker", cap=100_000)
GROUPS = Limit(10_000, "groups", "each has offsets in memory and on the disk", cap=100_000)
GROUP_OFFSETS = Limit(
    1_000_000,
    "offsets",
    "of all groups together: each is in memory, and in every snapshot of the catalog",
    cap=20_000_000,
)
GROUP_OWNERS = Limit(1_000_000, "partitions", "with an owner, in all groups together: likewise", cap=20_000_000)
GROUP_MEMBERS = Limit(1_000, "members", "of one group: each change of a group iterates over all of them", cap=10_000)
GROUP_SUBSCRIPTIONS = Limit(1_000_000, "names", "subscriptions of the members of all groups: in memory", cap=20_000_000)
OFFSETS_PER_COMMIT = Limit(20_000, "offsets", "one fsynced write has them all")
SESSION_MS = Limit(30_000, "ms", "how long a silent member keeps its partitions", cap=3_600_000, sent=True)
SESSION_MS_MIN = Limit(1_000, "ms", "shorter ones expire by chance", sent=True)
PRODUCER_IDS_PER_LEASE = Limit(1024, "ids", "at this rate 40 bits are never used up")
PRODUCERS_PER_PARTITION = Limit(10_000, "producers", "sequences and first replies stay in memory", cap=1_000_000)
BATCHES_REMEMBERED = Limit(
    32, "batches", "repeated requests get their first reply; more in-flight requests are rejected", cap=256, sent=True
)
PRODUCER_IDLE_SECONDS = Limit(
    7 * 86_400, "seconds", "an unused producer id expires after this time", cap=365 * 86_400, sent=True
)

# Limits of requests that have no reply yet, and of one append
PENDING_BYTES = Limit(
    128 * MIB, "bytes", "batches of all connections that wait for the disk; more get Busy", cap=8192 * MIB
)
PENDING_BYTES_PER_SESSION = Limit(
    32 * MIB, "bytes", "likewise of one connection, which is then not read until half of it is written", cap=1024 * MIB
)
PENDING_REQUESTS = Limit(100_000, "requests", "batches that wait, however small: each is an object", cap=1_000_000)
PARKED_FETCHES = Limit(50_000, "fetches", "each is an object and a timer; more get Busy", cap=1_000_000)
PARKED_FETCHES_PER_SESSION = Limit(4096, "fetches", "a reader has at most one for each partition", cap=65_536)
APPEND_BYTES = Limit(8 * MIB, "bytes", "one write must not block the broker for long", cap=256 * MIB)

# Limits of transactions and commit groups
XID_BYTES = Limit(249, "bytes", "a name for look-ups and commands, not content")
TRANSACTIONS = Limit(10_000, "transactions", "open and not prepared: each has memory and a timer", cap=1_000_000)
TRANSACTIONS_PER_SESSION = Limit(
    1_000,
    "transactions",
    "likewise, of one connection: one client cannot use up the limit of all",
    cap=100_000,
    sent=True,
)
TRANSACTIONS_PREPARED = Limit(
    1_000_000, "transactions", "they are in memory and in every snapshot until they end", cap=10_000_000
)
TRANSACTION_BYTES = Limit(
    16 * 1024 * MIB,
    "bytes",
    "messages of one transaction are on the disk twice until it ends",
    cap=1024 * 1024 * MIB,
    sent=True,
)
TRANSACTION_PIECES = Limit(
    200_000, "batches", "the position of each batch of a transaction is in memory", cap=400_000, sent=True
)
TRANSACTIONS_BYTES = Limit(
    64 * 1024 * MIB, "bytes", "unfinished transactions, all together, do not fill the disk", cap=1 << 50
)
TRANSACTIONS_PIECES = Limit(
    20_000_000,
    "batches",
    "likewise the memory: each has 24 bytes of it, and 32 more while it is applied",
    cap=400_000_000,
)
TRANSACTION_SECONDS = Limit(
    900, "seconds", "the longest timeout that an unprepared transaction can ask for", cap=86_400, sent=True
)
TRANSACTION_TTL_SECONDS = Limit(
    30 * 86_400,
    "seconds",
    "the longest time that a prepared member of a commit group can ask for",
    cap=365 * 86_400,
    sent=True,
)
TRANSACTION_OUTCOMES = Limit(1_000_000, "outcomes", "beyond this the oldest are discarded early", cap=100_000_000)
TRANSACTION_STREAMS = Limit(10_000, "streams", "their sequences and last replies stay in memory", cap=1_000_000)
TRANSACTION_OFFSET_GROUPS = Limit(64, "groups", "one transaction commits offsets of few groups")
TRANSACT_BATCHES = Limit(4096, "batches", "a larger transaction begins, sends and commits", sent=True)
TRANSACTIONS_PER_PAGE = Limit(1_000, "transactions", "one page of a list fits in one header", sent=True)
TRANSACTION_TOPICS_LISTED = Limit(8, "topics", "likewise: a row of a list names the first ones")
COMMIT_GROUPS = Limit(10_000, "groups", "their sequences never expire by time, so they are counted", cap=1_000_000)
COMMIT_GROUP_MEMBERS = Limit(10_000, "transactions", "one record and one header name them all")
COMMIT_GROUP_FENCES = Limit(
    100_000,
    "runs",
    "aborted runs of all groups, each in memory until its sequence is committed; more are rejected",
    cap=10_000_000,
)
CHECKS_PARKED = Limit(10_000, "requests", "clients that wait for check-backs: each is an object", cap=1_000_000)

# Limits of delayed messages
DELAYED = Limit(
    100_000_000,
    "messages",
    "they are on the disk, and reading a range of them takes time; more get Busy",
    cap=10_000_000_000,
)
DELAYED_BYTES = Limit(64 * 1024 * MIB, "bytes", "likewise: delayed messages must not fill the disk", cap=1 << 50)
BATCH_RECORDS_DELAYED = Limit(
    1 << 18, "records", "of one delayed batch: their due times are in the header, and in that of the reply", sent=True
)
DELAYED_PER_PAGE = Limit(1_000, "messages", "one page of a list fits in one header", sent=True)
DELAYED_HISTOGRAM_EDGES = Limit(4_096, "edges", "each delayed message is compared with them", sent=True)

# Limits of the HTTP server
HTTP_CONNECTIONS = Limit(64, "connections", "browsers and monitoring; more are closed at once")
HTTP_REQUEST_SECONDS = Limit(10, "seconds", "a connection that does not send a whole request is closed")
HTTP_ANSWER_SECONDS = Limit(60, "seconds", "likewise one that does not receive the answer and send the next request")
HTTP_HEADER_BYTES = Limit(16 * KIB, "bytes", "the first line and the headers of a request are in memory")
HTTP_HEADERS = Limit(100, "headers", "likewise; browsers send about twenty")
HTTP_BODY_BYTES = Limit(64 * KIB, "bytes", "likewise; a command has a few names and numbers")
HTTP_QUERY_VALUES = Limit(64, "values", "of an address, after the question mark: likewise")

# Limits of schedules
CRON_BYTES = Limit(256, "bytes", "a cron expression, or the name of a time zone; longer ones are mistakes")
SCHEDULES = Limit(1_000, "schedules", "each is in memory, and in every snapshot of the catalog", cap=10_000)
SCHEDULE_PAYLOAD_BYTES = Limit(
    64 * KIB, "bytes", "likewise; of one schedule: its payload, key, tag and properties", cap=MIB, sent=True
)
SCHEDULES_BYTES = Limit(16 * MIB, "bytes", "likewise, all schedules together", cap=64 * MIB)
SCHEDULES_PER_PAGE = Limit(500, "schedules", "one page of a list fits in one header", sent=True)


def _limits_by_name() -> dict[str, Limit]:
    found = {}
    for constant, value in globals().items():
        if isinstance(value, Limit):
            value.name = constant.lower()
            found[value.name] = value
    return found


ALL = _limits_by_name()

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
NAME_RULE = "a name has 1 to 249 letters A-Z a-z, digits, '.', '_' or '-', and is not '.' or '..'"
"""The end of the error text for a name of a topic or group that `is_valid_name` rejects."""


def is_valid_name(name: object) -> bool:
    """Return whether `name` (of a topic, a group, a member or a client) is `[A-Za-z0-9._-]{1,249}`, not `.` or `..`."""
    return isinstance(name, str) and len(name) <= NAME_LENGTH and is_valid_short_name(name)


@lru_cache(1024)
def is_valid_short_name(name: str) -> bool:
    """Return whether a string of at most NAME_LENGTH characters is a valid name. Results are cached."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def effective_limits(settings: Mapping[str, int]) -> dict[str, int]:
    """Return every limit by name: its value in `settings`, or else its default."""
    return {name: settings.get(name, int(limit)) for name, limit in ALL.items()}


def received_limits(found: Mapping[str, object]) -> dict[str, int]:
    """Return the limits that a broker sent, each reduced to this release's cap. A missing limit has its default.

    Raises `ValueError` for a value that is no number.
    """
    limits = limits_to_send({})
    for name in limits:
        value = found.get(name, limits[name])
        if type(value) is not int or value < 0:
            raise ValueError(f"its limit {name} is {value!r}")
        limits[name] = min(value, ALL[name].cap)
    return limits


def limits_to_send(settings: Mapping[str, int]) -> dict[str, int]:
    """Return the limits that the reply to HELLO contains, by name."""
    return {name: value for name, value in effective_limits(settings).items() if ALL[name].sent}
