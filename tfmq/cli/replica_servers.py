"""`tfmq replica status` and `promote`: the servers of a replicated broker, and a hand-over to one of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import click

from tfmq.cli.main import NOT_DONE, NOT_REACHED
from tfmq.cli.option_types import Duration
from tfmq.cli.output import Output, age_text, escape_unprintable, escape_values, output_options, size_text, with_times
from tfmq.client.connection.addresses import data_folder_of, parse_servers
from tfmq.errors import ConnectionFailed, NotPrimary, TfmqError, TimedOut
from tfmq.protocol.commands import ROLE_PRIMARY, ROLE_STANDBY

REPLY_SECONDS: Final = 5.0
"""How long a server may take to reply. `status` shows one that takes longer as unreachable."""
CHECK_SECONDS: Final = 0.25
"""Interval at which `promote` asks whether the server is primary."""
PROMOTE_SECONDS: Final = 60.0
UNREACHABLE: Final = "unreachable"
REFUSED: Final = "refused"
"""Instead of the role of a server that answered with an error, for instance because of a missing right."""
NO_REPLICAS: Final = "This server has no replicas: set replicate.url."
COLUMNS: Final = ("role", "address", "term", "slot", "behind", "since", "store", "trouble")


class ServerState(NamedTuple):
    """The state of one server, or the error with which it could not be asked."""

    address: str
    status: Mapping[str, Any]
    error: TfmqError | None = None

    @property
    def replication(self) -> Mapping[str, Any]:
        found = self.status.get("replication")
        return found if isinstance(found, Mapping) else {}

    @property
    def role(self) -> str:
        return str(self.replication.get("role") or "")

    @property
    def is_unreachable(self) -> bool:
        return isinstance(self.error, ConnectionFailed | TimedOut)

    def row(self) -> dict[str, Any]:
        """Return the fields of the JSON output."""
        found = self.replication
        if self.error is not None:
            role, trouble = UNREACHABLE if self.is_unreachable else REFUSED, self.error.sentence
        elif not found:
            role, trouble = None, NO_REPLICAS
        else:
            role, trouble = self.role, str(found.get("trouble") or "")
        row: dict[str, Any] = {"address": self.address, "role": role}
        names = (
            "mode",
            "primary",
            "term",
            "slot",
            "stored_slot",
            "behind_seconds",
            "behind_bytes",
            "since_ms",
            "store",
        )
        row |= {name: found.get(name) for name in names}
        row["since_ms"] = row["since_ms"] if isinstance(row["since_ms"], int) else None
        return with_times({**row, "trouble": trouble or None}, "since")


@click.command(
    "status",
    short_help="Show the servers, and their roles.",
    epilog="\b\nExample:\n  tfmq replica status --servers a:8367,b:8367,c:8367",
)
@output_options
def status(output: Output) -> int:
    """Show each server of --servers: its role, its term, how far behind it is, and what keeps it from replicating.

    Exit code 0 if all of them replicate and one is primary, 3 if none of them can be reached, else 1.
    """
    states = ask_all(server_addresses(output))
    rows = [each.row() for each in states]
    output.print_rows(rows if output.json else [table_row(row) for row in rows], COLUMNS, "")
    primaries = [each for each in states if each.role == ROLE_PRIMARY]
    if all(each.is_unreachable for each in states):
        return NOT_REACHED
    if any(each.role == ROLE_STANDBY for each in states) and not primaries:
        output.info("none of these servers is primary")
    if len(primaries) > 1:
        output.info("several servers say that they are primary: only the one with the highest term is")
    is_whole = len(primaries) == 1 and not any(row["trouble"] for row in rows)
    return 0 if is_whole else NOT_DONE


@click.command(
    short_help="Let a standby become primary.", epilog="\b\nExample:\n  tfmq replica promote --servers b:8367"
)
@click.option(
    "--timeout", type=Duration(), default=f"{PROMOTE_SECONDS:g}s", show_default=True, help="Wait at most so long."
)
@output_options
def promote(output: Output, timeout: float) -> None:
    """Let the standby at --servers become primary, and wait until it is.

    The present primary completes what it has accepted, stores it, and hands over: clients wait for about a second. If
    the present primary is gone, a standby becomes primary as soon as the lease has ended: this one, or a faster one.
    """
    addresses = server_addresses(output)
    if len(addresses) != 1:
        raise click.UsageError("Name the one standby that is to become primary: --servers HOST:PORT.")
    (address,) = addresses
    deadline = time.monotonic() + timeout
    before = ask(address)
    if before.error is not None:
        raise before.error
    if before.role == ROLE_PRIMARY:
        output.report({**before.row(), "promoted": False}, f"{before.address} is the primary already")
        return
    if not before.replication:
        raise click.ClickException(f"{before.address}: {NO_REPLICAS}")
    request_promotion(address)
    primary = escape_unprintable(str(before.replication.get("primary") or "")) or "the present primary"
    output.info(f"requested; waiting for {primary} to hand over to {before.address}")
    state = wait_until_primary(address, before, deadline, output)
    output.report(
        {**state.row(), "promoted": True}, f"{state.address} is primary, term {state.replication.get('term')}"
    )


def server_addresses(output: Output) -> list[str]:
    """Return the addresses of `--servers`, each as a client takes it, with the password: not for display."""
    if data_folder_of(output.servers) is not None:
        return [output.existing or ""]
    return [each.url() for each in parse_servers(output.servers)]


def ask(address: str) -> ServerState:
    """Ask one server for its state, whatever its role is."""
    from tfmq.admin import Admin

    with Admin(address, timeout=REPLY_SECONDS, standby=True) as admin:
        shown = ",".join(map(str, admin._driver.link.servers))
        try:
            return ServerState(shown, admin.status())
        except TfmqError as error:
            return ServerState(shown, {}, error)


def ask_all(addresses: Sequence[str]) -> list[ServerState]:
    with ThreadPoolExecutor(len(addresses)) as threads:
        return list(threads.map(ask, addresses))


def read_status(output: Output) -> dict[str, Any]:
    """Return the status of the primary; that of a standby if no server is primary, or none else is named."""
    from tfmq.admin import Admin

    with Admin(output.existing, standby=True) as admin:
        found = dict(admin.status())
        several = len(admin._driver.link.servers) > 1
    if several and ServerState("", found).role == ROLE_STANDBY:
        try:
            with Admin(output.existing, timeout=REPLY_SECONDS) as admin:
                return dict(admin.status())
        except NotPrimary:
            output.info("none of these servers is primary: this is the state of a standby")
    return found


def request_promotion(address: str) -> None:
    from tfmq.admin import Admin

    with Admin(address, timeout=REPLY_SECONDS, standby=True) as admin:
        admin.promote_replica()


def wait_until_primary(address: str, before: ServerState, deadline: float, output: Output) -> ServerState:
    """Return the state of the server once it is primary. Raises ClickException after `deadline`, or if another is."""
    known = before
    while True:
        state = ask(address)
        if state.role == ROLE_PRIMARY:
            return state
        if state.error is None:
            if state.replication.get("primary") != known.replication.get("primary"):
                primary = escape_unprintable(str(state.replication.get("primary") or "")) or "not known"
                output.info(f"the primary is {primary} now")
            known = state
        elif not isinstance(state.error, ConnectionFailed) and not state.error.retriable:
            raise state.error
        if _is_later(known.replication.get("term"), before.replication.get("term")) and known.replication.get(
            "primary"
        ):
            primary = escape_unprintable(str(known.replication["primary"]))
            raise click.ClickException(f"another server has become primary instead: {primary}")
        if time.monotonic() >= deadline:
            raise click.ClickException(
                f"{before.address} is not primary yet, and may still become it if the primary has found the request"
                " within 60 s, after which it is void: `tfmq replica status` shows when"
                f"{'' if state.error is None else f' ({state.error.sentence})'}"
            )
        time.sleep(CHECK_SECONDS)


def _is_later(term: object, before: object) -> bool:
    return isinstance(term, int) and isinstance(before, int) and term > before


def table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    since = row["since_ms"]
    ago = None if since is None else f"{age_text(max(0.0, time.time() - since / 1000))} ago"
    shown = escape_values(row)
    return {**shown, "role": shown["role"] or "no replicas", "behind": behind_text(row) or None, "since": ago}


def behind_text(found: Mapping[str, Any]) -> str:
    """Format how far behind a server is: '1.2 s, 3.0 MiB'; "" if that is not known."""
    parts = []
    if isinstance(found.get("behind_seconds"), int | float):
        parts.append(age_text(found["behind_seconds"]))
    if isinstance(found.get("behind_bytes"), int):
        parts.append(size_text(found["behind_bytes"]))
    return ", ".join(parts)
