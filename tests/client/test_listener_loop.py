"""The event loop of a blocking consumer's coroutine functions."""

import asyncio
import contextvars
import threading

import pytest

from tfmq.client.worker.thread_runner import ListenerLoopThread

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="")


def test_all_share_one_loop_and_have_the_callers_context() -> None:
    loop = ListenerLoopThread()

    async def where() -> tuple[object, str]:
        await asyncio.sleep(0)
        return asyncio.get_running_loop(), PLACE.get()

    found = []

    def call(name: str) -> None:
        PLACE.set(name)
        found.append(loop.run(where()))

    threads = [threading.Thread(target=call, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name for _, name in found} == {"a", "b"} and len({id(each) for each, _ in found}) == 1
    loop.stop()


def test_what_it_raises_is_raised_and_what_is_left_is_cancelled_at_the_end() -> None:
    loop = ListenerLoopThread()
    cancelled = threading.Event()

    async def left() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def fails() -> None:
        asyncio.get_running_loop().create_task(left())
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(fails())
    loop.stop()
    assert cancelled.wait(10)
    loop.stop()
