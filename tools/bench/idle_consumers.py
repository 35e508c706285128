"""Many consumers in one process that wait for messages which never come: `tools/bench/idle.py` starts it.

`python -m tools.bench.idle_consumers ADDRESS TOPIC GROUP FIRST COUNT MEMBERS`. Consumer `n` of `FIRST` and the `COUNT`
behind it is a member of the group GROUP-(n / MEMBERS); a GROUP of "" stands for none. All poll; `ready` is said when
each has its partitions, and the process ends with its standard input.
"""

import asyncio
import logging
import sys
from typing import Any

from tfmq import aio

LOOK_SECONDS = 0.2
CALM_SECONDS = 1.0
"""The shares have settled when they were the same for so long."""
BEGIN_AT_ONCE = 50


def consumers(address: str, topic: str, group: str, first: int, count: int, members: int) -> list[Any]:
    return [
        aio.Consumer(address, topics=topic, group=f"{group}-{number // members}" if group else None)
        for number in range(first, first + count)
    ]


def shares(made: list[Any]) -> list[Any]:
    """What each has: nothing has settled while somebody has no place yet."""
    found = [each.stats() for each in made]
    return [(each.get("assigned"), each.get("generation"), tuple(each["partitions"])) for each in found]


def is_settled(each: dict[str, Any]) -> bool:
    """In a group: it has its share, or was told why it has none; without one: it reads."""
    return bool(each["partitions"]) or bool(each.get("note"))


async def serve(made: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    polls = []
    for number, consumer in enumerate(made):
        polls.append(asyncio.ensure_future(consumer.poll(None)))
        if number % BEGIN_AT_ONCE == 0:
            await asyncio.sleep(LOOK_SECONDS / 10)
    known, since = shares(made), loop.time()
    while loop.time() < since + CALM_SECONDS or not all(is_settled(each.stats()) for each in made):
        await asyncio.sleep(LOOK_SECONDS)
        if failed := [each for each in polls if each.done()]:
            raise RuntimeError(f"a consumer did not wait: {failed[0]!r}")
        if (now := shares(made)) != known:
            known, since = now, loop.time()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for poll in polls:
        poll.cancel()
    sys.stdout.flush()


def main() -> None:
    logging.disable(logging.WARNING)  # that many of them read nothing is what is measured
    address, topic, group, first, count, members = sys.argv[1:]
    asyncio.run(serve(consumers(address, topic, group, int(first), int(count), int(members))))


if __name__ == "__main__":
    main()
