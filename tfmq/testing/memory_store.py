"""A store of replicated objects in memory, for tests and simulations."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Final

from tfmq.replication.store import StoredObject, check_key, check_size

PAGE: Final = 1000


class MemoryStore:
    """A `tfmq.replication.store.Store` whose calls never fail. All users in a process share one instance.

    `clock`: returns the time in seconds since 1970, as `VirtualClock.time` does. `page`: how many objects a list reads
    at a time; it sees changes that are made between two pages, as a real store's list does.
    """

    def __init__(self, clock: Callable[[], float], *, name: str = "memory://", page: int = PAGE) -> None:
        self._clock = clock
        self._name = name
        self._page = page
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._keys: list[str] = []
        """Sorted."""

    @property
    def name(self) -> str:
        return self._name

    def put_new(self, key: str, data: bytes) -> bool:
        check_key(key)
        check_size(key, len(data))
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = (bytes(data), self._clock())
            insort(self._keys, key)
        return True

    def get(self, key: str) -> bytes | None:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        return None if found is None else found[0]

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        while True:
            with self._lock:
                begin = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
                keys = [key for key in self._keys[begin : begin + self._page] if key.startswith(prefix)]
                page = [StoredObject(key, len(self._objects[key][0]), self._objects[key][1]) for key in keys]
            yield from page
            if len(page) < self._page:
                return
            after = page[-1].key

    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
            with self._lock:
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def close(self) -> None:
        """Nothing: other users go on with the objects."""
