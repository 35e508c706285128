"""`python -m tools.rigs.power_cut`: cut the power of a real file system under a writer, many times, and count
losses.

An ext4 image on a loop device is mounted, a process writes logs on it and says what was acknowledged, the
file system is shut down without a flush at a random moment, mounted again, the logs are opened and read from
end to end.

Exit code 0: every promise held. 1: one was broken. 77: this machine cannot (not root, no loop devices); it
says why.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import click
from rich.console import Console
from rich.table import Table

from journal.log.log import Log
from journal.record.block import blocks_of
from journal.record.format import records_of
from tools.rigs import writers
from tools.rigs.loop_image import LoopImage, Unavailable, require_loop_devices
from tools.rigs.writers import SYNCED, Word, Writer, words

SKIPPED = 77
JOINT_LOGS = 4
CUTS_PER_GENERATION = 20
"""Then new logs are begun, so that a log is not read over and over as it grows."""
DELAY_SECONDS_MAX = 0.03
"""The power goes so long after the first promise, at most."""
FLUSH_MESSAGES = 50
FLUSH_SECONDS = 0.02
NEVER = 10**9
HEADER_BYTES = 20
TABLE_WIDTH = 132


@dataclass
class Result:
    """What one way of writing went through. `lost_synced` counts logs that lost what was acknowledged as
    synced.

    `lost_written_max` is the most records that one cut took from those acknowledged as written; `age_ms_max`
    the age of the oldest of them at the cut; `allowed` says what may be lost.
    """

    method: str
    allowed: str
    cuts: int = 0
    acknowledged: int = 0
    lost_synced: int = 0
    lost_written_max: int = 0
    span_ms_max: float = 0.0
    broken: int = 0
    torn: int = 0
    seconds: float = 0.0
    first_failure: str = ""

    def fail(self, sentence: str) -> None:
        self.broken += 1
        self.first_failure = self.first_failure or f"cut {self.cuts}: {sentence}"


@dataclass(frozen=True)
class Way:
    """A way of writing: what the process does, how many logs it has, what may be lost."""

    name: str
    allowed: str
    write: Callable[[str, int, int], None]
    logs: int = 1
    records_lost_max: int = 0
    seconds_lost_max: float = 0.0


WAYS = (
    Way("fdatasync", "nothing", writers.write_with_fdatasync),
    Way(
        "syncfs, 4 logs", "nothing",
        partial(writers.write_with_syncfs, logs=JOINT_LOGS), logs=JOINT_LOGS,
    ),
    Way(
        f"flush after {FLUSH_MESSAGES} messages", f"{FLUSH_MESSAGES} messages",
        partial(writers.write_without_waiting, messages=FLUSH_MESSAGES, seconds=NEVER),
        records_lost_max=FLUSH_MESSAGES,
    ),
    Way(
        f"flush after {FLUSH_SECONDS * 1000:.0f} ms", f"{FLUSH_SECONDS * 1000:.0f} ms and a force",
        partial(writers.write_without_waiting, messages=NEVER, seconds=FLUSH_SECONDS),
        records_lost_max=NEVER, seconds_lost_max=FLUSH_SECONDS,
    ),
)  # fmt: skip


def run_way(way: Way, cuts: int, generator: random.Random) -> Result:
    """Cuts the power so many times. Raises Unavailable."""
    result = Result(way.name, way.allowed)
    began = time.monotonic()
    with LoopImage() as image:
        for number in range(cuts):
            generation, age = divmod(number, CUTS_PER_GENERATION)
            if generation and not age:
                for log_number in range(way.logs):
                    shutil.rmtree(writers.log_folder(image.mount_point, generation - 1, log_number))
            writer = Writer(partial(way.write, image.mount_point, generation))
            first = writer.wait_for_word()
            time.sleep(generator.uniform(0, DELAY_SECONDS_MAX))
            cut_at = time.monotonic()
            image.cut()
            # The file system says "ok" to forces for about a millisecond after its shutdown has begun: nobody would
            # have heard such a promise if it had been the power, so it does not count.
            promised = [word for word in words(first + writer.end()) if word.time < cut_at]
            image.mount_again()
            result.cuts += 1
            result.acknowledged += len(promised)
            for log_number in range(way.logs):
                _check_log(image, way, generation, log_number, promised, result)
    result.seconds = time.monotonic() - began
    return result


def _check_log(image: LoopImage, way: Way, generation: int, number: int, promised: list[Word], result: Result) -> None:
    log = writers.open_log(image.mount_point, generation, number)
    try:
        mine = [word for word in promised if word.log == number]
        synced = max((word.end for word in mine if word.kind == SYNCED), default=0)
        if log.end_offset < synced:
            result.lost_synced += 1
            result.fail(f"log {number} ends at {log.end_offset}, acknowledged as synced up to {synced}")
        _check_written(log, way, mine, result)
        _check_contents(log, result)
        result.torn += log.recovery.cut_bytes > 0
    finally:
        log.close()


def _check_written(log: Log, way: Way, mine: list[Word], result: Result) -> None:
    lost = [word for word in mine if word.end > log.end_offset and word.kind != SYNCED]
    if not lost:
        return
    records = mine[-1].records - log.end_ordinal
    span = lost[-1].time - lost[0].time
    result.lost_written_max = max(result.lost_written_max, records)
    result.span_ms_max = max(result.span_ms_max, span * 1000)
    if records > way.records_lost_max:
        result.fail(f"{records} records are lost, {way.records_lost_max} may be")
    # The writer looks at the clock between appends: it may be late by its longest pause.
    if way.seconds_lost_max and span > way.seconds_lost_max + lost[-1].pause:
        result.fail(f"records of {span * 1000:.0f} ms are lost")


def _check_contents(log: Log, result: Result) -> None:
    """Reads the log from end to end: every record is the one that was sent, none is missing or doubled."""
    if log.damage or log.stopped:
        result.fail(f"damage {log.damage}, stopped {log.stopped}")
        return
    offset, sequence = log.first_offset, 0
    while (chunk := log.read(offset, 1 << 20)).data:
        for block in blocks_of(chunk.data, chunk.start, log.log_id):
            for record in records_of(block.data):
                payload = bytes(block.data[record.position + HEADER_BYTES : record.position + record.size])
                if payload != writers.payload_of(sequence):
                    result.fail(f"record {sequence} holds {payload[:40]!r}")
                    return
                sequence += 1
        offset = chunk.next
    if sequence != log.end_ordinal:
        result.fail(f"{sequence} records can be read, {log.end_ordinal} are counted")


def table(results: list[Result]) -> Table:
    view = Table(
        "writes with", "may lose", "power cuts", "acknowledged", "synced lost", "written lost, most",
        "over ms", "torn tails", "broken", "ms a cut",
    )  # fmt: skip
    for r in results:
        view.add_row(
            r.method, r.allowed, str(r.cuts), str(r.acknowledged), str(r.lost_synced), str(r.lost_written_max),
            f"{r.span_ms_max:.0f}", str(r.torn), str(r.broken), f"{1000 * r.seconds / max(1, r.cuts):.0f}",
        )  # fmt: skip
    return view


@click.command(epilog="Example: sudo python -m tools.rigs.power_cut --cuts 1000 --only fdatasync")
@click.option("--cuts", default=200, show_default=True, help="Power cuts for each way of writing.")
@click.option("--seed", default=0, show_default=True, help="Of the moments at which the power goes.")
@click.option("--only", default="", help="Only ways with this in their name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(cuts: int, seed: int, only: str, as_json: bool) -> None:
    """Cut the power of a real file system under a writer, and count what is lost."""
    chosen = [way for way in WAYS if only in way.name]
    if not chosen:
        raise click.UsageError(f"no way of writing has {only!r} in its name")
    try:
        require_loop_devices()
        results = [run_way(way, cuts, random.Random(f"{seed}/{way.name}")) for way in chosen]
    except Unavailable as reason:
        click.echo(f"power cuts cannot be tried here: {reason}", err=True)
        sys.exit(SKIPPED)
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results], indent=1))
    else:
        Console(width=TABLE_WIDTH).print(table(results))
        for result in results:
            if result.first_failure:
                click.echo(f"{result.method}: {result.first_failure}", err=True)
    sys.exit(1 if any(result.broken for result in results) else 0)


if __name__ == "__main__":
    main()
