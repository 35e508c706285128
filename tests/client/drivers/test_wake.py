"""The pipe that wakes whoever polls."""

import os
import select

from tfmq.client.drivers.blocking import WakePipe


def rings(pipe: WakePipe) -> bool:
    poll = select.poll()
    poll.register(pipe.descriptor, select.POLLIN)
    return bool(poll.poll(0))


def test_it_rings_until_it_is_drained() -> None:
    pipe = WakePipe()
    assert not rings(pipe)
    pipe.notify()
    pipe.notify()
    assert rings(pipe)
    pipe.drain()
    assert not rings(pipe)
    pipe.drain()
    pipe.close()


def test_a_full_pipe_wakes_as_well() -> None:
    pipe = WakePipe()
    assert not rings(pipe)
    for _ in range(100_000):
        pipe.notify()
    assert rings(pipe)
    pipe.drain()
    assert not rings(pipe)
    pipe.close()


def test_nobody_polls_so_nobody_is_woken() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pipe = WakePipe()
    pipe.notify()
    pipe.close()
    pipe.close()
    assert len(os.listdir("/proc/self/fd")) == before
