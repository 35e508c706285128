"""What the broker knows of one message: where it was sent, stored and delivered, and which groups are past it.

Everything is read with the commands that other clients use, and nothing is changed: a read does not make messages
durable, and no group gets an offset. What the user of the connection has no right to read is named as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from journal.record.block import blocks_of
from journal.record.block_trailer import SOURCE_DELAY, SOURCE_SCHEDULE, SOURCE_TRANSACTION, BlockTrailer
from journal.record.format import BadRecord, make_log_id, records_of, split_id
from tfmq.client.admin.delayed import DelayedDescription
from tfmq.client.admin.models import TransactionDescription, transaction_description
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import Topic, request, wait_for_reply
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.errors import (
    BadRequest,
    Busy,
    Damaged,
    DecodeFailed,
    Forbidden,
    NotARecord,
    OffsetOutOfRange,
    UnknownPartition,
)
from tfmq.message import Attribute, decode_attribute
from tfmq.protocol import commands
from tfmq.protocol.delayed_handle import parse_handle

SOURCES: Final = {SOURCE_TRANSACTION: "transaction", SOURCE_DELAY: "delay", SOURCE_SCHEDULE: "schedule"}
SENT: Final = "sent"

ONE_BLOCK: Final = 1
"""Limit in bytes of a fetch. Every block is larger, so the response has only the block with the offset."""
SEARCH_FETCH_BYTES: Final = 1 << 20
SEARCH_MESSAGES: Final = 100_000
"""Default of how many of the newest messages of a partition are searched for a key."""
WINDOW_MESSAGES: Final = 5_000
"""How many messages are read forwards at a time, while a partition is searched backwards."""
DELIVERY_SEARCH_BYTES: Final = 64 << 20
"""How much of a partition is searched for a delivered message, from its due time on."""
EARLY_MS: Final = 1_000
"""How much earlier than its due time a message may be delivered by the wall clock, which can be behind broker time."""


class GroupProgress(NamedTuple):
    """Where a group is, relative to one message.

    `state`: "passed" (its committed offset is after the message), "behind", "none" (a member reads the topic, and
    nothing is committed yet) or "in_doubt" (a prepared transaction has locked the offset). `offset`: the committed
    offset; None if there is none or it is locked. `behind`: how many messages the group has to ack until it has passed
    this one, with this one; None if unknown.
    """

    group: str
    state: str
    offset: int | None = None
    behind: int | None = None


class DelayTrace(NamedTuple):
    """The delay of a message. Times are ms since 1970, of broker time; -1 if unknown.

    `state`: "pending", "cancelled", "delivered" or "unknown". `handle`: "" if unknown. `due_is_exact`: whether
    `due_ms` is the due time of this message; otherwise it is that of the last message that was appended with it, and
    this one was due then or before. `late_ms`: from the due time to the delivery.
    """

    state: str
    due_ms: int = -1
    due_is_exact: bool = True
    delivered_ms: int = -1
    handle: str = ""

    @property
    def late_ms(self) -> int:
        return max(0, self.delivered_ms - self.due_ms) if self.delivered_ms >= 0 <= self.due_ms else -1


class MessageTrace(NamedTuple):
    """The life of one message. Times are ms since 1970; -1 and None: unknown, or not there.

    `state`: "stored"; "removed" (the partition begins after the offset); for a delayed message also "pending",
    "cancelled", "delivered" (but not found in its partition) or "unknown" · `source`: how the message was appended:
    "sent", "transaction", "delay" or "schedule" · `durable`: whether a power failure can no longer lose the message ·
    `transaction`: the committed transaction; None if it was applied together with others and cannot be told apart from
    them, and with the state "unknown" if the broker no longer knows it · `commit_lsn`: the LSN of the commit record of
    the last transaction that was appended together with it · `payload_bytes`: -1 for a tombstone · `groups`: only those
    that read the topic; None if the user has no right to see groups · `unknown`: a sentence for each fact that cannot
    be known.
    """

    topic: str
    partition: int
    state: str = "stored"
    incarnation: int = 0
    offset: int | None = None
    next_offset: int | None = None
    ordinal: int | None = None
    message_id: int | None = None
    key: bytes | str | None = None
    tag: str | None = None
    properties: Mapping[str, str] = {}
    born_ms: int = -1
    payload_bytes: int | None = None
    appended_ms: int = -1
    durable: bool | None = None
    durable_offset: int = -1
    first_offset: int = -1
    end_offset: int = -1
    source: str = SENT
    commit_lsn: int = 0
    transaction: TransactionDescription | None = None
    delay: DelayTrace | None = None
    attempts: int = 0
    redrives: int = 0
    groups: tuple[GroupProgress, ...] | None = ()
    unknown: tuple[str, ...] = ()

    @property
    def producer_id(self) -> int | None:
        return None if self.message_id is None else split_id(self.message_id)[0]

    @property
    def sequence(self) -> int | None:
        """The number of the message among those of its producer id."""
        return None if self.message_id is None else split_id(self.message_id)[1]


class KeySearch(NamedTuple):
    """The newest message of a topic with a key: `partition` and `offset`, None if none was found.

    `messages`: how many messages were searched · `complete`: whether these were all that the topic has ·
    `damaged`: how many damaged ranges were left out.
    """

    partition: int | None
    offset: int | None
    messages: int
    complete: bool
    damaged: int = 0


class MessageTracer:
    """Operations that find one message of `topic` and describe its life. `seconds`: timeout of each request."""

    def __init__(self, link: ClientConnection, seconds: float, topic: Topic) -> None:
        self._link = link
        self._seconds = seconds
        self._topic = topic

    def _request(self, message: Any) -> Operation[Any]:
        return request(self._link, message, seconds=self._seconds)

    def _locate(self, partition: int, by: int, value: int) -> Operation[commands.LocateReply]:
        topic = self._topic
        if not 0 <= partition < len(topic.partitions):
            count = len(topic.partitions)
            raise UnknownPartition(
                f"{topic.name} has {count} partition{'s' * (count != 1)}, numbered from 0; there is no {partition}."
            )
        message = commands.Locate(topic.name, topic.incarnation, partition, by, value)
        reply: commands.LocateReply = yield from self._request(message)
        return reply

    def _fetch(self, partition: int, offset: int, max_bytes: int) -> Operation[tuple[commands.FetchReply, bytes]]:
        """Return a response and its blocks. Reads also what is not durable, and does not make it durable."""
        topic = self._topic
        message = commands.Fetch(
            topic.name, topic.incarnation, partition, offset, max_bytes=max_bytes, read=commands.READ_WRITTEN
        )
        pending = self._link.send_request(message, seconds=self._seconds)
        yield from wait_for_reply(self._link, pending)
        return pending.result(), bytes(pending.reply_body)

    def _blocks(self, partition: int, offset: int, end: int, bytes_max: int) -> Operation[list[BlockTrailer]]:
        """Return the trailers of the blocks of one fetch from `offset` on; [] at `end`."""
        if offset >= end:
            return []
        reply, body = yield from self._fetch(partition, offset, bytes_max)
        log_id = make_log_id(self._topic.incarnation, partition)
        try:
            return [block.control for block in blocks_of(body, reply.start, log_id)]
        except BadRecord as error:
            raise Damaged(
                f"{self._topic.name}-{partition} is damaged after offset {offset}: {error.reason}.", first=offset
            ) from None

    # One message by its offset

    def trace(self, partition: int, offset: int) -> Operation[MessageTrace]:
        """Describe the message at `offset`. Raises what `AdminCore.trace` raises."""
        topic = self._topic
        if type(offset) is not int or offset < 0:
            raise BadRequest(f"An offset is a whole number from 0 on, not {offset!r}.")
        found = yield from self._locate(partition, commands.BY_OFFSET, offset)
        if offset >= found.end_offset:
            raise OffsetOutOfRange(
                f"Partition {partition} of {topic.name} ends at offset {found.end_offset}; no message is at {offset}.",
                first=found.first_offset,
                end=found.end_offset,
            )
        known = MessageTrace(
            topic.name,
            partition,
            incarnation=topic.incarnation,
            offset=offset,
            durable_offset=found.forced_offset,
            first_offset=found.first_offset,
            end_offset=found.end_offset,
        )
        if offset < found.first_offset:
            unknown = [
                f"The message itself: {topic.name}-{partition} begins at offset {found.first_offset}, because retention"
                " or a purge has removed what was before."
            ]
            groups = yield from self._groups(partition, offset, None, unknown)
            return known._replace(state="removed", groups=groups, unknown=tuple(unknown))
        if found.offset != offset:
            raise NotARecord(
                f"No message of {topic.name}-{partition} starts at offset {offset}; the one before it starts at"
                f" {found.offset}.",
                offset=offset,
            )
        message, trailer, last_id = yield from self._read_message(partition, offset)
        unknown = []
        attribute = _attribute(message, unknown)
        source = SOURCES.get(trailer.source_kind, SENT)
        transaction, delay = None, None
        is_last = message.id == last_id
        if source == "transaction":
            found_transaction = yield from self._transaction(trailer.source_high, unknown)
            if found_transaction is not None:
                in_it = is_last or _is_of_last_transaction(message.id, last_id, trailer, found_transaction)
                transaction = found_transaction if in_it else None
                unknown += _unknown_of_transaction(transaction, found_transaction)
        elif source == "delay":
            delay = DelayTrace("delivered", trailer.source_high, is_last, trailer.append_time)
            unknown.append("Whether it was sent in a transaction: that is not stored with a delivered message.")
            if not is_last:
                unknown.append(
                    "Its own due time: it was delivered together with others, and only that of the last is stored."
                )
        if transaction is None or not transaction.owner:
            unknown.append("The name of the client that sent it: the broker does not store that with a message.")
        groups = yield from self._groups(partition, offset, message.ordinal, unknown)
        return known._replace(
            next_offset=message.next_offset,
            ordinal=message.ordinal,
            message_id=message.id,
            key=attribute.key,
            tag=attribute.tag,
            properties=attribute.properties,
            born_ms=-1 if attribute.born_ms is None else attribute.born_ms,
            payload_bytes=-1 if message.payload is None else len(message.payload),
            appended_ms=trailer.append_time,
            durable=found.forced_offset >= trailer.next,
            source=source,
            commit_lsn=trailer.source_high if source == "transaction" else 0,
            transaction=transaction,
            delay=delay,
            attempts=attribute.attempts,
            redrives=attribute.redrives,
            groups=groups,
            unknown=tuple(unknown),
        )

    def _read_message(self, partition: int, offset: int) -> Operation[tuple[ReceivedMessage[Any], BlockTrailer, int]]:
        """Return a message, the trailer of its block, and the id of the last message of its append."""
        topic = self._topic
        reply, body = yield from self._fetch(partition, offset, ONE_BLOCK)
        decoder = Decoder(topic.name, partition, topic.incarnation)
        messages = [each for block in decoder.decode(body, reply.start, offset, reply.next) for each in block.messages]
        if not messages or messages[0].offset != offset:
            raise NotARecord(f"The message at offset {offset} of {topic.name}-{partition} was lost.", offset=offset)
        (block,) = blocks_of(body, reply.start, decoder.log_id)
        last_id, more, following = messages[-1].id, block.control.more_follows, reply.next
        while more:
            reply, body = yield from self._fetch(partition, following, ONE_BLOCK)
            (later,) = blocks_of(body, reply.start, decoder.log_id)
            last_id = [each.id for each in records_of(later.data)][-1]
            more, following = later.control.more_follows, reply.next
        return messages[0], block.control, last_id

    def _transaction(self, lsn: int, unknown: list[str]) -> Operation[TransactionDescription | None]:
        """Return the transaction whose commit record is at `lsn`; its state is "unknown" if the broker forgot it.

        None if the user has no right to see it; then the missing right is added to `unknown`.
        """
        try:
            reply = yield from self._request(commands.DescribeTransaction("", 0, lsn))
            row = reply.description
        except BadRequest:  # a broker of an earlier release
            row = {}
        except Forbidden as error:
            unknown.append(f"Its transaction: {error.sentence}")
            return None
        return transaction_description({"xid": "", "state": "unknown", **row})

    def _groups(
        self, partition: int, offset: int, ordinal: int | None, unknown: list[str]
    ) -> Operation[tuple[GroupProgress, ...] | None]:
        """Return the groups that read the topic. If the user may not see all of them, say so in `unknown`, and return
        None in place of an empty list."""
        reply = yield from self._request(commands.ListGroups())
        found = []
        for row in reply.groups:
            progress = yield from self._group(row["group"], row.get("live", False), partition, offset, ordinal)
            if progress is not None:
                found.append(progress)
        if reply.partial:
            which = "Which other groups" if found else "Which groups"
            unknown.append(f"{which} have passed it: that needs the right monitor.")
            return tuple(found) or None
        return tuple(found)

    def _group(
        self, group: str, live: bool, partition: int, offset: int, ordinal: int | None
    ) -> Operation[GroupProgress | None]:
        topic = self._topic
        try:
            name = commands.PartitionName(topic.name, partition)
            reply = yield from self._request(commands.ReadOffsets(group, [name]))
        except Busy:
            return GroupProgress(group, "in_doubt")
        committed = next((each.offset for each in reply.offsets if each.incarnation == topic.incarnation), None)
        if committed is None:
            if live:
                description = (yield from self._request(commands.DescribeGroup(group))).description
                if any(topic.name in each.get("topics", ()) for each in description.get("members", ())):
                    return GroupProgress(group, "none")
            return None
        if committed > offset:
            return GroupProgress(group, "passed", committed)
        at = yield from self._locate(partition, commands.BY_OFFSET, committed)
        behind = None if ordinal is None or at.ordinal < 0 else ordinal - at.ordinal + 1
        return GroupProgress(group, "behind", committed, behind)

    # The newest message with a key

    def find_key(self, key: bytes | str, partition: int | None, messages_max: int) -> Operation[KeySearch]:
        """Find the newest message with `key` among the newest `messages_max` messages of each partition."""
        wanted = key.encode() if isinstance(key, str) else bytes(key)
        numbers = range(len(self._topic.partitions)) if partition is None else (partition,)
        newest: ReceivedMessage[Any] | None = None
        searched, complete, damaged = 0, True, 0
        for number in numbers:
            start = yield from self._locate(number, commands.BY_EARLIEST, 0)
            end_ordinal, end = start.end_ordinal, start.end_offset
            least = max(start.ordinal, end_ordinal - messages_max)
            complete = complete and least == start.ordinal
            found: ReceivedMessage[Any] | None = None
            while end_ordinal > least and found is None:
                first_ordinal = max(least, end_ordinal - WINDOW_MESSAGES)
                first = yield from self._locate(number, commands.BY_ORDINAL, first_ordinal)
                found, left_out = yield from self._last_with_key(number, first.offset, end, wanted)
                damaged += left_out
                searched += end_ordinal - first_ordinal
                end_ordinal, end = first_ordinal, first.offset
            if found is not None and (newest is None or found.origin.append_ms > newest.origin.append_ms):
                newest = found
        if newest is None:
            return KeySearch(None, None, searched, complete, damaged)
        return KeySearch(newest.partition, newest.offset, searched, complete, damaged)

    def _last_with_key(
        self, partition: int, offset: int, end: int, key: bytes
    ) -> Operation[tuple[ReceivedMessage[Any] | None, int]]:
        """Return the last message with `key` from `offset` to `end`, and how many damaged ranges were left out."""
        topic, found, damaged = self._topic, None, 0
        decoder = Decoder(topic.name, partition, topic.incarnation)
        while offset < end:
            try:
                reply, body = yield from self._fetch(partition, offset, SEARCH_FETCH_BYTES)
                if not body:
                    break
                for block in decoder.decode(body, reply.start, offset, reply.next):
                    for message in block.messages:
                        if message.offset < end and _has_key(message, key):
                            found = message
                    offset = block.next_offset
                offset = reply.next
            except Damaged as error:
                damaged += 1
                following = error.details.get("next", end)
                if not isinstance(following, int) or following <= offset:
                    break
                offset = following
        return found, damaged

    # A delivered message by its handle

    def delivered(self, partition: int, described: DelayedDescription) -> Operation[MessageTrace]:
        """Describe the delivered message `described`, whose partition is known."""
        try:
            return (yield from self._search_delivered(partition, described))
        except Forbidden as error:  # `write`, for example, is enough to ask for the handle, and not to read the topic
            delay = DelayTrace("delivered", described.due_ms, handle=described.handle)
            why = f"Where it is: {error.sentence}"
            return MessageTrace(self._topic.name, partition, "delivered", delay=delay, groups=None, unknown=(why,))

    def _search_delivered(self, partition: int, described: DelayedDescription) -> Operation[MessageTrace]:
        handle = str(described.details.get("handle_now", described.handle))
        parsed = parse_handle(handle)
        turn = parsed.due, parsed.number
        start = yield from self._locate(partition, commands.BY_TIME_MS, max(0, turn[0] - EARLY_MS))
        offset, first, count = start.offset, 0, 0
        searched_to = min(start.end_offset, start.offset + DELIVERY_SEARCH_BYTES)
        while trailers := (yield from self._blocks(partition, offset, searched_to, SEARCH_FETCH_BYTES)):
            for trailer in trailers:
                if not count:
                    first = trailer.offset
                count += trailer.records
                position = trailer.source_high, trailer.source_low
                if not trailer.more_follows:
                    if trailer.source_kind == SOURCE_DELAY and position >= turn:
                        return (
                            yield from self._in_append(partition, described, trailer, first, count, position == turn)
                        )
                    count = 0
                offset = trailer.next
        delay = DelayTrace("delivered", turn[0], handle=described.handle)
        end = "its end" if searched_to == start.end_offset else f"offset {searched_to}"
        why = (
            f"Where it is: {self._topic.name}-{partition} was searched from offset {start.offset} to {end}."
            " Retention or a purge may have removed it."
        )
        return MessageTrace(self._topic.name, partition, "delivered", delay=delay, unknown=(why,))

    def _in_append(
        self,
        partition: int,
        described: DelayedDescription,
        trailer: BlockTrailer,
        first: int,
        count: int,
        is_last: bool,
    ) -> Operation[MessageTrace]:
        """Describe a delivered message that is in the append of `count` messages that ends with `trailer`."""
        delay = DelayTrace("delivered", described.due_ms, True, trailer.append_time, described.handle)
        if not is_last:
            why = (
                f"Which message it is: {count} messages were delivered together, at offsets from {first} to before"
                f" {trailer.end}, and the handle does not say which of them it is."
            )
            if count == 1:
                why = (
                    "Where it is: the next delivered message is another one. Retention or a purge may have removed it."
                )
                delay = delay._replace(delivered_ms=-1)
            return MessageTrace(self._topic.name, partition, "delivered", delay=delay, unknown=(why,))
        reply, body = yield from self._fetch(partition, trailer.offset, ONE_BLOCK)
        decoder = Decoder(self._topic.name, partition, self._topic.incarnation)
        blocks = decoder.decode(body, reply.start, trailer.offset, reply.next)
        offset = [each.offset for block in blocks for each in block.messages][-1]
        found = yield from self.trace(partition, offset)
        return found._replace(delay=delay)


def _is_of_last_transaction(id: int, last_id: int, trailer: BlockTrailer, last: TransactionDescription) -> bool:
    """Return whether the message `id` is of the transaction `last`, whose message `last_id` ends the append.

    An append may have the messages of several transactions, and its trailers have only the position of the last one:
    the ordinal of its last message, counted in the order of sending. The producer sequences of a transaction are
    contiguous, so the ordinal says with which sequence the transaction begins. For a commit of several transactions
    the ordinals count all of their messages, so this does not say which one a message is of.
    """
    if last.state == "unknown" or last.commit_group:
        return False
    (producer, sequence), (last_producer, last_sequence) = split_id(id), split_id(last_id)
    return producer == last_producer and last_sequence - trailer.source_low < sequence <= last_sequence


def _unknown_of_transaction(known: TransactionDescription | None, last: TransactionDescription) -> list[str]:
    """Return what cannot be known about a message's transaction; `last` is the last one of the same append."""
    if last.state == "unknown":
        return ["The transaction's name: the broker has deleted the commit record, since all of it is applied."]
    if known is None:
        name = last.xid or (f"commit group {last.commit_group}" if last.commit_group else f"epoch {last.epoch}")
        return [f"Its transaction: it was appended together with others, of which {name} is the last."]
    if not known.xid and not known.details.get("local"):
        return ["The transaction's name: its commit record does not have it."]
    return []


