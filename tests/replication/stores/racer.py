"""`python -m tests.replication.stores.racer URL COUNT NAME...`: a process for each name; all put the same keys.

All begin at the same moment, each in an order of its own. Each prints its name and the numbers of the keys that it has
stored. The libraries are loaded once, before the processes are made.
"""

import os
import random
import sys

import tfmq.replication.stores.object_store
import tfmq.replication.stores.sql_store  # noqa: F401
from tfmq.replication.stores.open_store import open_store


def race(url: str, count: int, name: str, ready: int, start: int) -> None:
    store = open_store(url)
    numbers = list(range(count))
    random.Random(name).shuffle(numbers)
    os.write(ready, b".")
    os.read(start, 1)
    won = [number for number in numbers if store.put_new(f"race/{number}", name.encode())]
    store.close()
    os.write(sys.stdout.fileno(), f"{' '.join((name, *map(str, won)))}\n".encode())


def main(url: str, count: int, names: list[str]) -> int:
    ready, start = os.pipe(), os.pipe()
    children = []
    for name in names:
        child = os.fork()
        if not child:
            os.close(start[1])
            race(url, count, name, ready[1], start[0])
            os._exit(0)
        children.append(child)
    for _ in names:
        os.read(ready[0], 1)
    os.close(start[1])  # all of them read the end of it
    return max(os.waitpid(child, 0)[1] for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
