"""`tfmq dlq redrive`: stores one after the other, a bar on a terminal, and what became of it in one place."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli.output import Output, counted, printable, progress
from tfmq.errors import BadRequest, TfmqError

if TYPE_CHECKING:
    from tfmq.dead_letters.admin import Desk
    from tfmq.dead_letters.redrive import Report, Wish

NOT_DONE = 1


def redriven(desks: Sequence["Desk"], wish: "Wish", output: Output) -> int:
    """Redrive each store; the exit code. Raises what stopped it, once it is said how far it came."""
    from tfmq.dead_letters.redrive import Report

    total = Report()
    with progress(output, "redriving", None) as advance:
        for desk in desks:
            left = None if wish.limit is None else wish.limit - sum(total.targets.values()) + total.resumed
            if left is not None and left <= 0:
                break
            own = Report()
            try:
                desk.redrive(wish._replace(limit=left), advance, own)
            except TfmqError as error:
                add(total, own)
                tell(total, wish, output)
                if not wish.dry and not isinstance(error, BadRequest):
                    first = (
                        "run the same again" if error.retriable else "with that mended, run the same again"
                    )
                    output.say(f"it is not done: {first}, it goes on where it was")
                raise
            add(total, own)
    tell(total, wish, output)
    return NOT_DONE if total.unsure or total.unsendable or total.foreign else 0


def add(total: "Report", more: "Report") -> None:
    total.sent += more.sent
    total.resumed += more.resumed
    total.looping += more.looping
    total.unsendable += more.unsendable
    total.unsure += more.unsure
    for topic, number in more.targets.items():
        total.count(topic, number)
    total.broker = more.broker or total.broker
    for broker, number in more.foreign.items():
        total.foreign[broker] = total.foreign.get(broker, 0) + number


def tell(total: "Report", wish: "Wish", output: Output) -> None:
    """JSON, or sentences."""
    if output.json:
        row: dict[str, Any] = {"dry_run": wish.dry, "sent": total.sent, "resumed": total.resumed}
        row.update(targets=total.targets, passed_over=total.looping)
        row.update(unsendable=total.unsendable, unsure=total.unsure, foreign=total.foreign)
        output.object(row)
        return
    where = ", ".join(f"{number:,} to {printable(topic)}" for topic, number in sorted(total.targets.items()))
    word = "would be sent" if wish.dry else "sent"
    output.say(f"{counted(sum(total.targets.values()), 'dead letter')} {word}{f': {where}' if where else ''}")
    if total.resumed:
        output.say(f"{total.resumed:,} of these had been under way")
    if total.looping:
        output.say(
            f"{counted(total.looping, 'dead letter')} passed over: redriven {wish.loop_limit} times before and back"
            " again; look at them first (tfmq dlq show), or raise --loop-limit"
        )
    for broker, number in sorted(total.foreign.items()):
        of = (
            f"of the broker {printable(broker)}"
            if broker
            else "of an unknown broker, which an earlier release did not note"
        )
        click.echo(
            f"{counted(number, 'dead letter')} left, {of}: --servers is the broker {total.broker}; name that one's"
            " address, or --force sends them to this one",
            err=True,
        )
    for sentence in (*total.unsendable, *total.unsure):
        click.echo(printable(sentence), err=True)
