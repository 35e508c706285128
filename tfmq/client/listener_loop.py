"""An event loop in a thread, for listeners that are coroutine functions of a consumer that is blocking."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any, Final

STOP_SECONDS: Final = 5.0
"""For tasks that listeners left behind, once the run is over."""


class ListenerLoop:
    """One loop for all workers, so that what listeners share (a session, a pool) belongs to it. Started when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """What it comes to, in the caller's context; any thread but the loop's. Interrupted, it is cancelled."""

        async def awaited() -> Any:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(awaited(), self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what is left, end the thread. Bounded."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STOP_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_turn, args=(loop,), name="tfmq-listeners", daemon=True
                )
                self._thread.start()
            return self._loop


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=STOP_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
