"""The interface to what keeps the replicated objects: a few calls, which may block and run in any thread."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

URL_FORMS: Final = (
    "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER, sqlite:////PATH, or a URL of"
    " SQLAlchemy such as postgresql+psycopg://USER@HOST/DATABASE"
)
OBJECT_BYTES_MAX: Final = 64 << 20
"""Maximum size of an object. A call has at most two copies of one in memory."""
KEY_CHARACTERS_MAX: Final = 200
_KEY: Final = re.compile(r"[A-Za-z0-9-][A-Za-z0-9.-]*(/[A-Za-z0-9-][A-Za-z0-9.-]*)*")


class StoredObject(NamedTuple):
    """An object in a list. `modified`: when it was stored, in seconds since 1970 by the clock of the store."""

    key: str
    size_bytes: int
    modified: float


DELETED_MAX: Final = 500
"""Maximum keys of one call of `Store.delete`; S3 takes 1,000 in a request."""


class Store(Protocol):
    """Objects under keys that `check_key` permits. An object that is stored never changes.

    No key is the beginning of another one that goes on with "/", because some stores have folders. At least 8 threads
    may use a store at the same time. What a call has stored or deleted is seen by all calls that begin after its
    return, by any process.

    All calls raise StoreUnavailable if the store cannot be reached or fails for a time, StoreRefused if an operator has
    to act. The texts of both are sentences that name the store.
    """

    @property
    def name(self) -> str:
        """The URL without secrets, for texts."""

    def put_new(self, key: str, data: bytes) -> bool:
        """Store an object durably, unless there is one of this key. Return whether it was stored.

        Raises ValueError for a key or a size that is not permitted.

        Of concurrent calls with the same key exactly one returns True. After StoreUnavailable, and after False for a
        call that was repeated, the caller reads the object to see whose it is.
        """

    def get(self, key: str) -> bytes | None:
        """Return the whole object; None if there is none. Raises InvalidObject above OBJECT_BYTES_MAX."""

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with `prefix` and come after `after`, sorted by key. Lazy, by pages."""

    def delete(self, *keys: str) -> None:
        """Remove objects, at most DELETED_MAX, in any order. A key without an object is ignored.

        After StoreUnavailable, some of them may be removed.
        """

    def close(self) -> None:
        """Release connections. Later calls are not allowed."""


def check_key(key: str) -> None:
    """Raise ValueError unless `key` has ASCII letters, digits, "-" and "." in names between "/", none of which begins
    with a "."."""
    if len(key) > KEY_CHARACTERS_MAX or not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} cannot be the key of an object")


def check_size(key: str, size_bytes: int) -> None:
    """Raise ValueError if an object is too large to be stored."""
    if size_bytes > OBJECT_BYTES_MAX:
        raise ValueError(f"the object {key} has {size_bytes} bytes, more than {OBJECT_BYTES_MAX}")
