"""reconcile: what was produced, what each group has consumed of it, and what lies in its dead letters.

    python -m tfmq.spark.pipelines.reconcile --servers broker:8367 --dead-letters /var/lib/billing/dead.db

docs/pipelines.md says what adds up and what does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import click

from tfmq.admin import Admin
from tfmq.cli.output import counted, did_you_mean, printable
from tfmq.cli.values import Duration
from tfmq.client.connection.connection import SECONDS
from tfmq.dead_letters.admin import Desk, default_stores
from tfmq.dead_letters.model import REDRIVEN, Letter, Selection
from tfmq.errors import TfmqError
from tfmq.spark.logs import Address, open_logs
from tfmq.spark.pipelines.address import broker_of
from tfmq.spark.pipelines.command import Job, leave, pipeline_options
from tfmq.spark.pipelines.reconcile_letters import inquire, inquiries
from tfmq.spark.pipelines.reconcile_rows import WRONG, Balance, Fault, Kept, Row, Standing, balance
from tfmq.spark.pipelines.tasks import SparkTasks

UNBALANCED: Final = 4
"""The exit code where something is wrong."""
ROW_COLUMNS: Final = (
    "group", "topic", "partition", "produced", "there", "consumed", "lag", "handled", "waiting", "dead", "settled",
)  # fmt: skip
FAULT_COLUMNS: Final = ("weight", "group", "topic", "partition", "text")


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.reconcile --group billing",
)
@click.option(
    "--servers", "brokers", metavar="HOST:PORT", multiple=True, help="A broker; several by repeating it."
)
@click.option(
    "--group", "groups", metavar="NAME", multiple=True, help="Only this group; several by repeating it."
)
@click.option(
    "--dead-letters", "stores", metavar="STORE", multiple=True,
    help="A path, a SQLAlchemy URL or topic:NAME, as `dead_letters=` of a consumer [this user's own stores].",
)  # fmt: skip
@click.option(
    "--timeout", type=Duration(), default=SECONDS, show_default=True, help="How long a broker may be away."
)
@pipeline_options("reconcile")
def reconcile(
    brokers: tuple[str, ...], groups: tuple[str, ...], stores: tuple[str, ...], timeout: float, job: Job
) -> int:
    """Compare what was produced with what groups consumed and with their dead letters.

    Exit code 0: it adds up; 4: it does not.
    """
    addresses = [Address(broker_of(broker)) for broker in dict.fromkeys(brokers or (None,))]
    with ExitStack() as stack:
        tasks = SparkTasks(lambda: stack.enter_context(job.spark()))
        found = reconciled(addresses, groups, stores or default_stores(), timeout, tasks, job)
    tell(job, found)
    return UNBALANCED if any(fault.weight == WRONG for fault in found.faults) else 0


def reconciled(
    addresses: Sequence[Address],
    groups: Sequence[str],
    stores: Sequence[str],
    timeout: float,
    tasks: SparkTasks,
    job: Job,
) -> Balance:
    """The balance of all groups, or of those that are named, in these brokers together with these stores."""
    standings: list[Standing] = []
    incarnations: dict[int, str] = {}
    servers = [str(address.servers) for address in addresses]
    for broker in servers:
        with Admin(broker, timeout=timeout) as admin:
            standings += standings_of(admin, broker, groups)
            incarnations |= {topic.incarnation: topic.name for topic in admin.topics()}
    check_groups(groups, standings, servers, timeout)
    kept = [letter for store in stores for letter in letters_of(store, servers[0], groups)]
    found = balance(standings, kept, incarnations)
    asked = []
    for address in addresses if kept else ():
        with open_logs(address) as logs:
            there = [log for topic in logs.topics() for log in logs.partitions(topic)]
            asked += inquiries(address, there, kept)
    with job.progress("reading letters' messages", None) as progress:
        for faults in tasks(inquire, asked, progress, "reconcile"):
            found.faults.extend(faults)
    return found


def standings_of(admin: Admin, broker: str, groups: Sequence[str]) -> Iterator[Standing]:
    """Where the groups, or those that are named, stand in each partition. What is read first is the older: what a
    group has consumed is never more than what was produced."""
    names = [each.group for each in admin.groups() if not groups or each.group in groups]
    places = {name: admin.group(name).offsets for name in sorted(names)}
    topics: dict[str, Any] = {}
    for name, rows in places.items():
        for row in rows:
            topic = row["topic"]
            if topic not in topics:
                topics[topic] = admin.topic(topic)
            partition = topics[topic].partitions[row["partition"]]
            moved = row["end_offset"] != partition.end_offset
            lag = row["lag"]
            if moved and lag >= 0 and row["offset"] >= 0:
                lag += (
                    partition.end_ordinal - admin.locate(topic, row["partition"], row["end_offset"]).ordinal
                )
            elif row["offset"] < 0:
                lag = partition.messages
            yield Standing(
                broker, name, topic, topics[topic].incarnation, row["partition"], partition.first_offset,
                partition.end_offset, partition.first_ordinal, partition.end_ordinal, row["offset"], lag,
            )  # fmt: skip


def check_groups(
    groups: Sequence[str], standings: Sequence[Standing], servers: Sequence[str], timeout: float
) -> None:
    """Raises TfmqError for a group that no broker has."""
    known: list[str] = []
    missing = sorted(set(groups) - {each.group for each in standings})
    if missing:
        for broker in servers:
            with Admin(broker, timeout=timeout) as admin:
                known += [each.group for each in admin.groups()]
    for name in missing:
        if name not in known:
            raise TfmqError(f"There is no group {name!r}.{did_you_mean(name, known)}", outcome="not done")


def letters_of(store: str, servers: str, groups: Sequence[str]) -> Iterator[Kept]:
    """The letters of a store. Raises TfmqError where there is none."""
    with Desk(store, servers) as desk:
        desk.check()
        for name in groups or (None,):
            for letter in desk.letters(Selection(group=name)):
                yield kept_of(desk.name, letter)


def kept_of(store: str, letter: Letter) -> Kept:
    """What matters of a letter."""
    sent = None
    journey = letter.journey
    if journey is not None and letter.state == REDRIVEN and letter.sent_offset >= 0:
        id = journey.producer_id << 24 | journey.sequence
        sent = journey.topic, journey.incarnation, journey.partition, letter.sent_offset, id
    return Kept(
        store, letter.id, letter.group, letter.topic, letter.incarnation, letter.partition, letter.offset,
        letter.ordinal, letter.message_id, letter.state, sent,
    )  # fmt: skip


def tell(job: Job, found: Balance) -> None:
    """JSON, or two tables."""
    if job.output.json:
        job.output.object(found.object())
        return
    job.output.rows([_shown(row) for row in found.rows], ROW_COLUMNS, "no group has a place anywhere yet")
    if found.faults:
        job.output.rows([_shown(fault) for fault in found.faults], FAULT_COLUMNS, "")
    wrong = sum(fault.weight == WRONG for fault in found.faults)
    job.output.say(f"{counted(wrong, 'thing')} not adding up" if wrong else "everything adds up")


def _shown(row: Row | Fault) -> dict[str, Any]:
    """For a terminal: a store of letters is a file of somebody, and may hold any text as a name."""
    return {
        name: printable(value) if isinstance(value, str) else value for name, value in row._asdict().items()
    }


if __name__ == "__main__":
    leave(reconcile, "reconcile")
