"""Quotas: how many bytes a second a user may send and read, how many messages a second the user may send, and how many
connections the user may have.

The balance of a quota grows with its rate, up to what it grows in a second. A request is accepted while the balance is
not negative, whatever it costs, so a batch may be larger than a second's share; the next request waits until the debt
is paid. This is a token bucket with debt (compare RFC 2697), so the rate holds over any time, plus one second and one
request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

BURST_SECONDS: Final = 1.0
QUOTA_MAX: Final = (1 << 53) - 1
"""The highest quota: a float has it exactly."""


class Quotas(NamedTuple):
    """The quotas of one user; 0: no limit. `bytes_per_second`: bodies of sends and of fetch replies, together.
    `messages_per_second`: messages sent."""

    bytes_per_second: int = 0
    messages_per_second: int = 0
    connections: int = 0


class Bucket:
    """One rate. `clock` returns monotonic seconds."""

    __slots__ = ("_at", "_balance", "_clock", "rate")

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._balance = rate * BURST_SECONDS
        self._at = clock()

    def wait_seconds(self) -> float:
        """Return how long a request has to wait; 0 if it is accepted now."""
        now = self._clock()
        self._balance = min(self.rate * BURST_SECONDS, self._balance + (now - self._at) * self.rate)
        self._at = now
        return max(0.0, -self._balance / self.rate)

    def take(self, amount: float) -> None:
        self._balance -= amount


class Usage:
    """The balances of one user's rates, over all connections."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.set(quotas)

    def set(self, quotas: Quotas) -> None:
        """Set other quotas. Balances begin again."""
        self._bytes = Bucket(quotas.bytes_per_second, self._clock) if quotas.bytes_per_second else None
        self._messages = Bucket(quotas.messages_per_second, self._clock) if quotas.messages_per_second else None

    @property
    def is_limited(self) -> bool:
        return self._bytes is not None or self._messages is not None

    def wait_seconds(self) -> float:
        """Return how long the user has to wait before the next send or read; 0 if it may be now."""
        return max((each.wait_seconds() for each in (self._bytes, self._messages) if each is not None), default=0.0)

    def take(self, size_bytes: int, messages: int) -> None:
        if self._bytes is not None:
            self._bytes.take(size_bytes)
        if self._messages is not None:
            self._messages.take(messages)
