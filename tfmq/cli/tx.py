"""`tfmq tx`: transactions that wait for somebody, and ending them by hand."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli.output import Output, age_text, counted, output_options, printable, size_text
from tfmq.cli.transactions import (
    COLUMNS,
    described,
    every,
    everything,
    known_transaction,
    readable,
    row_of,
    xids,
)
from tfmq.cli.tx_groups import forget_group, groups
from tfmq.errors import ConnectionFailed, Damaged, TfmqError

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.models import TransactionDescription

STATES = (
    "open",
    "preparing",
    "prepared",
    "committing",
    "applying",
    "heuristic_committed",
    "heuristic_rolled_back",
)
OVER = ("committed", "rolled_back", "read_only")
"""Nobody decides these any more, so nothing is left to be forgotten of a decision that agrees."""
NOT_DONE, DAMAGE_FOUND = 1, 4
"""Exit codes."""
ROWS_SHOWN = 100
"""A person reads no more; programs get all."""


@click.group()
def tx() -> None:
    """Transactions: list, show, commit, rollback, forget; commit groups: groups, forget-group."""


tx.add_command(groups)
tx.add_command(forget_group)


# Looking


@tx.command(
    "list",
    epilog="\b\nExamples:\n  tfmq tx list\n  tfmq tx list --state open --group shop\n"
    "  tfmq tx list --json | jq -r .[].xid",
)
@click.option(
    "--state",
    "states",
    metavar="STATE",
    type=click.Choice(STATES),
    multiple=True,
    help=f"Only this state, of {', '.join(STATES)}; may be repeated.",
)
@click.option("-g", "--group", help="Only those of this producer group.")
@click.option(
    "--after", type=click.IntRange(min=0), default=0, help="List from the transaction after this epoch."
)
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=1),
    help=f"At most this many [{ROWS_SHOWN} in a table, all in JSON].",
)
@output_options
def list_command(
    states: tuple[str, ...], group: str | None, after: int, count: int | None, output: Output
) -> None:
    """List the transactions that wait for somebody: prepared, applying, or ended by hand."""
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        found = every(admin, states or None, group, after)
        if output.json:
            output.array(row_of(each) for each in islice(found, count))
            return
        most = count or ROWS_SHOWN
        rows = list(islice(found, most + 1))
        shown = rows[:most]
        output.rows([readable(each) for each in shown], COLUMNS, "no transaction waits for anybody")
        tell_alarm(output, admin, shown)
        tell_losses(output, shown)
    if len(rows) > most:
        output.say(f"there are more: tfmq tx list --after {shown[-1].epoch}")


def tell_alarm(output: Output, admin: "Admin", shown: "Sequence[TransactionDescription]") -> None:
    """Which of them are older than the operator wanted to be told; members of a commit group end by themselves."""
    prepared = [each for each in shown if each.state == "prepared" and not each.expires_ms]
    if not prepared or output.quiet:
        return
    limit = float(admin.status().get("settings", {}).get("transaction.alarm_seconds", 0))
    late = sum(each.age_seconds > limit for each in prepared)
    if late:
        output.say(
            f"{late:,} of these {'is' if late == 1 else 'are'} prepared for longer than {age_text(limit)}: find the"
            " owner, or end it by hand (tfmq tx commit | rollback XID)"
        )


def tell_losses(output: Output, shown: "Sequence[TransactionDescription]") -> None:
    """Which of them are not whole any more."""
    lossy = sum(each.state == "prepared" and bool(each.details.get("lost")) for each in shown)
    if lossy:
        verb = "is" if lossy == 1 else "are"
        output.say(
            f"{lossy:,} of these lost messages with damage in the transaction journal and {verb} not committed:"
            " roll back (tfmq tx rollback XID), or commit what is left (tfmq tx commit XID --force)"
        )
    if any(each.details.get("damage") for each in shown):
        output.say(
            "the transaction journal is damaged: stop the broker, run `tfmq log repair` on its data folder, start it"
        )


@tx.command(epilog="\b\nExample:\n  tfmq tx show order-42")
@click.argument("xid", shell_complete=xids)
@click.option("--epoch", type=click.IntRange(min=1), default=None, help="Which one, where an xid came twice.")
@output_options
def show(xid: str, epoch: int | None, output: Output) -> None:
    """Show a transaction: its state, age, size, owner, and where its messages go."""
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        found = known_transaction(admin, xid, epoch)
    if output.json:
        output.object(row_of(found))
        return
    output.object(everything(found))


# Ending by hand


def decision(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments that commit and rollback have in common."""
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option(
            "--as-owner",
            is_flag=True,
            help="In its owner's name: its owner is not told that it was done by hand.",
        ),
        click.option("--epoch", type=click.IntRange(min=1), help="Which one, where an xid came twice."),
        click.argument(
            "xids_given",
            metavar="XID...",
            nargs=-1,
            required=True,
            shell_complete=xids,
        ),
    ):
        command = option(command)
    return command


