"""Frames: encoding of requests and replies in a byte stream; see docs/protocol.md.

    size        u32  bytes after this word
    header size u32
    header      one msgpack array
    body        the rest

The integers are big-endian. A size is checked as soon as its four bytes have arrived, before anything is allocated.
Every invalid input raises `BadFrame` and nothing else. If the first bytes are those of another protocol, the error
names that protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tfmq import limits
from tfmq.bounded_msgpack import UNCHECKED_BYTES_MAX, Buffer, Malformed, list_header, pack, unpack
from tfmq.errors import BadFrame, BadRequest, MessageTooLarge

SIZE = struct.Struct(">I")
PREFIX = struct.Struct(">II")

UNSIGNED = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""msgpack unsigned integers: first byte -> number of bytes that follow. An integer below 128 is only its first byte."""

FIELDS_UNKNOWN = 1 << 10
"""Maximum number of values in the header of an unknown command."""


class Frame(NamedTuple):
    """A decoded frame. `body` is a view of the buffer that was decoded."""

    header: list[Any]
    body: memoryview


_new = tuple.__new__


def encode(header: Iterable[Any], *body: Buffer) -> list[Buffer]:
    """Return a frame as buffers to be written in this order; the body's buffers are not copied.

    Raises BadRequest for a header that cannot be encoded or is too large, MessageTooLarge for a frame of 4 GiB or more.
    """
    try:
        packed = pack(list(header))
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"A field of the request cannot be sent: {error}.") from None
    if len(packed) > limits.HEADER_BYTES:
        raise BadRequest(f"The header has {len(packed)} bytes, {limits.HEADER_BYTES:d} are allowed: ask for less.")
    size = 4 + len(packed)
    for part in body:
        size += memoryview(part).nbytes
    if size >> 32:
        raise MessageTooLarge(f"A frame of {size} bytes cannot be sent.")
    return [PREFIX.pack(size, len(packed)) + packed, *body]


def check_size(view: Buffer, position: int = 0, *, frame_bytes: int = limits.FRAME_BYTES) -> int:
    """Return how many bytes follow the size word at `position`, which must be present. Raises BadFrame
    if they are fewer than 4 or more than `frame_bytes`."""
    size: int = SIZE.unpack_from(view, position)[0]
    if size > frame_bytes or size < 4:
        start = bytes(view[position : position + DETECTION_BYTES])
        why = f"is larger than the {frame_bytes} that are allowed here"
        if size < 4:
            why = "has no room for its header size"
        raise BadFrame(other_protocol_sentence(start) or f"A frame of {size} bytes {why}.")
    return size


def parse_prefix(view: Buffer, position: int = 0, *, frame_bytes: int = limits.FRAME_BYTES) -> tuple[int, int]:
    """Return (size, header size) of the frame at `position`. The first eight bytes of the frame must be present. Raises
    BadFrame if one of the two sizes is not permitted."""
    size = check_size(view, position, frame_bytes=frame_bytes)
    header_size: int = SIZE.unpack_from(view, position + 4)[0]
    if header_size > size - 4:
        raise BadFrame(f"A header of {header_size} bytes does not fit in a frame of {size}.")
    if header_size > limits.HEADER_BYTES:
        raise BadFrame(f"A header of {header_size} bytes is larger than the {limits.HEADER_BYTES:d} allowed.")
    return size, header_size


def decode_header(view: Buffer, bounds: Mapping[int, tuple[int, int]] = MappingProxyType({})) -> list[Any]:
    """Decode a header: a list that begins with the command code and the correlation number.

    `bounds`: the result of `header_bounds`; for each command code, the maximum number of fields and the maximum number
    of values in all. A header with more is rejected before it is decoded, because half a million surplus values would
    cost as much time as the largest request. Raises BadFrame for such a header, and for one that is invalid.
    """
    try:
        if len(view) <= UNCHECKED_BYTES_MAX or not bounds:
            header = unpack(view)
        else:
            header = unpack(view, items_max=_items_max(view, bounds))
    except Malformed as error:
        raise BadFrame(f"A header is broken: {error}.") from None
    if type(header) is not list or len(header) < 2 or type(header[0]) is not int or type(header[1]) is not int:
        raise BadFrame("A header must be a list that begins with the command and the correlation number.")
    if not 0 <= header[1] < 1 << 32:
        raise BadFrame(f"A correlation number must be a u32, not {header[1]}.")
    return header


def _items_max(view: Buffer, bounds: Mapping[int, tuple[int, int]]) -> int:
    fields, first = list_header(view)
    width = UNSIGNED.get(view[first], 0) if fields > 0 and len(view) > first else 0
    code = int.from_bytes(view[first + 1 : first + 1 + width], "big") if width else view[first]
    fields_max, items_max = bounds.get(code, (FIELDS_UNKNOWN, FIELDS_UNKNOWN))
    if fields > fields_max:
        raise BadFrame(f"A header of {fields} fields: at most {fields_max} are allowed for its command.")
    return items_max


