"""The interface to what keeps the replicated objects: a few calls, which may block and run in any thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class StoredObject(NamedTuple):
    """An object in a list. `modified`: when it was stored, in seconds since 1970 by the clock of the store."""

    key: str
    size_bytes: int
    modified: float


class Store(Protocol):
    """Objects under keys of ASCII letters, digits, "/", "-" and ".". An object that is stored never changes.

    All calls raise StoreUnavailable if the store cannot be reached or fails for a time, StoreRefused if an operator has
    to act. What a call has stored or deleted is seen by all calls that begin after its return, by any process.
    """

    @property
    def name(self) -> str:
        """The URL without secrets, for texts."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Store an object durably, unless there is one of this key. Return whether it was stored.

        Of concurrent calls with the same key exactly one returns True. After StoreUnavailable, and after False for a
        call that was repeated, the caller reads the object to see whose it is.
        """

    def get(self, key: str) -> bytes | None:
        """Return the whole object; None if there is none."""

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with `prefix` and come after `after`, sorted by key. Lazy, by pages."""

    def delete(self, key: str) -> None:
        """Remove an object. Do nothing if there is none."""

    def close(self) -> None:
        """Release connections. Later calls are not allowed."""
