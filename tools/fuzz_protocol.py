"""Feeds wrong bytes to everything that reads the wire: frames, headers, requests, replies, attributes.

Held: a reader gives values or raises its one error (`BadFrame`, `BadRequest` or `NotSupported`,
`DecodeFailed`); never another exception; cutting the bytes elsewhere changes nothing; no memory above what
the bytes themselves take and a fixed allowance.

    python tools/fuzz_protocol.py --plain --runs 100000 --seed 1       mutations of known frames, no extra
    package python tools/fuzz_protocol.py --runs 1000000 CORPUS                coverage-guided; needs `pip
    install atheris`

A failure prints the seed and the bytes; `--bytes HEX` tries those again.
"""

import argparse
import importlib
import random
import struct
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tfmq.errors import BadFrame, BadRequest, DecodeFailed, NotSupported
from tfmq.message import decode_attribute, encode_attribute
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_CODE, COMMANDS
from tfmq.protocol.frames import Decoder, Frame, encode

FRAME_BYTES = 64 << 10
MEMORY_ALLOWANCE = 4 << 20
INTERESTING = (0, 1, 7, 8, 0x7F, 0x80, 0x90, 0xC1, 0xDC, 0xDD, 0xDF, 0xDB, 0xC6, 0xFF)


def frames_of(pieces: Sequence[bytes]) -> list[Frame] | None:
    """The frames of a stream that arrives in `pieces`; None where it is refused."""
    decoder, found = Decoder(FRAME_BYTES), []
    try:
        for piece in pieces:
            found += decoder.feed(piece)
    except BadFrame:
        return None
    return found


def check_fields(header: list[object]) -> None:
    """A header's fields as every command's request and reply: read or refused."""
    code = header[0]
    chosen = [BY_CODE[code]] if isinstance(code, int) and code in BY_CODE else COMMANDS
    for command in chosen:
        for row in (command.request, command.reply):
            try:
                row.decode(list(header), command.name, 2)
            except (BadRequest, NotSupported) as error:
                if len(str(error)) > 1000:
                    raise ValueError("the sentence repeats what a stranger sent") from error


