"""A tfmq-server whose folder as a store takes MB_PER_SECOND and no more, with LATENCY_SECONDS for each put.

All puts share the rate, as connections of one network do. The folder is one in memory: a store on a machine of its own
takes neither the disk nor much of the processors of the broker.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from tfmq.replication.stores import open_store
from tfmq.replication.stores.file_store import FileStore
from tfmq.server.main import main

MB_PER_SECOND: Final = 200.0
LATENCY_SECONDS: Final = 0.005


class ThrottledStore(FileStore):
    """A `FileStore` whose puts wait for their turn."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._turn = threading.Lock()
        self._free_at = 0.0

    def put_new(self, key: str, data: bytes) -> bool:
        with self._turn:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + len(data) / 1e6 / MB_PER_SECOND
            wait = self._free_at - now
        time.sleep(LATENCY_SECONDS + wait)
        return super().put_new(key, data)


if __name__ == "__main__":
    vars(open_store)["FileStore"] = ThrottledStore
    main()
