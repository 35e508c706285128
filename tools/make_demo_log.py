"""Writes the demo's text: the log of an imaginary web shop's day, 60,000 lines, the same bytes at every run.

Run: python tools/make_demo_log.py    (writes tools/demo_data/shop.log.gz)
"""

import gzip
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

LINES = 60_000
TARGET = Path(__file__).parent / "demo_data" / "shop.log.gz"

GOODS = "kettle teapot lantern hammock notebook compass blanket saddle whistle barometer harmonica basket".split()
TOWNS = "Aarhus Bergen Cork Delft Evora Ghent Hobart Izmir Jena Kyoto Lima Malmo Nantes Oulu Porto".split()
CARRIERS = "bicycle lorry barge train pigeon".split()


def second_of_day(random_source: random.Random) -> int:
    """Shoppers sleep at night and come back after supper."""
    while True:
        second = random_source.randrange(86_400)
        hour = second // 3600
        if random_source.random() < (0.1 if hour < 7 else 0.6 if hour < 18 else 1.0):
            return second


def event(random_source: random.Random) -> str:
    order, customer = random_source.randrange(10_000, 99_999), random_source.randrange(1, 4_000)
    goods, town = random_source.choice(GOODS), random_source.choice(TOWNS)
    price = random_source.randrange(199, 29_999) / 100
    kinds = (
        f"viewed customer={customer} item={goods} from={town} took={random_source.randrange(3, 420)}ms",
        f"basket customer={customer} item={goods} count={random_source.randrange(1, 5)} price={price:.2f}",
        f"ordered order={order} customer={customer} total={price:.2f} town={town}",
        f"paid order={order} amount={price:.2f} by={random_source.choice(('card', 'transfer', 'voucher'))}",
        f"shipped order={order} to={town} by={random_source.choice(CARRIERS)}",
        f"returned order={order} item={goods} reason={random_source.choice(('too loud', 'too small', 'late'))!r}",
        f"failed order={order} payment refused, try={random_source.randrange(1, 4)}",
    )
    return random_source.choices(kinds, (40, 20, 12, 10, 10, 2, 3))[0]


def lines(count: int = LINES, seed: int = 8367) -> Iterator[str]:
    """`count` log lines in order of time, numbered, so that every line is there once."""
    random_source = random.Random(seed)
    start = datetime(2026, 3, 14)
    for number, second in enumerate(sorted(second_of_day(random_source) for _ in range(count)), 1):
        yield f"{start + timedelta(seconds=second):%Y-%m-%dT%H:%M:%S} {number:06d} {event(random_source)}"


def main() -> None:
    text = "".join(f"{line}\n" for line in lines())
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{TARGET}: {LINES} lines, {len(text):,} bytes, {TARGET.stat().st_size:,} compressed")


if __name__ == "__main__":
    main()