def try_bytes(data: bytes) -> None:
    """One input through every reader. Raises whatever they should not raise."""
    whole = frames_of([data])
    for cut in {1, 4, 7, 8, 9, len(data) // 2, len(data) - 1}:
        parts = frames_of([data[:cut], data[cut:]])
        if (whole is None) != (parts is None):
            raise ValueError(f"cut at {cut} another verdict")
        if whole is not None and parts is not None and not _same(whole, parts):
            raise ValueError(f"cut at {cut} other frames")
    for frame in whole or ():
        check_fields(frame.header)
    for attribute in (data, data[8:]):
        try:
            decode_attribute(attribute)
        except DecodeFailed:
            continue


def _same(one: list[Frame], other: list[Frame]) -> bool:
    return [repr(each.header) for each in one] == [repr(each.header) for each in other] and [
        bytes(each.body) for each in one
    ] == [bytes(each.body) for each in other]


def try_with_memory(data: bytes) -> None:
    """The same, and no more memory than the bytes explain."""
    tracemalloc.start()
    try:
        try_bytes(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MEMORY_ALLOWANCE + 20 * len(data):
        raise MemoryError(f"{len(data)} bytes made it take {peak}")


def corpus() -> list[bytes]:
    """Known good inputs: a request and a reply of every command, an error, an attribute, HELLO."""
    requests: list[tuple[object, ...]] = [
        (21, 9, *commands.Produce("orders", 5, 0, 7, 0, 1, 2, [commands.Block(25, 1, 77)])),
        (21, 9, *commands.Produce("orders", 5, 0, 7, 0, 2, 2, [commands.Block(25, 2, 77)], b"\x80" + bytes(15))),
        (0, 9, [], 2, False, 5, -1, [7, 9, 100, bytes(16)]),
        (62, 9, *commands.ListDelayed("orders", 3, b"\xff", 5, 6, "d" * 59, 10)),
        (64, 9, *commands.DelayedHistogram("orders", [0, 10, 1 << 62])),
        (30, 10, *commands.Fetch("orders", 5, 0, 0, -1, 262_144, 500, 0, [1, 2])),
        (1, 0, "TFMQ", 1, 1, "client", {"a": [1, {"b": None}]}),
        (43, 2, "g", "m", 4, [["t", 1, 0, 100, 0, -1]]),
        (10, 3, ["a", "b"], True),
        (0, 4, [["t", 5, [[0, "open"]], {"flush.messages": 1}]]),
        (-7, 5, "damaged", "not done", "sentence", {"first": 1, "next": 2}),
    ]
    requests += transactions()
    requests += [(command.code, 1, *([0] * len(command.request.names))) for command in COMMANDS]
    frames = [b"".join(map(bytes, encode(header, b"body" * 10))) for header in requests]
    attribute = encode_attribute(1_763_700_000_000, b"key", "tag", {"n": "1"}, 3)
    bomb = b"\xdd\x00\x00\xff\xff" * 2000
    return [*frames, frames[0] + frames[1], attribute, struct.pack(">II", 4 + len(bomb), len(bomb)) + bomb]


def transactions() -> list[tuple[object, ...]]:
    """Headers of transactions with everything that nests in them, and what is answered to them."""
    member = commands.CommitMember("query", 3, "run-1")
    offsets = [commands.TransactionOffsets("g", "m", 4, [commands.GroupOffset("t", 1, 0, 100)])]
    batch = commands.TransactionBatch("orders", 5, 0, 0, 1, 20, [commands.Block(20, 1, 77)])
    names = [commands.TransactionName("order-42", 9), commands.TransactionName("order-43", 1 << 40)]
    row = {"xid": "order-42", "epoch": 9, "state": "prepared", "topics": ["orders"], "age_seconds": 1.5}
    produce = commands.Produce("orders", 5, 0, 7, 0, 1, 2, [commands.Block(25, 1, 77)], None, 9)
    return [
        (21, 1, *produce),
        (50, 2, *commands.BeginTransaction(7, 1, "order-42", 60_000, "shop", member)),
        (51, 3, *commands.PrepareTransaction("order-42", 9, 86_400_000, offsets)),
        (52, 4, *commands.CommitTransaction("order-42", 9, True, False, offsets)),
        (53, 5, *commands.RollbackTransaction("order-42", 9, True)),
        (55, 6, *commands.ListTransactions(["open", "prepared"], 9, 100, "shop")),
        (57, 7, *commands.Transact(7, 2, [batch, batch], offsets)),
        (58, 8, *commands.AwaitChecks("shop", 60_000)),
        (80, 9, *commands.CommitGroup("query", 3, "run-1", names, 1000, True)),
        (81, 10, *commands.AbortCommitGroup("query", 3, "run-1")),
        (0, 6, [row, row], True),
        (0, 7, "committed", 9, 1, [0, -1, 1 << 60], False),
        (-35, 4, "heuristic_outcome", "not done", "sentence", {"state": "heuristic_committed"}),
    ]


def mutated(data: bytes, source: random.Random) -> bytes:
    """`data` with a few wounds: flipped, set, cut, doubled, swollen bytes, a new size word."""
    wounded = bytearray(data)
    for _ in range(source.randint(1, 6)):
        place = source.randrange(len(wounded)) if wounded else 0
        match source.randrange(6):
            case 0 if wounded:
                wounded[place] ^= 1 << source.randrange(8)
            case 1 if wounded:
                wounded[place] = source.choice(INTERESTING)
            case 2:
                del wounded[place : place + source.randint(1, 8)]
            case 3:
                wounded[place:place] = wounded[place : place + source.randint(1, 40)] * source.randint(1, 4)
            case 4:
                wounded[place:place] = source.randbytes(source.randint(1, 12))
            case _ if len(wounded) >= 8:
                header_size = source.randint(0, min(len(wounded) - 8, 200))
                wounded[:8] = struct.pack(">II", len(wounded) - 4, header_size)
    return bytes(wounded)


def plain(runs: int, seed: int) -> int:
    """The known inputs, then mutations of them; 1 at the first failure, which is printed, else 0."""
    source, known = random.Random(seed), corpus()
    for number in range(runs):
        data = known[number] if number < len(known) else mutated(source.choice(known), source)
        try:
            (try_with_memory if number % 50 == 0 else try_bytes)(data)
        except Exception as error:
            print(f"seed {seed}, run {number}: {type(error).__name__}: {error}\n--bytes {data.hex()}")
            return 1
    print(f"{runs} inputs, seed {seed}: nothing found")
    return 0


def guided(runs: int, folder: str | None) -> None:
    """Coverage-guided, by atheris."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or use --plain.")
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-runs={runs}", *([folder] if folder else [])], try_bytes)
    atheris.Fuzz()


def main() -> int:
    """The exit code: 1 if something was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", nargs="?", help="folder of inputs that atheris keeps")
    parser.add_argument("--plain", action="store_true", help="seeded mutations instead of coverage")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bytes", help="try these, in hexadecimal")
    options = parser.parse_args()
    if options.bytes:
        try_with_memory(bytes.fromhex(options.bytes))
        return 0
    if options.plain:
        return plain(options.runs, options.seed)
    guided(options.runs, options.corpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
