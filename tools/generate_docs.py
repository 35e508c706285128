"""Writes what the pages say of the code from the code itself: `python tools/generate_docs.py [--check]`.

A page holds generated parts between `<!-- generated: NAME -->` and `<!-- end of generated -->`; the rest is
written by hand and left alone. conf/server.toml is generated whole, and so is tests/planted-bugs.md, which keeps the
results of the runs that tried the bugs (`python -m tools.mutants --markdown`). `--check` writes nothing, names what is
stale, exits 1.
"""

import argparse
import json
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from journal.record.block_trailer import BlockTrailer, encode_trailer  # noqa: E402
from journal.record.format import make_record  # noqa: E402
from tfmq import limits  # noqa: E402
from tfmq.bounded_msgpack import pack  # noqa: E402
from tfmq.errors import CLASSES  # noqa: E402
from tfmq.protocol import commands  # noqa: E402
from tfmq.protocol.commands import COMMANDS, RESERVED  # noqa: E402
from tfmq.protocol.delayed_handle import Handle, format_handle  # noqa: E402
from tfmq.protocol.frames import encode  # noqa: E402
from tfmq.protocol.schema import Record  # noqa: E402
from tfmq.server import survey  # noqa: E402
from tfmq.server.metrics import METRICS  # noqa: E402
from tfmq.settings_table import RELOADED, SETTINGS, TOPIC_KEYS  # noqa: E402
from tfmq.spark.options import OPTIONS, Side  # noqa: E402
from tools.cli_reference import cli_reference, pipelines_reference  # noqa: E402
from tools.mutants import page as planted_bugs  # noqa: E402
from tools.mutants.bugs import BUGS  # noqa: E402

PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end of generated -->)", re.DOTALL)


