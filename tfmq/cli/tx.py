"""`tfmq tx`: list transactions and commit groups, and end transactions by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli import main
from tfmq.cli.main import DAMAGE_FOUND
from tfmq.cli.main import NOT_DONE as EXIT_NOT_DONE
from tfmq.cli.output import (
    PAGE_ROWS,
    ROWS_SHOWN,
    Output,
    age_text,
    confirm,
    did_you_mean,
    escape_unprintable,
    escape_values,
    iterate_pages,
    output_options,
    rows_option,
    size_text,
    time_text,
    with_noun,
    with_times,
)
from tfmq.errors import NOT_DONE, ConnectionFailed, Damaged, TfmqError, UnknownTransaction
from tfmq.limits import XID_BYTES
from tfmq.transaction.states import APPLYING, ENDED_STATES, PREPARED, State

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.models import CommitGroupDescription, TransactionDescription


COLUMNS = ("xid", "epoch", "state", "age", "size", "messages", "topics", "owner", "group")
NAMES_COMPARED = 10_000
"""Maximum number of xids that are compared for "Did you mean": comparing 100,000 would take too long."""


def iterate_transactions(
    admin: Admin, states: Sequence[str] | None, group: str | None, after: int
) -> Iterator[TransactionDescription]:
    """Yield all transactions in these states with an epoch above `after`, one page per request."""
    return iterate_pages(
        lambda after: admin.transactions(states, group=group, after=after, limit=PAGE_ROWS), after, "epoch"
    )


def json_row(found: TransactionDescription) -> dict[str, Any]:
    row = found._asdict()
    row |= row.pop("details") | {"topics": list(found.topics)}
    return with_times(row, *(name.removesuffix("_ms") for name in row if name.endswith("_ms")))


def table_row(found: TransactionDescription) -> dict[str, Any]:
    lost = found.details.get("lost")
    return {
        "xid": escape_unprintable(found.xid),
        "epoch": str(found.epoch),
        "state": f"{found.state}, journal damaged" if found.details.get("damage") else found.state,
        "age": age_text(found.age_seconds),
        "size": size_text(found.size_bytes),
        "messages": f"{found.messages:,}, {lost:,} lost" if lost else found.messages,
        "topics": list(found.topics),
        "owner": escape_unprintable(found.owner),
        "group": found.group or found.commit_group or None,
    }


def detail_row(found: TransactionDescription) -> dict[str, Any]:
    rows = {
        **table_row(found),
        "began": time_text(found.began_ms or None),
        "group": found.group or None,
        "prepared": time_text(found.prepared_ms or None),
        "ends_by_itself": time_text(found.expires_ms or None),
        "commit_group": found.commit_group,
        **escape_values(found.details),
    }
    for name in [name for name in rows if name.endswith("_ms")]:
        rows[name.removesuffix("_ms")] = time_text(rows.pop(name) or None)
    if not found.began_ms:
        for name in ("age", "size", "messages"):
            del rows[name]
    return {name: value for name, value in rows.items() if value not in NOTHING or name == "messages"}


NOTHING: tuple[Any, ...] = (None, "", "-", 0, -1, False, [], {}, ())


def describe_transaction(found: TransactionDescription) -> str:
    parts = [found.state, f"{age_text(found.age_seconds)} old"]
    parts += [f"by {escape_unprintable(found.owner)}"] if found.owner else []
    lost = found.details.get("lost", 0)
    parts += [f"{with_noun(lost, 'message')} of it lost to damage"] * bool(lost)
    parts += [f"of the commit group {found.commit_group}, whose members are committed together"] * bool(
        found.commit_group
    )
    where = f" for {', '.join(found.topics)}" if found.topics else ""
    return f"{escape_unprintable(found.xid)} ({', '.join(parts)}, {with_noun(found.messages, 'message')}{where})"


def find_transaction(admin: Admin, xid: str, epoch: int | None) -> TransactionDescription:
    """Return the transaction with this xid and epoch (None: latest). Raises UnknownTransaction with a similar xid."""
    size = len(xid.encode())
    if not 1 <= size <= XID_BYTES:
        raise click.UsageError(f"An xid has 1 to {XID_BYTES:d} bytes, not {size}.")
    found = admin.transaction(xid, epoch or 0)
    if found.state != "unknown":
        return found
    latest = admin.transaction(xid).epoch if epoch else 0
    if latest:
        raise UnknownTransaction(f"There is no transaction {xid!r} of epoch {epoch}: the latest has {latest}.")
    names = [each.xid for each in islice(iterate_transactions(admin, None, None, 0), NAMES_COMPARED)]
    hint = did_you_mean(xid, names) or (" `tfmq tx list` has all." if names else " There are no unfinished ones.")
    raise UnknownTransaction(f"There is no transaction {xid!r}, and no outcome of one is remembered.{hint}")


xids = main.complete_names(lambda admin: (each.xid for each in iterate_transactions(admin, None, None, 0)))
epoch_option = click.option(
    "--epoch", type=click.IntRange(min=1), help="The epoch of the transaction, if its xid was used several times."
)
xids_argument = click.argument("xids_given", metavar="XID...", nargs=-1, required=True, shell_complete=xids)


GROUP_COLUMNS = ("group", "sequence", "rows", "committed", "members", "run")


@click.command(
    "groups",
    short_help="List commit groups with their last sequences.",
    epilog="\b\nExamples:\n  tfmq tx groups\n  tfmq tx groups --json | jq -r .[].group",
)
@output_options
def groups(output: Output) -> None:
    """List commit groups: streaming queries of Spark, and other writers that commit many transactions
    together.

    The sequence is the last committed one; for a query, its micro-batch. A member is a transaction that waits
    for the group's next commit; `tfmq tx show XID` shows its sequence and run.
    """
    with output.admin() as admin:
        found = admin.commit_groups()
    if output.json:
        output.print_array(group_row(each) for each in found)
        return
    output.print_rows(
        [group_table_row(each) for each in found], GROUP_COLUMNS, "no commit group has committed anything"
    )


def group_row(found: CommitGroupDescription) -> dict[str, Any]:
    row = found._asdict()
    return with_times(row | row.pop("details"), "committed")


def group_table_row(found: CommitGroupDescription) -> dict[str, Any]:
    row, none = group_row(found), found.sequence < 0
    return {
        "group": escape_unprintable(found.group),
        "sequence": None if none else str(found.sequence),
        "rows": None if none else found.rows,
        "committed": time_text(row.get("committed_ms") or None),
        "members": row.get("members", 0),
        "run": escape_unprintable(found.run) or None,
    }


@click.command(
    "forget-group",
    short_help="Forget the last sequences of commit groups.",
    epilog="\b\nExample:\n  tfmq tx forget-group spark-stream-0a6cd9f2-8e0c-4d4e-9d0e-7d1f0c4b1f6e..copies",
)
@click.argument("names", metavar="GROUP...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def forget_group(names: tuple[str, ...], yes: bool, output: Output) -> None:
    """Forget the last sequences of commit groups whose writers have ended, or will start from the beginning.

    A writer that continues afterwards writes all sequences again that its checkpoint does not contain, even if they
    were committed: make sure that the checkpoint is correct.
    """
    with output.admin() as admin:
        known = {each.group: each for each in admin.commit_groups()}
        for name in names:
            if name not in known:
                hint = did_you_mean(name, list(known)) or " `tfmq tx groups` has all."
                raise TfmqError(f"There is no commit group {name!r}.{hint}", outcome=NOT_DONE)
        if not yes:
            confirm_forgetting([known[name] for name in names])
        forgotten = [{"group": name, "forgotten": admin.forget_commit_group(name)} for name in names]
    if output.json:
        output.print_array(forgotten)
    for name in names:
        output.info(f"{escape_unprintable(name)}: forgotten{remaining_text(known[name].details.get('members', 0))}")


def remaining_text(members: int) -> str:
    """Return a clause on what happens to the `members` prepared transactions of a forgotten group; "" for none."""
    if not members:
        return ""
    return (
        f"; {with_noun(members, 'prepared transaction')} of it {'stays' if members == 1 else 'stay'} until the time is"
        " over (`tfmq tx list`; `tfmq tx rollback XID` drops one)"
    )


def confirm_forgetting(found: list[CommitGroupDescription]) -> None:
    first = found[0]
    where = "has committed nothing yet" if first.sequence < 0 else f"is at sequence {first.sequence}"
    which = f"{escape_unprintable(first.group)}, which {where}"
    if len(found) > 1:
        which = f"{with_noun(len(found), 'commit group')}; the first is {which}"
    confirm(f"forget {which}", "not forgotten", "this cannot be undone")


STATES = tuple(state.value for state in State if state not in ENDED_STATES)
"""Values for --state. They are plain text, because click would offer the names of enum members, not their values."""


@click.group()
def tx() -> None:
    """Transactions: list, show, commit, rollback, forget; commit groups: groups, forget-group."""


tx.add_command(groups)
tx.add_command(forget_group)


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
@click.option("--after", type=click.IntRange(min=0), default=0, help="List from the transaction after this epoch.")
@rows_option
@output_options
def list_command(states: tuple[str, ...], group: str | None, after: int, count: int | None, output: Output) -> None:
    """List the transactions that need an operator or are not finished: prepared, applying, or ended by hand."""
    with output.admin() as admin:
        found = iterate_transactions(admin, states or None, group, after)
        if output.json:
            output.print_array(json_row(each) for each in islice(found, count))
            return
        most = count or ROWS_SHOWN
        rows = list(islice(found, most + 1))
        shown = rows[:most]
        output.print_rows([table_row(each) for each in shown], COLUMNS, "no unfinished transactions")
        print_overdue(output, admin, shown)
        print_losses(output, shown)
    if len(rows) > most:
        output.info(f"there are more: tfmq tx list --after {shown[-1].epoch}")


def print_overdue(output: Output, admin: Admin, shown: Sequence[TransactionDescription]) -> None:
    """Print how many prepared transactions without a timeout are older than the setting transaction.alarm_seconds."""
    prepared = [each for each in shown if each.state == PREPARED and not each.expires_ms]
    if not prepared or output.quiet:
        return
    limit = float(admin.status().get("settings", {}).get("transaction.alarm_seconds", 0))
    late = sum(each.age_seconds > limit for each in prepared)
    if late:
        output.info(
            f"{late:,} of these {'is' if late == 1 else 'are'} prepared for longer than {age_text(limit)}: find the"
            " owner, or end it by hand (tfmq tx commit | rollback XID)"
        )


def print_losses(output: Output, shown: Sequence[TransactionDescription]) -> None:
    lossy = sum(each.state == PREPARED and bool(each.details.get("lost")) for each in shown)
    if lossy:
        verb = "is" if lossy == 1 else "are"
        output.info(
            f"{lossy:,} of these lost messages with damage in the transaction journal and {verb} not committed:"
            " roll back (tfmq tx rollback XID), or commit what is left (tfmq tx commit XID --force)"
        )
    if any(each.details.get("damage") for each in shown):
        output.info(
            "the transaction journal is damaged: stop the broker, run `tfmq log repair` on its data folder, start it"
        )


@tx.command(epilog="\b\nExample:\n  tfmq tx show order-42")
@click.argument("xid", shell_complete=xids)
@epoch_option
@output_options
def show(xid: str, epoch: int | None, output: Output) -> None:
    """Show a transaction: its state, age, size, owner, and targets."""
    with output.admin() as admin:
        found = find_transaction(admin, xid, epoch)
    if output.json:
        output.print_object(json_row(found))
        return
    output.print_object(detail_row(found))


def decision_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    as_owner = click.option(
        "--as-owner", is_flag=True, help="In its owner's name: the owner does not get a heuristic outcome."
    )
    yes = click.option("--yes", is_flag=True, help="Do not ask.")
    return xids_argument(epoch_option(as_owner(yes(command))))


@tx.command(short_help="Commit prepared transactions by hand.", epilog="\b\nExample:\n  tfmq tx commit order-42")
@decision_arguments
@click.option("--force", is_flag=True, help="Commit the remaining messages of transactions that lost some to damage.")
@output_options
def commit(
    xids_given: tuple[str, ...], epoch: int | None, as_owner: bool, yes: bool, force: bool, output: Output
) -> int:
    """Commit prepared transactions by hand: a heuristic decision, for an owner that does not return.

    The decision cannot be undone. Make sure that the other systems of the transaction committed. The outcome is kept,
    and reported to the owner, until `tfmq tx forget`.

    A transaction that lost messages to damage in the transaction journal is rejected (exit code 4). With --force the
    remaining messages are committed.
    """
    if force and as_owner:
        raise click.UsageError("--force is a decision by hand: leave --as-owner out.")
    return end_by_hand("commit", xids_given, epoch, as_owner, yes, output, force=force)


@tx.command(short_help="Roll back transactions by hand.", epilog="\b\nExample:\n  tfmq tx rollback order-42 order-43")
@decision_arguments
@output_options
def rollback(xids_given: tuple[str, ...], epoch: int | None, as_owner: bool, yes: bool, output: Output) -> int:
    """Roll back transactions by hand: a heuristic decision, for an owner that does not return.

    The decision cannot be undone: the messages of the transactions are deleted. Make sure that the other systems of the
    transaction rolled back. The outcome is kept, and reported to the owner, until `tfmq tx forget`.
    """
    return end_by_hand("rollback", xids_given, epoch, as_owner, yes, output)


def end_by_hand(
    what: str,
    names: Sequence[str],
    epoch: int | None,
    as_owner: bool,
    yes: bool,
    output: Output,
    *,
    force: bool = False,
) -> int:
    """Find all transactions, ask the operator to confirm, then end them; return the exit code.

    `what`: "commit" or "rollback". `names`: the xids. `as_owner`: end them as their owner would, not by hand. `yes`: do
    not ask. `force`: commit also transactions that lost messages to damage.
    """
    check_epoch_option(names, epoch)
    with output.admin() as admin:
        found = all_known(admin, names, epoch)
        if not yes:
            confirm_end(what, found, as_owner)
        method: Callable[..., Any] = admin.rollback_transaction
        if what == "commit":
            method = partial(admin.commit_transaction, force=force)
        # Transactions that ended before this command, and not by hand. Their outcomes need no `tfmq tx forget`.
        over = {(each.xid, each.epoch) for each in found if each.state in ENDED_STATES}

        def end(xid: str, number: int) -> dict[str, Any]:
            done = method(xid, number, heuristic=not as_owner)
            row = {**done._asdict(), "by_hand": not as_owner and (xid, number) not in over}
            if done.state == APPLYING:
                row["waits_for"] = dict(admin.transaction(xid, number).details.get("waits_for", {}))
            return row

        return end_each(output, found, end, loss_is_meant=force)


def end_each(
    output: Output,
    found: Sequence[TransactionDescription],
    end: Callable[[str, int], dict[str, Any]],
    *,
    loss_is_meant: bool = False,
) -> int:
    """End the transactions one after the other; return the exit code. If one cannot be ended, print the error,
    and continue with the next one. Only ConnectionFailed ends the loop, and is raised.

    `end(xid, epoch)`: ends a transaction and returns its JSON row · `loss_is_meant`: the operator accepts that messages
    were lost to damage, so such a loss does not cause exit code 4.
    """
    rows: list[dict[str, Any]] = []
    code, lost = 0, None
    for each in found:
        try:
            rows.append(end(each.xid, each.epoch))
        except ConnectionFailed as error:
            lost = error
            break
        except TfmqError as error:
            code = max(code, DAMAGE_FOUND if isinstance(error, Damaged) else EXIT_NOT_DONE)
            click.echo(f"tfmq: {escape_unprintable(each.xid)}: {error}", err=True)
        else:
            report_end(output, rows[-1])
            if rows[-1].get("lost") and not loss_is_meant:
                code = DAMAGE_FOUND
    if output.json:
        output.print_array(rows)
    if lost is not None:
        raise lost
    return code


def report_end(output: Output, row: dict[str, Any]) -> None:
    name, state, by_hand = escape_unprintable(row["xid"]), row["state"], row.get("by_hand", False)
    output.info(f"{name}: {state.removeprefix('heuristic_').replace('_', ' ')}{' by hand' if by_hand else ''}")
    if state == APPLYING and not row.get("waits_for"):
        output.info(f"  committed; not applied to every partition yet: tfmq tx show {name}")
    for target, why in row.get("waits_for", {}).items():
        output.info(f"  committed; not applied to {escape_unprintable(target)} yet: {escape_unprintable(why)}")
    if row.get("lost"):
        output.info(f"  {with_noun(row['lost'], 'message')} of it lost to damage in the transaction journal")
    if row.get("dropped"):
        output.info(f"  {with_noun(row['dropped'], 'message')} dropped: the topic was deleted")
    if by_hand:
        output.info(f"  after its owner has the outcome: tfmq tx forget {name}")


def confirm_end(what: str, found: Sequence[TransactionDescription], as_owner: bool) -> None:
    verb, refused = ("commit", "not committed") if what == "commit" else ("roll back", "not rolled back")
    how = "in its owner's name" if as_owner else "by hand"
    if len(found) == 1:
        which = describe_transaction(found[0])
    else:
        size = size_text(sum(each.size_bytes for each in found))
        which = f"{with_noun(len(found), 'transaction')} ({size}; the first is {describe_transaction(found[0])})"
    confirm(f"{verb} {which} {how}", refused, "this cannot be undone")


@tx.command(
    short_help="Forget outcomes of transactions that were ended by hand.",
    epilog="\b\nExample:\n  tfmq tx forget order-42",
)
@xids_argument
@epoch_option
@output_options
def forget(xids_given: tuple[str, ...], epoch: int | None, output: Output) -> int:
    """Forget the outcomes of transactions that were ended by hand, after the owners have received the outcomes."""
    check_epoch_option(xids_given, epoch)
    with output.admin() as admin:
        found = all_known(admin, xids_given, epoch)
        states = {(each.xid, each.epoch): each.state for each in found}

        def end(xid: str, number: int) -> dict[str, Any]:
            if not admin.forget_transaction(xid, number):
                raise TfmqError(
                    f"There is no outcome to forget: it was not ended by hand, but is {states[xid, number]}.",
                    outcome="not done",
                )
            return {"xid": xid, "epoch": number, "state": "forgotten"}

        return end_each(output, found, end)


def all_known(admin: Admin, names: Sequence[str], epoch: int | None) -> list[TransactionDescription]:
    """Return the transactions with these xids. Raises UnknownTransaction for the first xid without a transaction."""
    try:
        return [find_transaction(admin, name, epoch) for name in names]
    except UnknownTransaction as error:
        raise (error if len(names) == 1 else UnknownTransaction(f"{error} Nothing was done with the others.")) from None


def check_epoch_option(names: Sequence[str], epoch: int | None) -> None:
    if epoch is not None and len(names) > 1:
        raise click.UsageError("--epoch selects a transaction of one xid: give one xid.")