def frame_at(view: memoryview, position: int, *, frame_bytes: int = limits.FRAME_BYTES) -> tuple[Frame | None, int]:
    """Return the frame at `position` and where the next one starts. Raises BadFrame if the frame is invalid.

    If the frame is incomplete, return None and how many bytes are needed from `position`: 4, 8, or the whole frame.
    """
    available = len(view) - position
    if available < 4:
        return None, 4
    if available < 8:
        check_size(view, position, frame_bytes=frame_bytes)
        return None, 8
    size, header_size = PREFIX.unpack_from(view, position)
    if size > frame_bytes or header_size > limits.HEADER_BYTES or header_size > size - 4:
        parse_prefix(view, position, frame_bytes=frame_bytes)  # raises BadFrame with the reason
    if available < 4 + size:
        return None, 4 + size
    body_start, end = position + 8 + header_size, position + 4 + size
    return _new(Frame, (decode_header(view[position + 8 : body_start]), view[body_start:end])), end


class Decoder:
    """Incremental decoder of a byte stream. Stores at most one incomplete frame.

    Bodies of frames are views of the bytes passed to `feed`, or of a copy if a frame arrived in parts; they stay valid
    as long as they are referenced. After a BadFrame the stream cannot be decoded any further, and the connection must
    be closed.
    """

    def __init__(self, frame_bytes: int = limits.FRAME_BYTES) -> None:
        self.frame_bytes = frame_bytes
        self._incomplete = bytearray()
        self._needed_bytes = 4

    @property
    def missing_bytes(self) -> int:
        """How many bytes are missing for the next step: to decode the size, the header size, or the whole frame."""
        return self._needed_bytes - len(self._incomplete)

    @property
    def is_incomplete(self) -> bool:
        """Whether the last frame was received only in part."""
        return bool(self._incomplete)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return the frames that `data` completes. Do not modify `data` afterwards: bodies are views of it."""
        view = memoryview(data)
        frames: list[Frame] = []
        while self._incomplete and view:
            taken = min(self.missing_bytes, len(view))
            self._incomplete += view[:taken]
            view = view[taken:]
            if self.missing_bytes:
                return frames
            frame, self._needed_bytes = frame_at(memoryview(self._incomplete), 0, frame_bytes=self.frame_bytes)
            if frame is not None:
                frames.append(frame)
                self._incomplete, self._needed_bytes = bytearray(), 4
        position = 0
        while position < len(view):
            frame, number = frame_at(view, position, frame_bytes=self.frame_bytes)
            if frame is None:
                self._incomplete, self._needed_bytes = bytearray(view[position:]), number
                break
            frames.append(frame)
            position = number
        return frames


# Detection of other protocols, so that an error names the protocol if a client has connected to a wrong port.

DETECTION_BYTES = 8

EMPTY_LINE = "\r\n\r\n"
"""Sent after a client's HELLO, so that a server of a text protocol, such as HTTP, responds with an error at once."""

_HTTP = "an HTTP client or browser"
# The first bytes that other protocols send, and the kind of program that sends them.
_PROTOCOLS: tuple[tuple[bytes, str], ...] = (
    *((word, _HTTP) for word in (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC", b"TRAC", b"CONN")),
    (b"PRI ", "an HTTP/2 client"),
    (b"HTTP", "an HTTP server"),
    (b"<!DO", "an HTTP server"),
    (b"<htm", "an HTTP server"),
    (b"<HTM", "an HTTP server"),
    (b"SSH-", "an SSH program"),
    (b"-ERR", "a Redis server"),
    (b"+PON", "a Redis server"),
    (b"-NOA", "a Redis server"),
    (b"-DEN", "a Redis server"),
    (b"*1\r\n", "a Redis client"),
    (b"*2\r\n", "a Redis client"),
    (b"*3\r\n", "a Redis client"),
    (b"PING", "a Redis or NATS client"),
    (b"INFO", "a NATS server"),
    (b"AMQP", "an AMQP program, such as RabbitMQ"),
    (b"220 ", "a mail or FTP server"),
    (b"220-", "a mail or FTP server"),
    (b"RFB ", "a VNC server"),
    (b"UNKN", "a beanstalkd server"),
    (b"\x16\x03\x01", "a TLS client"),
    (b"\x16\x03\x03", "a TLS program"),
    (b"\x15\x03\x01", "a TLS server"),
    (b"\x15\x03\x03", "a TLS server"),
)


def detect_protocol(start: bytes) -> str | None:
    """Return which kind of program begins a connection with `start`, for example "an HTTP server"; None if unknown."""
    return next((program for word, program in _PROTOCOLS if start.startswith(word)), None)


def other_protocol_sentence(start: bytes) -> str | None:
    """Return the error text for the first bytes that a program of another protocol has sent; None if unknown."""
    program = detect_protocol(start)
    return program and f"At the other end is {program}, not a program that speaks tfmq: check host and port."


def http_response(start: bytes, host_and_port: str) -> bytes | None:
    """Return a response for an HTTP client; None if `start` is not the start of an HTTP request."""
    if detect_protocol(start) != _HTTP:
        return None
    text = f"This is a tfmq broker at {host_and_port}; it speaks its own protocol, not HTTP.\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + text
