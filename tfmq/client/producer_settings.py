"""The arguments of a producer, and what they are where nobody says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfmq.client.partition_selector import PartitionSelector
from tfmq.client.sender import Options
from tfmq.codecs import Codec, check_codec
from tfmq.errors import BadRequest
from tfmq.hooks import Hook
from tfmq.limits import valid_name
from tfmq.protocol.commands import ACKS

LINGER_MS = 5.0
"""How long a batch waits for company while nobody waits for it."""
BATCH_BYTES = 256 << 10
"""Larger ones gain nothing, and a batch is what one refusal costs."""
BUFFER_BYTES = 32 << 20
TIMEOUT_SECONDS = 30.0
BATCH_BYTES_MAX = 8 << 20
"""A broker refuses frames of 16 MiB and more. One message alone may be larger than a batch."""


class Settings(NamedTuple):
    """The arguments of a producer, checked."""

    servers: str | Sequence[str] | None
    group: str | None
    acks: str | None
    linger_ms: float
    batch_bytes: int
    buffer_bytes: int
    selector: PartitionSelector | str | None
    codec: Codec[Any] | Mapping[str, Codec[Any]] | None
    timeout: float
    hooks: Sequence[Hook]
    client_id: str | None = None

    def options(self) -> Options:
        """How the sender is set. Raises `BadRequest` for values that make no sense."""
        if self.acks is not None and self.acks not in ACKS:
            raise BadRequest(
                f"acks={self.acks!r} is not known; it takes None or one of {', '.join(map(repr, ACKS))}."
            )
        if self.group is not None and not valid_name(self.group):
            raise BadRequest(f"{self.group!r} is not a group's name: 1 to 249 of A-Z a-z 0-9 . _ -")
        for name in ("linger_ms", "batch_bytes", "buffer_bytes", "timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (value > 0 or (value == 0 and name == "linger_ms")):
                least = "0 or more" if name == "linger_ms" else "a number above 0"
                raise BadRequest(f"{name} must be {least}, not {value!r}.")
        if self.batch_bytes > BATCH_BYTES_MAX:
            raise BadRequest(
                f"batch_bytes is at most {BATCH_BYTES_MAX}, not {self.batch_bytes}; larger gain nothing."
            )
        check_codec(self.codec, "encode")
        acks = None if self.acks is None else ACKS[self.acks]
        batch_bytes = min(int(self.batch_bytes), int(self.buffer_bytes))
        return Options(acks, self.linger_ms / 1000, batch_bytes, int(self.buffer_bytes), float(self.timeout))