def table(head: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    cells = [list(head), *([str(cell) for cell in line] for line in lines)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in cells)


# The protocol


def kinds(row: Record) -> str:  # type: ignore[type-arg]
    """`name` kind = default, for each field."""
    parts = []
    for name, kind in zip(row.names, row.kinds, strict=True):
        default = f" = {shown(row.defaults[name])}" if name in row.defaults else ""
        parts.append(f"`{name}` {kind.text}{default}")
    return "; ".join(parts) or "(none)"


def shown(value: object) -> str:
    """A default as the wire has it; of bytes only the empty ones are one."""
    if value == b"":
        return "empty"
    return "nil" if value is None else json.dumps(value)


def command_list() -> str:
    """Every command with its fields."""
    out = []
    for command in COMMANDS:
        out.append(f"**{command.name} = {command.code}** {' '.join(command.description.split())}\n\n")
        body = f"; body: {command.body}" if command.body else ""
        reply_body = f"; body: {command.reply_body}" if command.reply_body else ""
        out.append(f"- request: {kinds(command.request)}{body}\n")
        out.append(f"- reply: {kinds(command.reply)}{reply_body}\n\n")
    return "".join(out)


def row_list() -> str:
    """The arrays inside lists."""
    shapes = [each for each in vars(commands).values() if isinstance(each, type) and issubclass(each, tuple)]
    whole = {record.shape for command in COMMANDS for record in (command.request, command.reply)}
    shapes = [each for each in shapes if each.__module__ == commands.__name__ and each not in whole]
    return "".join(f"- {shape.__name__}: {kinds(Record(shape))}\n" for shape in shapes)


def reserved_list() -> str:
    """Codes kept for later."""
    return table(
        ("codes", "kept for"), ((f"{codes.start}..{codes.stop - 1}", what) for codes, what in RESERVED.items())
    )


def hexadecimal(buffers: Iterable[object], width: int = 32) -> str:
    """Bytes as lines of hexadecimal digits."""
    data = b"".join(bytes(each) for each in buffers)  # type: ignore[call-overload]
    return "\n".join(f"    {data[start : start + width].hex(' ')}" for start in range(0, len(data), width))


PRODUCER_ID, INCARNATION = 7, 5


def example_record() -> bytes:
    """One record: sequence 0 of producer 7, payload hello, no attribute."""
    return make_record(b"hello", PRODUCER_ID << 24)


def produce_example() -> str:
    """A PRODUCE and its reply, byte by byte."""
    record = example_record()
    request = commands.Produce(
        "orders", INCARNATION, 0, PRODUCER_ID, 0, 1, 2, [commands.Block(len(record), 1, zlib.crc32(record))]
    )
    header = (21, 9, *request)
    size, header_size = struct.unpack(">II", bytes(encode(header, record)[0])[:8])
    reply = commands.ProduceReply([commands.Position(0, 0)], 2, False, 1_763_700_000_000, 0)
    return (
        f"A PRODUCE with correlation 9: size {size}, header size {header_size}, header\n"
        f"`{json.dumps(header)}`, then the record (20 bytes of header, 5 of payload):\n\n"
        f"{hexadecimal(encode(header, record))}\n\n"
        f"Its reply: `{json.dumps((0, 9, *reply))}`\n\n{hexadecimal(encode((0, 9, *reply)))}\n"
    )


def transact_example() -> str:
    """A TRANSACT of two batches and its reply, byte by byte."""
    records = [make_record(payload, PRODUCER_ID << 24 | n) for n, payload in enumerate((b"hello", b"world!"))]
    batches = [
        commands.TransactionBatch(
            topic, INCARNATION + n, 0, n, 1, len(record), [commands.Block(len(record), 1, zlib.crc32(record))]
        )
        for n, (topic, record) in enumerate(zip(("orders", "bills"), records, strict=True))
    ]
    header = (57, 11, *commands.Transact(PRODUCER_ID, 1, batches, []))
    reply = (0, 11, *commands.TransactReply("committed", 42, 0, [1200, -1], False))
    return (
        f"Transaction 1 of the stream {PRODUCER_ID} sends a record to `orders` and the next one to `bills`:\n"
        f"`{json.dumps(header)}`\n\n{hexadecimal(encode(header, *records))}\n\n"
        f"Its reply: `{json.dumps(reply)}`\n\n{hexadecimal(encode(reply))}\n"
    )


def delayed_example() -> str:
    """A handle and what it is made of."""
    handle = Handle(0x1234_5678_9ABC_DEF0, INCARNATION << 24, 1_763_700_030_000, 41)
    return (
        f"Store {handle.store_id:#x}, log id {handle.log_id:#x}, due {handle.due}, number {handle.number}:\n\n"
        f"    {format_handle(handle)}\n"
    )


def fetch_example() -> str:
    """A FETCH from offset 0 and its reply, byte by byte."""
    record, log_id = example_record(), INCARNATION << 24
    control = encode_trailer(log_id, BlockTrailer(1, len(record), zlib.crc32(record), 1_763_700_000_000, 0, 0, 0, 0))
    end = len(record) + len(control)
    header = (30, 10, *commands.Fetch("orders", INCARNATION, 0, 0, -1, 262_144, 500))
    reply = (0, 10, *commands.FetchReply(0, 0, end, 0, end, end, 0, log_id, 1))
    return (
        f"A FETCH of the same partition from offset 0, which waits up to 500 ms:\n`{json.dumps(header)}`\n\n"
        f"{hexadecimal(encode(header))}\n\n"
        f"Its reply: `{json.dumps(reply)}`, and as its body the record and the block trailer that closes it:\n\n"
        f"{hexadecimal(encode(reply, record, control))}\n"
    )


# Errors, limits, configuration


def error_table() -> str:
    """Every error, one line each."""
    return table(
        ("code", "number", "class", "retriable", "outcome", "closes", "what happened", "what to do"),
        (
            (
                f"`{each.code}`",
                each.number,
                f"`{each.__name__}`",
                "yes" if each.retriable else "no",
                each.outcome,
                "yes" if each.closes else "",
                each.happened,
                each.advice,
            )
            for each in CLASSES
        ),
    )


def reloaded(key: str) -> str:
    """Whether a change of the key takes effect on SIGHUP."""
    return "yes" if key in RELOADED else "restart"


def limit_table() -> str:
    """Every limit, one line each."""
    return table(
        ("limit", "default", "at most", "unit", "why", "told in HELLO", "SIGHUP"),
        (
            (
                f"`{name}`",
                f"{int(limit):,}",
                f"{limit.cap:,}" if limit.configurable else "fixed",
                limit.unit,
                limit.reason,
                "yes" if limit.sent else "",
                reloaded(f"limits.{name}") if limit.configurable else "",
            )
            for name, limit in limits.ALL.items()
        ),
    )


def setting_table() -> str:
    """Every key but the limits, which are in docs/limits.md, one line each."""
    return table(
        ("key", "default", "takes", "what it does", "per topic", "SIGHUP"),
        (
            (
                f"`{key}`",
                f"`{toml(default)}`",
                setting.kind.text,
                setting.line,
                "yes" if key in TOPIC_KEYS else "",
                reloaded(key),
            )
            for key, (setting, default) in SETTINGS.items()
            if not key.startswith("limits.")
        ),
    )


def metric_table() -> str:
    """Every metric, one line each."""
    return table(
        ("name", "type", "labels", "meaning"),
        ((f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.meaning) for m in METRICS),
    )


def metric_limits() -> str:
    """How many series there are at most."""
    return (
        f"Series with the label `topic` alone are exported for the {survey.TOPIC_SERIES_MAX} topics with most bytes,"
        f" those of groups for {survey.GROUP_SERIES_MAX} groups, or pairs of group and topic, and the lag for"
        f" {survey.OFFSETS_MAX:,} offsets (one for each partition of a group). Sums without labels have everything."
        " `tfmq_left_out` tells what is missing.\n"
    )


def spark_options(where: Side) -> str:
    """Every option of the Spark source or sink, one line each."""
    queries = {"batch": "batch", "stream": "stream", "both": ""}
    return table(
        ("option", "takes", "default", "only", "what it does"),
        (
            (f"`{each.name}`", each.accepts, each.default, queries[each.query], each.meaning)
            for each in OPTIONS
            if each.side in (where, "both")
        ),
    )


def toml(value: object) -> str:
    """A value as TOML writes it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def server_toml() -> str:
    """The whole of conf/server.toml."""
    lines = [
        "# The configuration of tfmq-server: every key with its default. `tfmq-server --config server.toml`.",
        "# --set SECTION.KEY=VALUE and TFMQ_SECTION_KEY come before this file; `--check-config` shows the result.",
        '# Sizes may be written as "64MiB", times as "10s", "5min", "7d".',
    ]
    section = ""
    for key, (setting, default) in SETTINGS.items():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"[{section}]"]
        lines.append(f"{key.split('.')[1]} = {toml(default)}  # {setting.line}")
    lines += [
        "",
        "# A topic can have keys of its own:",
        "#",
        '# [topic."orders"]',
        '# retention.seconds = "7d"',
        "# flush.messages = 1",
    ]
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "cli": cli_reference,
    "pipelines": pipelines_reference,
    "commands": command_list,
    "rows": row_list,
    "reserved": reserved_list,
    "produce-example": produce_example,
    "delayed-example": delayed_example,
    "fetch-example": fetch_example,
    "transact-example": transact_example,
    "errors": error_table,
    "limits": limit_table,
    "settings": setting_table,
    "metrics": metric_table,
    "metric-limits": metric_limits,
    "spark-source": lambda: spark_options("source"),
    "spark-sink": lambda: spark_options("sink"),
    "hello-limits": lambda: ", ".join(f"`{n}`" for n in limits.limits_to_send({})) + "\n",
    "hello": lambda: hexadecimal(encode((1, 0, "TFMQ", 1, 1, "example", {}))) + "\n",
    "attribute": lambda: hexadecimal([pack({1: 1_763_700_000_000, 2: "42", 3: "new"})]) + "\n",
}


def filled(page: str) -> str:
    """The page with its generated parts made anew. Raises `KeyError` for a part of an unknown name."""
    return PART.sub(lambda found: found[1] + "\n" + PARTS[found[2]]() + "\n" + found[4], page)


def outputs() -> dict[Path, str]:
    """Every file with generated parts -> what it should hold."""
    pages = {path: path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
    found = {path: filled(text) for path, text in pages.items() if "<!-- generated: " in text}
    results = planted_bugs.results_in(planted_bugs.PAGE.read_text()) if planted_bugs.PAGE.exists() else {}
    found[planted_bugs.PAGE] = planted_bugs.text(BUGS, results)
    return {**found, ROOT / "conf" / "server.toml": server_toml()}


def main() -> int:
    """Writes what is stale, or with --check names it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is stale")
    only_check = parser.parse_args().check
    stale = {path: text for path, text in outputs().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        name = path.relative_to(ROOT)
        print(f"{name} is stale: run make docs" if only_check else f"wrote {name}")
        if not only_check:
            path.write_text(text)
    return 1 if stale and only_check else 0


if __name__ == "__main__":
    sys.exit(main())