@tx.command(
    short_help="Commit prepared transactions by hand.", epilog="\b\nExample:\n  tfmq tx commit order-42"
)
@decision
@click.option(
    "--force", is_flag=True, help="Also those that lost messages with damage: commits what is left."
)
@output_options
def commit(
    xids_given: tuple[str, ...], epoch: int | None, as_owner: bool, yes: bool, force: bool, output: Output
) -> int:
    """Commit prepared transactions by hand: a heuristic decision, for an owner that does not come back.

    It cannot be undone. Make sure that the other systems of the transaction committed. The outcome is kept, and
    told to the owner, until `tfmq tx forget`.

    A transaction that lost messages with damage in the transaction journal is refused (exit code 4). With --force
    what is left of it is committed.
    """
    if force and as_owner:
        raise click.UsageError("--force is a decision by hand: leave --as-owner out.")
    return decide("commit", xids_given, epoch, as_owner, yes, output, force=force)


@tx.command(
    short_help="Roll back transactions by hand.", epilog="\b\nExample:\n  tfmq tx rollback order-42 order-43"
)
@decision
@output_options
def rollback(
    xids_given: tuple[str, ...], epoch: int | None, as_owner: bool, yes: bool, output: Output
) -> int:
    """Roll back transactions by hand: a heuristic decision, for an owner that does not come back.

    It cannot be undone: their messages are gone. Make sure that the other systems of the transaction rolled back.
    The outcome is kept, and told to the owner, until `tfmq tx forget`.
    """
    return decide("rollback", xids_given, epoch, as_owner, yes, output)


def decide(
    what: str,
    names: Sequence[str],
    epoch: int | None,
    as_owner: bool,
    yes: bool,
    output: Output,
    *,
    force: bool = False,
) -> int:
    """Nothing is decided before all of them are known and the operator has said yes; the exit code."""
    from tfmq.admin import Admin

    one_name(names, epoch)
    with Admin(output.servers) as admin:
        found = [known_transaction(admin, name, epoch) for name in names]
        if not yes:
            confirm(what, found, as_owner)
        method: Callable[..., Any] = admin.rollback_transaction
        if what == "commit":
            method = partial(admin.commit_transaction, force=force)
        over = {(each.xid, each.epoch) for each in found if each.state in OVER}

        def end(xid: str, number: int) -> dict[str, Any]:
            done = method(xid, number, heuristic=not as_owner)
            row = {**done._asdict(), "by_hand": not as_owner and (xid, number) not in over}
            if done.state == "applying":
                row["waits_for"] = dict(admin.transaction(xid, number).details.get("waits_for", {}))
            return row

        return ended(output, found, end, loss_is_meant=force)


