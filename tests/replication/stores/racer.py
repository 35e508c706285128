"""`python -m tests.replication.stores.racer URL NAME COUNT`: a process that puts the same keys as others do.

It says `ready`, begins with the first line that it reads, and prints the numbers of the keys that it has stored.
"""

import random
import sys

from tfmq.replication.stores.open_store import open_store


def main(url: str, name: str, count: int) -> None:
    store = open_store(url)
    numbers = list(range(count))
    random.Random(name).shuffle(numbers)  # so that each of them is first somewhere
    print("ready", flush=True)
    sys.stdin.readline()
    print(*(number for number in numbers if store.put_new(f"race/{number}", name.encode())), flush=True)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
