"""What the buffer pool gains: allocation, receiving with and without it, and the memory of many connections.

    python -m tools.bench.buffers [--seconds 1.0] [--connections 1000]

Each row is the median of five runs. "without" is what a server does that has no pool: `bytearray(size)` for
each buffer, `recv(size)` for each read, a buffer of its own for each connection.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable

from journal.buffers import Buffer, Pool
from tfmq.server.connection_limits import READ_BYTES, ReceiveArena

RUNS = 5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SIZES = (100, 4096, 65_536, 1 << 18, 1 << 20, 4 << 20)


def nanoseconds_each(act: Callable[[], object], seconds: float) -> float:
    """The median cost of one `act`, over runs of `seconds` together."""
    found = []
    for _ in range(RUNS):
        count, started = 0, time.perf_counter()
        end = started + seconds / RUNS
        while time.perf_counter() < end:
            for _ in range(50):
                act()
            count += 50
        found.append((time.perf_counter() - started) / count * 1e9)
    return statistics.median(found)


def allocation(seconds: float) -> None:
    """One buffer of a size, its first byte of every page touched, and given back."""
    pool = Pool()
    print("\nallocate, touch every page, give back (us)")
    print(f"{'bytes':>9} {'with pool':>10} {'bytearray':>10} {'gain':>6}")
    for size in SIZES:
        pages = -(-size // PAGE_BYTES)

        def pooled(size: int = size, pages: int = pages) -> None:
            buffer = pool.allocate(size)
            buffer.view[::PAGE_BYTES] = bytes(pages)
            buffer.release()

        def plain(size: int = size, pages: int = pages) -> None:
            memoryview(bytearray(size))[::PAGE_BYTES] = bytes(pages)

        with_pool, without = nanoseconds_each(pooled, seconds), nanoseconds_each(plain, seconds)
        print(f"{size:>9} {with_pool / 1e3:>10.2f} {without / 1e3:>10.2f} {without / with_pool:>5.1f}x")


def receiving(seconds: float) -> None:
    """Bytes a second that one thread receives from another over loopback, in reads of 256 KiB."""
    pool = Pool()
    arena = ReceiveArena(pool)

    def into_arena(connection: socket.socket) -> int:
        count = connection.recv_into(arena.read_buffer())
        arena.mark_filled(count)
        arena.end_turn()
        return count

    own = bytearray(READ_BYTES)
    ways: dict[str, Callable[[socket.socket], int]] = {
        "shared arena (recv_into)": into_arena,
        "a bytearray each (recv_into)": lambda connection: connection.recv_into(bytearray(READ_BYTES)),
        "bytes each (recv)": lambda connection: len(connection.recv(READ_BYTES)),
        "one bytearray kept (recv_into)": lambda connection: connection.recv_into(own),
    }
    print("\nreceive over loopback (GB/s)")
    for name, receive in ways.items():
        print(f"  {name:<32} {statistics.median(rate(receive, seconds / RUNS) for _ in range(RUNS)) / 1e9:.2f}")


def rate(receive: Callable[[socket.socket], int], seconds: float) -> float:
    """Bytes a second through a socket pair whose other end sends as fast as it can."""
    here, there = socket.socketpair()
    data = bytes(1 << 20)

    def send() -> None:
        try:
            while True:
                there.sendall(data)
        except OSError:
            return

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    total, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        total += receive(here)
    elapsed = time.perf_counter() - started
    here.close()
    thread.join()
    there.close()
    return total / elapsed


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * PAGE_BYTES


def many_connections(count: int) -> None:
    """Memory when `count` connections have each received a full read once, and are idle."""
    print(f"\n{count} connections, each received {READ_BYTES >> 10} KiB once (MB more than before)")
    before = resident_bytes()
    pool = Pool()
    arena = ReceiveArena(pool)
    tails: list[Buffer] = []
    for _ in range(count):
        arena.read_buffer()[:] = bytes(READ_BYTES)
        arena.mark_filled(READ_BYTES)
        tails.append(pool.allocate(64))
        arena.end_turn()
    print(f"  shared arena, a tail of 64 bytes each: {(resident_bytes() - before) / 1e6:8.1f}")
    before = resident_bytes()
    own = [bytearray(READ_BYTES) for _ in range(count)]
    print(f"  a buffer each:                         {(resident_bytes() - before) / 1e6:8.1f}")
    del own, tails


def main() -> None:
    """All rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row")
    parser.add_argument("--connections", type=int, default=1000)
    arguments = parser.parse_args()
    allocation(arguments.seconds)
    receiving(arguments.seconds)
    many_connections(arguments.connections)


if __name__ == "__main__":
    main()