def _attribute(message: ReceivedMessage[Any], unknown: list[str]) -> Attribute:
    data = message.attribute_bytes
    try:
        return decode_attribute(data) if data else Attribute()
    except DecodeFailed as error:
        unknown.append(f"Key, tag, properties and when it was born: {error.sentence}")
        return Attribute()


def _has_key(message: ReceivedMessage[Any], key: bytes) -> bool:
    if key not in (message.attribute_bytes or b""):  # saves decoding most attributes
        return False
    try:
        found = message.key
    except DecodeFailed:
        return False
    return (found.encode() if isinstance(found, str) else found) == key


def undelivered(described: DelayedDescription) -> MessageTrace:
    """Describe a delayed message that is not in its partition: pending, cancelled or unknown."""
    unknown: list[str] = []
    if described.state == "unknown":
        unknown.append(
            "What became of it: the broker never gave this handle, or has forgotten the message, since it was delivered"
            " or cancelled long ago."
        )
    elif described.state == "cancelled":
        unknown.append("The message itself: it is deleted once its cancellation is durable.")
    else:
        unknown.append("Its producer id, and whether it is durable: the result of its send said that.")
    delay = DelayTrace(described.state, described.due_ms, handle=described.handle)
    return MessageTrace(
        described.topic,
        described.partition,
        described.state,
        key=described.key,
        tag=described.tag,
        born_ms=described.born_ms,
        source="delay",
        delay=delay,
        unknown=tuple(unknown),
    )
