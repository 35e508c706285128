"""Codecs: convert values to payloads and back.

    tfmq.Producer(codec=tfmq.codecs.json).send("orders", {"number": 42})
    for message in tfmq.Consumer(topics="orders", codec=tfmq.codecs.json): message.value

`json` and `msgpack` accept the types of their formats. `pydantic(Model)` validates in both directions and
needs the package pydantic. Any object with `encode(value) -> bytes` and `decode(data) -> value` is a codec.
`codec=` also accepts one codec for each topic, `{"orders": tfmq.codecs.pydantic(Order), "bills":
tfmq.codecs.json}`; other topics then have no codec.
"""

from __future__ import annotations

import json as _json
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

from tfmq.bounded_msgpack import UNCHECKED_BYTES_MAX, check_counts
from tfmq.errors import BadRequest, DecodeFailed
from tfmq.limits import NAME_RULE, is_valid_name

Value = TypeVar("Value")
CodecType = TypeVar("CodecType")


class Codec(Protocol[Value]):
    """Interface of a codec. `decode` may raise any error; readers get it as `DecodeFailed`."""

    def encode(self, value: Value) -> bytes: ...

    def decode(self, data: bytes) -> Value: ...


def select_codec(codec: CodecType | Mapping[str, CodecType] | None, topic: str) -> CodecType | None:
    """Return the codec for `topic` from a `codec=` argument, or None if the topic has no codec."""
    return codec.get(topic) if isinstance(codec, Mapping) else codec


def check_codec(codec: Any, method: str) -> None:
    """Check that each codec has `method`, and that the keys of a dict are valid topic names. Raises BadRequest."""
    for topic, each in codec.items() if isinstance(codec, Mapping) else ((None, codec),):
        if topic is not None and not is_valid_name(topic):
            raise BadRequest(f"codec= names {topic!r}, which cannot be a topic: {NAME_RULE}.")
        if each is not None and (isinstance(each, str) or not hasattr(each, method)):
            raise BadRequest(
                f"A codec has encode and decode, as tfmq.codecs.json has; {each!r} is none. codec= takes one for all"
                ' topics, or one for each, as {"orders": tfmq.codecs.json}.'
            )


class _Json:
    """JSON in UTF-8, without optional spaces. `encode` raises TypeError or ValueError for unsupported values."""

    def encode(self, value: Any) -> bytes:
        return _json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

    def decode(self, data: bytes) -> Any:
        try:
            return _json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise DecodeFailed(f"The payload is not JSON: {error}.") from error

    def __repr__(self) -> str:
        return "tfmq.codecs.json"


class _MessagePack:
    """msgpack. `encode` raises `TypeError` or `ValueError` for unsupported values."""

    def encode(self, value: Any) -> bytes:
        packed: bytes = import_module("msgpack").packb(value)
        return packed

    def decode(self, data: bytes) -> Any:
        package = import_module("msgpack")
        try:
            if len(data) > UNCHECKED_BYTES_MAX:
                check_counts(data)
            return package.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, package.UnpackException, RecursionError) as error:
            raise DecodeFailed(f"The payload is not msgpack: {error}.") from error

    def __repr__(self) -> str:
        return "tfmq.codecs.msgpack"


class _Pydantic(Generic[Value]):
    """Values of one pydantic model, or of any type that pydantic validates, as JSON."""

    def __init__(self, model: type[Value]) -> None:
        try:
            package = import_module("pydantic")
        except ModuleNotFoundError as error:
            raise ImportError(
                'codecs.pydantic needs pydantic: pip install "tfmq[pydantic]".', name=error.name
            ) from None
        self._name = getattr(model, "__name__", None) or str(model)  # types such as `int | str` have no name
        try:
            self._adapter = package.TypeAdapter(model)
        except package.PydanticUserError as error:
            raise BadRequest(f"codecs.pydantic takes a model or a type, not {model!r}.") from error
        self._invalid: type[Exception] = package.ValidationError

    def encode(self, value: Value) -> bytes:
        dumped: bytes = self._adapter.dump_json(self._adapter.validate_python(value))
        return dumped

    def decode(self, data: bytes) -> Value:
        try:
            value: Value = self._adapter.validate_json(bytes(data))
        except self._invalid as error:
            raise DecodeFailed(f"The payload is not a valid {self._name}: {error}") from error
        return value

    def __repr__(self) -> str:
        return f"tfmq.codecs.pydantic({self._name})"


json = _Json()
msgpack = _MessagePack()


def pydantic(model: type[Value]) -> Codec[Value]:
    """Create the codec of a model or type. Raises ImportError without pydantic, BadRequest for an unsuitable type."""
    return _Pydantic(model)
