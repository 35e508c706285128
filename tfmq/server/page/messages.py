"""Messages as the page shows them: browsed from a position, searched by key, and one message alone.

Every call has limits on what it reads: rows, bytes and seconds. A search says how far it has looked, so that the next
call continues there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tfmq.client.connection.requests import wait_for_reply
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.errors import Damaged, DecodeFailed, OffsetOutOfRange, UnknownTopic
from tfmq.message import Attribute, Ordinal, decode_attribute
from tfmq.protocol import commands
from tfmq.server.page.arguments import shown_bytes, shown_key, shown_text
from tfmq.server.page.call import REQUEST_SECONDS, Call

FETCH_BYTES: Final = 256 << 10
"""Bytes of one read. A larger block is read whole."""
PAGE_BYTES: Final = 4 << 20
"""Bytes that are read for one page without a key; the page ends earlier if messages are large."""
SCAN_BYTES: Final = 64 << 20
SCAN_SECONDS: Final = 2.0
"""Limits of one search by key. The search reads the log in order, because the broker has no index of keys."""
PREVIEW_BYTES: Final = 256
"""Bytes of a payload in a list."""
PAYLOAD_BYTES: Final = 64 << 10
"""Bytes of the payload of a message that is shown alone."""
PROPERTIES_IN_LIST: Final = 8


class Reading:
    """One pass over a partition, and what it has found. `offset`: the next one to read."""

    def __init__(self, call: Call, topic: str, incarnation: int, partition: int, offset: int) -> None:
        self.offset = self.first_offset = offset
        self.bytes_read = 0
        self.at_end = False
        self.damage: dict[str, Any] | None = None
        self._call = call
        self._place = (topic, incarnation, partition)
        self._decoder = Decoder(topic, partition, incarnation)

    def read(self, wanted_key: bytes | None = None) -> Operation[list[ReceivedMessage]]:
        """Read on, and return the messages. Those without the key `wanted_key` are left out where that is cheap.

        At a damaged range, `damage` describes it, and the pass is over: `offset` is the offset after the range.
        """
        link = self._call.link
        fetch = commands.Fetch(*self._place, self.offset, commands.EPOCH_UNKNOWN, FETCH_BYTES)
        pending = link.send_request(fetch, seconds=REQUEST_SECONDS)
        yield from wait_for_reply(link, pending)
        messages: list[ReceivedMessage] = []
        try:
            reply = pending.result()
            body = bytes(pending.reply_body)
            if wanted_key is None or wanted_key in body:
                for block in self._decoder.decode(body, reply.start, reply.skip_to, reply.next):
                    messages += block.messages
        except Damaged as error:
            first, after = error.details.get("first", self.offset), error.details.get("next", self.offset)
            self.damage = {"first": first, "next": after, "reason": str(error)}
            self.offset = max(after, self.offset) if isinstance(after, int) else self.offset
            return messages
        self.bytes_read += len(body)
        self.at_end = reply.next >= reply.forced or reply.next <= self.offset
        self.offset = reply.next
        return messages


def browse(call: Call) -> Operation[dict[str, Any]]:
    """Return messages of one partition from the position `at` on; `latest` means the last ones.

    With a key, only the messages with that key, as far as the limits of a search go.
    """
    arguments = call.arguments
    name, partition, limit = arguments.text("topic"), arguments.number("partition", 0), arguments.limit()
    position, key = arguments.position("at", "earliest"), arguments.key()
    found = yield from call.request(commands.Metadata([name]))
    if not found.topics:
        raise UnknownTopic(f"There is no topic {name}.")
    located = yield from call.admin.locate(name, partition, position)
    if position == "latest" and located.ordinal > 0:
        located = yield from call.admin.locate(name, partition, Ordinal(max(0, located.ordinal - limit)))
    reading = Reading(call, name, found.topics[0].incarnation, partition, located.offset)
    rows: list[ReceivedMessage] = []
    until = call.link.now() + SCAN_SECONDS
    bytes_max = PAGE_BYTES if key is None else SCAN_BYTES
    while not (reading.at_end or reading.damage) and reading.bytes_read < bytes_max and call.link.now() < until:
        messages = yield from reading.read(key)
        rows += messages if key is None else _with_key(messages, key)
        if len(rows) > limit:
            break
    is_cut = len(rows) > limit
    shown = rows[:limit]
    return {
        "topic": name,
        "partition": partition,
        "first_offset": located.first_offset,
        "end_offset": located.end_offset,
        "durable_offset": located.forced_offset,
        "end_ordinal": located.end_ordinal,
        "messages": [message_row(each) for each in shown],
        "from": reading.first_offset,
        "to": rows[limit].offset if is_cut else reading.offset,
        "bytes_read": reading.bytes_read,
        "at_end": reading.at_end and not is_cut,
        "damage": None if is_cut else reading.damage,
    }


def one_message(call: Call) -> Operation[dict[str, Any]]:
    """Return the message at an offset, with all its properties and up to PAYLOAD_BYTES of its payload."""
    arguments = call.arguments
    name, partition = arguments.text("topic"), arguments.number("partition", 0)
    offset = arguments.number("offset")
    found = yield from call.request(commands.Metadata([name]))
    if not found.topics:
        raise UnknownTopic(f"There is no topic {name}.")
    reading = Reading(call, name, found.topics[0].incarnation, partition, offset)
    messages = yield from reading.read()
    message = next((each for each in messages if each.offset == offset), None)
    if message is None:
        if reading.damage is not None:
            raise Damaged(reading.damage["reason"])
        raise OffsetOutOfRange(f"No message begins at offset {offset} of {name}-{partition}, or it was removed.")
    return {"message": message_row(message, PAYLOAD_BYTES, complete=True)}


def _with_key(messages: list[ReceivedMessage], key: bytes) -> Iterator[ReceivedMessage]:
    for each in messages:
        try:
            found = each.key
        except DecodeFailed:
            continue
        if found is not None and (found.encode() if isinstance(found, str) else found) == key:
            yield each


def message_row(
    message: ReceivedMessage, payload_bytes: int = PREVIEW_BYTES, *, complete: bool = False
) -> dict[str, Any]:
    """Return a message for display. What cannot be decoded is left out, and `unreadable` says why."""
    row: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "next_offset": message.next_offset,
        "ordinal": message.ordinal,
        "id": f"{message.id:016x}",
        "appended_ms": message.origin.append_ms,
        "payload": shown_bytes(message.payload, payload_bytes),
    }
    try:
        data = message.attribute_bytes
        attribute = decode_attribute(data) if data else Attribute()
    except DecodeFailed as error:
        return row | {"unreadable": str(error)}
    names = list(attribute.properties) if complete else list(attribute.properties)[:PROPERTIES_IN_LIST]
    return row | {
        "key": shown_key(attribute.key),
        "tag": shown_text(attribute.tag or ""),
        "properties": [[shown_text(each), shown_text(attribute.properties[each])] for each in names],
        "property_count": len(attribute.properties),
        "born_ms": attribute.born_ms,
        "attempts": attribute.attempts,
        "redrives": attribute.redrives,
    }