def ended(
    output: Output,
    found: "Sequence[TransactionDescription]",
    end: Callable[[str, int], dict[str, Any]],
    *,
    loss_is_meant: bool = False,
) -> int:
    """Does it to one after the other, whatever becomes of those before. The exit code: 4 if one of them lost messages
    with damage, unless that is meant; otherwise 1 if one of them could not be done."""
    rows: list[dict[str, Any]] = []
    code, lost = 0, None
    for each in found:
        try:
            rows.append(end(each.xid, each.epoch))
        except ConnectionFailed as error:
            lost = error
            break
        except TfmqError as error:
            code = max(code, DAMAGE_FOUND if isinstance(error, Damaged) else NOT_DONE)
            click.echo(f"tfmq: {printable(each.xid)}: {error}", err=True)
        else:
            tell(output, rows[-1])
            if rows[-1].get("lost") and not loss_is_meant:
                code = DAMAGE_FOUND
    if output.json:
        output.array(rows)
    if lost is not None:
        raise lost
    return code


def tell(output: Output, row: dict[str, Any]) -> None:
    """What became of one, in a sentence."""
    name, state, by_hand = printable(row["xid"]), row["state"], row.get("by_hand", False)
    output.say(f"{name}: {state.removeprefix('heuristic_').replace('_', ' ')}{' by hand' if by_hand else ''}")
    if state == "applying" and not row.get("waits_for"):
        output.say(f"  committed; not every partition has its part yet: tfmq tx show {name}")
    for target, why in row.get("waits_for", {}).items():
        output.say(f"  committed; {printable(target)} does not have its part yet: {printable(why)}")
    if row.get("lost"):
        output.say(f"  {counted(row['lost'], 'message')} of it lost with damage in the transaction journal")
    if row.get("dropped"):
        output.say(f"  {counted(row['dropped'], 'message')} dropped: the topic is gone")
    if by_hand:
        output.say(f"  once its owner knows: tfmq tx forget {name}")


def confirm(what: str, found: "Sequence[TransactionDescription]", as_owner: bool) -> None:
    """Ask on a terminal; elsewhere demand --yes, so that a script decides nothing by accident."""
    verb = "Commit" if what == "commit" else "Roll back"
    how = "in its owner's name" if as_owner else "by hand"
    if len(found) == 1:
        which = described(found[0])
    else:
        size = size_text(sum(each.size_bytes for each in found))
        which = f"{counted(len(found), 'transaction')} ({size}; the first is {described(found[0])})"
    if not sys.stdin.isatty():
        raise click.UsageError(f"To {verb.lower()} {which} {how}, which cannot be undone, say --yes.")
    click.confirm(f"{verb} {which} {how}? This cannot be undone.", abort=True, err=True)


@tx.command(
    short_help="Forget outcomes of transactions that were ended by hand.",
    epilog="\b\nExample:\n  tfmq tx forget order-42",
)
@click.argument(
    "xids_given",
    metavar="XID...",
    nargs=-1,
    required=True,
    shell_complete=xids,
)
@click.option("--epoch", type=click.IntRange(min=1), help="Which one, where an xid came twice.")
@output_options
def forget(xids_given: tuple[str, ...], epoch: int | None, output: Output) -> int:
    """Forget the outcome of transactions that were ended by hand, once their owners know it."""
    from tfmq.admin import Admin

    one_name(xids_given, epoch)
    with Admin(output.servers) as admin:
        found = [known_transaction(admin, name, epoch) for name in xids_given]
        states = {(each.xid, each.epoch): each.state for each in found}

        def end(xid: str, number: int) -> dict[str, Any]:
            if not admin.forget_transaction(xid, number):
                raise TfmqError(
                    f"There is no outcome to forget: it was not ended by hand, but is {states[xid, number]}.",
                    outcome="not done",
                )
            return {"xid": xid, "epoch": number, "state": "forgotten"}

        return ended(output, found, end)


def one_name(names: Sequence[str], epoch: int | None) -> None:
    """An epoch belongs to one transaction."""
    if epoch is not None and len(names) > 1:
        raise click.UsageError("--epoch says which transaction of one xid is meant: give one xid.")
