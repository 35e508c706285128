"""All limits on what a peer can make this process allocate: default, cap and reason.

A `Limit` is an `int`, its default, so code compares with it directly. A limit that the operator may change is
the key `limits.NAME` of the configuration; its effective value is passed to the code that needs it. Limits
marked `sent` are sent to a client in the reply to HELLO.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

KIB = 1 << 10
MIB = 1 << 20


class Limit(int):
    """One limit: an int (the default) with its name, hard cap, unit and reason.

    A limit whose cap is its default cannot be configured.
    """

    name: str
    cap: int
    unit: str
    sent: bool
    reason: str

    def __new__(
        cls, name: str, default: int, cap: int, unit: str, reason: str, sent: bool = False
    ) -> "Limit":
        limit = super().__new__(cls, default)
        limit.name, limit.cap, limit.unit, limit.reason, limit.sent = name, cap, unit, reason, sent
        return limit

    @property
    def configurable(self) -> bool:
        return self.cap > int(self)


ALL: dict[str, Limit] = {}


def _limit(name: str, default: int, cap: int, unit: str, reason: str, sent: bool = False) -> Limit:
    ALL[name] = Limit(name, default, cap, unit, reason, sent)
    return ALL[name]


# Limits of a frame and its header
FRAME_BYTES = _limit(
    "frame_bytes",
    16 * MIB,
    256 * MIB,
    "bytes",
    "memory one connection can claim with one length word",
    sent=True,
)
FRAME_BYTES_BEFORE_HELLO = _limit(
    "frame_bytes_before_hello", 64 * KIB, 64 * KIB, "bytes", "an unauthenticated peer gets little memory"
)
HEADER_BYTES = _limit(
    "header_bytes", 4 * MIB, 4 * MIB, "bytes", "the metadata of 20,000 partitions fits", sent=True
)
HEADER_DEPTH = _limit(
    "header_depth", 8, 8, "levels", "no header needs more; deep nesting only serves an attack"
)
HEADER_ITEMS = _limit(
    "header_items", 1 << 19, 1 << 19, "items", "bounds the objects that one header can make in memory"
)
TEXT_BYTES = _limit("text_bytes", 8 * KIB, 8 * KIB, "bytes", "sentences and names; longer text is a mistake")
MAP_ITEMS = _limit("map_items", 4096, 4096, "items", "settings, details and statistics have far fewer")

# Limits of a message, its attribute and its block
MESSAGE_BYTES = _limit(
    "message_bytes", 8 * MIB, 63 * MIB, "bytes", "one record is written and read in one piece", sent=True
)
KEY_BYTES = _limit("key_bytes", 64 * KIB, 64 * KIB, "bytes", "a key is compared and hashed whole")
TAG_BYTES = _limit("tag_bytes", 255, 255, "bytes", "a tag is a word for filters, not content")
PROPERTIES = _limit("properties", 256, 256, "properties", "an attribute is parsed whole for each message")
PROPERTY_BYTES = _limit("property_bytes", 64 * KIB, 64 * KIB, "bytes", "larger values belong in the payload")
ATTRIBUTE_BYTES = _limit(
    "attribute_bytes", 256 * KIB, 256 * KIB, "bytes", "likewise, all properties together"
)
BLOCK_BYTES = _limit(
    "block_bytes",
    64 * KIB,
    64 * KIB,
    "bytes",
    "damage costs at most one block; a larger record has its own",
    sent=True,
)

# Limits of a request and of a connection
BATCH_RECORDS = _limit(
    "batch_records", 1 << 20, 1 << 20, "records", "bounds the checks of one request", sent=True
)
BATCH_BLOCKS = _limit(
    "batch_blocks", 1 << 16, 1 << 16, "blocks", "bounds the checks of one request", sent=True
)
FETCH_BYTES = _limit("fetch_bytes", 8 * MIB, 128 * MIB, "bytes", "memory one fetch can claim", sent=True)
FETCH_WAIT_MS = _limit(
    "fetch_wait_ms",
    60_000,
    600_000,
    "ms",
    "the waiting fetch of a dead client ends after this time",
    sent=True,
)
FETCH_TAGS = _limit("fetch_tags", 64, 64, "tags", "each block is compared with each tag")
REQUESTS_IN_FLIGHT = _limit(
    "requests_in_flight",
    4096,
    65_536,
    "requests",
    "pending replies of one connection; more requests get Busy",
    sent=True,
)
UNSENT_BYTES = _limit(
    "unsent_bytes",
    64 * MIB,
    1024 * MIB,
    "bytes",
    "a client that does not read is disconnected",
)
UNSENT_SECONDS = _limit("unsent_seconds", 10, 3600, "seconds", "how long such a client may read nothing")
HELLO_SECONDS = _limit(
    "hello_seconds", 10, 300, "seconds", "an idle connection does not count against the limit without end"
)
CONNECTIONS = _limit("connections", 10_000, 100_000, "connections", "file descriptors and memory")

# Limits of names and of what the broker stores: topics, groups, producers
NAME_LENGTH = _limit(
    "name_length", 249, 249, "characters", "a topic's name and -PARTITION make a folder name"
)
CLIENT_ID_LENGTH = _limit(
    "client_id_length", 100, 100, "characters", "the name that a client chose, for lists and the log"
)
TOPICS = _limit("topics", 20_000, 100_000, "topics", "each has folders, files and memory")
PARTITIONS_PER_TOPIC = _limit("partitions_per_topic", 4096, 10_000, "partitions", "likewise", sent=True)
PARTITIONS = _limit("partitions", 20_000, 100_000, "partitions", "likewise, in the whole broker")
GROUPS = _limit("groups", 10_000, 100_000, "groups", "each has offsets in memory and on the disk")
GROUP_OFFSETS = _limit(
    "group_offsets",
    1_000_000,
    20_000_000,
    "offsets",
    "of all groups together: each is in memory, and in every snapshot of the catalog",
)
GROUP_OWNERS = _limit(
    "group_owners", 1_000_000, 20_000_000, "partitions", "with an owner, in all groups together: likewise"
)
GROUP_MEMBERS = _limit(
    "group_members",
    1_000,
    10_000,
    "members",
    "of one group: each change of a group iterates over all of them",
)
GROUP_SUBSCRIPTIONS = _limit(
    "group_subscriptions",
    1_000_000,
    20_000_000,
    "names",
    "subscriptions of the members of all groups: in memory",
)
OFFSETS_PER_COMMIT = _limit("offsets_per_commit", 20_000, 20_000, "offsets", "one fsynced write has them all")
SESSION_MS = _limit(
    "session_ms", 30_000, 3_600_000, "ms", "how long a silent member keeps its partitions", sent=True
)
SESSION_MS_MIN = _limit("session_ms_min", 1_000, 1_000, "ms", "shorter ones expire by chance", sent=True)
PRODUCER_IDS_PER_LEASE = _limit(
    "producer_ids_per_lease", 1024, 1024, "ids", "at this rate 40 bits are never used up"
)
PRODUCERS_PER_PARTITION = _limit(
    "producers_per_partition", 10_000, 1_000_000, "producers", "sequences and first replies stay in memory"
)
BATCHES_REMEMBERED = _limit(
    "batches_remembered",
    32,
    256,
    "batches",
    "repeated requests get their first reply; more in-flight requests are rejected",
    sent=True,
)
PRODUCER_IDLE_SECONDS = _limit(
    "producer_idle_seconds",
    7 * 86_400,
    365 * 86_400,
    "seconds",
    "an unused producer id expires after this time",
    sent=True,
)

# Limits of requests that are not answered yet, and of one append
PENDING_BYTES = _limit(
    "pending_bytes",
    128 * MIB,
    8192 * MIB,
    "bytes",
    "batches of all connections that wait for the disk; more get Busy",
)
PENDING_BYTES_PER_SESSION = _limit(
    "pending_bytes_per_session",
    32 * MIB,
    1024 * MIB,
    "bytes",
    "likewise of one connection, which is then not read until half of it is written",
)
PENDING_REQUESTS = _limit(
    "pending_requests", 100_000, 1_000_000, "requests", "batches that wait, however small: each is an object"
)
PARKED_FETCHES = _limit(
    "parked_fetches", 50_000, 1_000_000, "fetches", "each is an object and a timer; more get Busy"
)
PARKED_FETCHES_PER_SESSION = _limit(
    "parked_fetches_per_session", 4096, 65_536, "fetches", "a reader has at most one for each partition"
)
APPEND_BYTES = _limit(
    "append_bytes", 8 * MIB, 256 * MIB, "bytes", "one write must not block the broker for long"
)

# Limits of transactions and commit groups
XID_BYTES = _limit("xid_bytes", 249, 249, "bytes", "a name for look-ups and commands, not content")
TRANSACTIONS = _limit(
    "transactions", 10_000, 1_000_000, "transactions", "open and not prepared: each has memory and a timer"
)
TRANSACTIONS_PER_SESSION = _limit(
    "transactions_per_session",
    1_000,
    100_000,
    "transactions",
    "likewise, of one connection: one client cannot use up the limit of all",
    sent=True,
)
TRANSACTIONS_PREPARED = _limit(
    "transactions_prepared",
    1_000_000,
    10_000_000,
    "transactions",
    "they are in memory and in every snapshot until they end",
)
TRANSACTION_BYTES = _limit(
    "transaction_bytes",
    16 * 1024 * MIB,
    1024 * 1024 * MIB,
    "bytes",
    "messages of one transaction are on the disk twice until it ends",
    sent=True,
)
TRANSACTION_PIECES = _limit(
    "transaction_pieces",
    200_000,
    400_000,
    "batches",
    "the position of each batch of a transaction is in memory",
    sent=True,
)
TRANSACTIONS_BYTES = _limit(
    "transactions_bytes",
    64 * 1024 * MIB,
    1 << 50,
    "bytes",
    "unfinished transactions, all together, do not fill the disk",
)
TRANSACTIONS_PIECES = _limit(
    "transactions_pieces",
    20_000_000,
    400_000_000,
    "batches",
    "likewise the memory: each has 24 bytes of it, and 32 more while it is applied",
)
TRANSACTION_SECONDS = _limit(
    "transaction_seconds",
    900,
    86_400,
    "seconds",
    "the longest timeout that an unprepared transaction can ask for",
    sent=True,
)
TRANSACTION_TTL_SECONDS = _limit(
    "transaction_ttl_seconds",
    30 * 86_400,
    365 * 86_400,
    "seconds",
    "the longest time that a prepared member of a commit group can ask for",
    sent=True,
)
TRANSACTION_OUTCOMES = _limit(
    "transaction_outcomes", 1_000_000, 100_000_000, "outcomes", "beyond this the oldest are discarded early"
)
TRANSACTION_STREAMS = _limit(
    "transaction_streams", 10_000, 1_000_000, "streams", "their sequences and last replies stay in memory"
)
TRANSACTION_OFFSET_GROUPS = _limit(
    "transaction_offset_groups", 64, 64, "groups", "one transaction commits offsets of few groups"
)
TRANSACT_BATCHES = _limit(
    "transact_batches", 4096, 4096, "batches", "a larger transaction begins, sends and commits", sent=True
)
TRANSACTIONS_PER_PAGE = _limit(
    "transactions_per_page", 1_000, 1_000, "transactions", "one page of a list fits in one header", sent=True
)
TRANSACTION_TOPICS_LISTED = _limit(
    "transaction_topics_listed", 8, 8, "topics", "likewise: a row of a list names the first ones"
)
COMMIT_GROUPS = _limit(
    "commit_groups", 10_000, 1_000_000, "groups", "their sequences never expire by time, so they are counted"
)
COMMIT_GROUP_MEMBERS = _limit(
    "commit_group_members", 10_000, 10_000, "transactions", "one record and one header name them all"
)
COMMIT_GROUP_FENCES = _limit(
    "commit_group_fences",
    100_000,
    10_000_000,
    "runs",
    "aborted runs of all groups, each in memory until its sequence is committed; more are rejected",
)
CHECKS_PARKED = _limit(
    "checks_parked", 10_000, 1_000_000, "requests", "clients that wait for check-backs: each is an object"
)

# Limits of delayed messages
DELAYED = _limit(
    "delayed",
    100_000_000,
    10_000_000_000,
    "messages",
    "they are on the disk, and reading a range of them takes time; more get Busy",
)
DELAYED_BYTES = _limit(
    "delayed_bytes", 64 * 1024 * MIB, 1 << 50, "bytes", "likewise: delayed messages must not fill the disk"
)
BATCH_RECORDS_DELAYED = _limit(
    "batch_records_delayed",
    1 << 18,
    1 << 18,
    "records",
    "of one delayed batch: their due times are in the header, and in that of the reply",
    sent=True,
)
DELAYED_PER_PAGE = _limit(
    "delayed_per_page", 1_000, 1_000, "messages", "one page of a list fits in one header", sent=True
)
DELAYED_HISTOGRAM_EDGES = _limit(
    "delayed_histogram_edges",
    4_096,
    4_096,
    "edges",
    "each delayed message is compared with them",
    sent=True,
)

# Limits of schedules
CRON_BYTES = _limit(
    "cron_bytes", 256, 256, "bytes", "a cron expression, or the name of a time zone; longer ones are mistakes"
)
SCHEDULES = _limit(
    "schedules", 1_000, 10_000, "schedules", "each is in memory, and in every snapshot of the catalog"
)
SCHEDULE_PAYLOAD_BYTES = _limit(
    "schedule_payload_bytes",
    64 * KIB,
    MIB,
    "bytes",
    "likewise; of one schedule: its payload, key, tag and properties",
    sent=True,
)
SCHEDULES_BYTES = _limit("schedules_bytes", 16 * MIB, 64 * MIB, "bytes", "likewise, all schedules together")
SCHEDULES_PER_PAGE = _limit(
    "schedules_per_page", 500, 500, "schedules", "one page of a list fits in one header", sent=True
)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def is_valid_name(name: object) -> bool:
    """Return whether `name` is valid for a topic, a group, a member or a client.

    Valid are `[A-Za-z0-9._-]{1,249}`, but not `.` or `..`.
    """
    return isinstance(name, str) and len(name) <= NAME_LENGTH and is_valid_short_name(name)


@lru_cache(1024)
def is_valid_short_name(name: str) -> bool:
    """As `is_valid_name`, for strings of at most NAME_LENGTH characters.

    Cached, because the same few names are in most requests.
    """
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def effective_limits(settings: Mapping[str, int]) -> dict[str, int]:
    """Return every limit by name: from `settings`, or else the default."""
    return {name: settings.get(name, int(limit)) for name, limit in ALL.items()}


def received_limits(found: Mapping[str, object]) -> dict[str, int]:
    """Return the limits that a broker sent, none above its cap; the default for a missing one.

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
