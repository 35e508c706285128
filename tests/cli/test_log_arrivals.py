"""`tfmq log dump` says what a note says: for which messages it is, when they are due, which are cancelled."""

from __future__ import annotations

import json
from array import array
from functools import partial
from pathlib import Path

import pytest

from journal import Log, RealDisk, SystemClock
from journal.record.batch import Batch, split_blocks
from journal.record.format import make_id, make_record
from tests.cli.conftest import Cli
from tfmq.cli.output import time_text
from tfmq.delay.arrivals import header
from tfmq.delay.arrivals.header import TurnColumns
from tfmq.delay.arrivals.log import LOG_ID, arrival_batches, arrival_options, header_batch
from tfmq.delay.due_time import due_times_of

DUE = 1_700_000_060_000


@pytest.fixture
def arrivals(tmp_path: Path) -> Path:
    """A batch of two, one of them given another turn, the other cancelled, and a record that is no note."""
    folder = tmp_path / "delay" / "arrivals"
    folder.mkdir(parents=True)
    log = Log.open(
        RealDisk(), str(folder), log_id=LOG_ID, clock=SystemClock(), options=arrival_options(1, 1.0)
    )
    records = [make_record(b"message %d" % n, make_id(70, n)) for n in range(2)]
    body = b"".join(records)
    made = header.arrival_header(
        0x1000_0001, "orders", due_times_of(array("Q", (DUE, DUE + 1500)), b"\x00\x01"), len(body)
    )
    log.append(arrival_batches(made, body, split_blocks(body), 70, 0, 2))
    moved = due_times_of(array("Q", (DUE + 9000,)), b"\x00")
    old = TurnColumns(array("Q", (DUE,)), array("Q", (1,)))
    again = header.reschedule_header(0x1000_0001, "orders", moved, len(records[0]), old)
    log.append([header_batch(again), Batch(records[0], (), 70, 0, 1)])
    log.append([header_batch(header.cancel_header(TurnColumns(array("Q", (DUE + 1500,)), array("Q", (2,)))))])
    log.append([Batch(make_record(b"no note", header.HEADER_ID), (), 2, 0, 1)])
    log.close()
    return folder


def test_a_person_reads_what_a_note_says(offline: Cli, arrivals: Path) -> None:
    at = partial(time_text, exact=True)
    lines = offline("log", "dump", str(arrivals)).lines
    assert [line.split("arrival: ")[1] for line in lines if "arrival: " in line] == [
        f"arrival of 2 messages for orders, due {at(DUE)} to {at(DUE + 1500)}",
        f"reschedule of 1 message for orders, due {at(DUE + 9000)} instead of 1 message, the first with number 1",
        "cancel of 1 message, the first with number 2",
    ]
    assert [line.split()[-1] for line in lines if "message 0" in line or "no note" in line] == [
        "0",
        "0",
        "note",
    ]


def test_a_program_reads_it_too(offline: Cli, arrivals: Path) -> None:
    rows = [json.loads(line) for line in offline("log", "dump", str(arrivals), "--json").lines]
    assert [(row["kind"], row["ordinal"]) for row in rows] == [
        ("note", 0), ("record", 1), ("record", 2), ("note", 3), ("record", 4), ("note", 5), ("record", 6),
    ]  # fmt: skip
    first, again, cancel = (row for row in rows if row["kind"] == "note")
    assert {key: first[key] for key in ("what", "topic", "count", "first_due", "last_due", "absolute")} == {
        "what": "arrival", "topic": "orders", "count": 2, "first_due": DUE, "last_due": DUE + 1500, "absolute": 1,
    }  # fmt: skip
    assert (again["what"], again["cancelled"]) == ("reschedule", [[DUE, 1]])
    assert (cancel["what"], cancel["cancelled"]) == ("cancel", [[DUE + 1500, 2]])
