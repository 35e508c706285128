"""`tfmq status`: the state of the broker."""

from collections.abc import Mapping
from typing import Any

import click

from tfmq.cli.output import Output, age_text, escape_unprintable, output_options, size_text, with_noun, with_times
from tfmq.cli.replica_servers import behind_text, read_status

CLOCK_DIFFERENCE_MS = 1_000  # a smaller difference between broker time and the local clock is not reported
TARGETS_SHOWN = 10
"""Maximum number of blocked partitions that are listed, since a broken disk may block thousands."""
LATENESS = {"p50_ms": "half of them", "p99_ms": "99 %", "max_ms": "all"}
STATES = ("open", "prepared", "applying", "heuristic")


@click.command(short_help="Show how the broker is.", epilog="\b\nExample:\n  tfmq status --json")
@output_options
def status(output: Output) -> None:
    """Show the state of the broker: version, uptime, topics, transactions, delayed messages, connections, memory, and
    what is stopped.
    """
    found = read_status(output)
    if output.json:
        if found.get("delay"):
            found["delay"] = with_times(found["delay"], "now", "next_due", "horizon")
        if found.get("verification"):
            found["verification"] = with_times(found["verification"], "last_pass")
        output.print_object(found)
        return
    settings = found.pop("settings", {})
    transactions, delay = found.pop("transactions", {}), found.pop("delay", {})
    shown = {row_label(key): format_value(key, value) for key, value in found.items() if not isinstance(value, dict)}
    rows = {**transaction_rows(transactions), **delay_rows(delay), **schedule_rows(found.get("schedules", {}))}
    rows |= verification_rows(found.get("verification", {}))
    replication = found.get("replication", {})
    output.print_object({**shown, **rows, **replication_rows(replication)})
    if replication.get("trouble"):
        output.info(f"replication: {escape_unprintable(str(replication['trouble']))}")
    print_transaction_problems(output, transactions, settings.get("transaction.alarm_seconds", 0))
    print_delay_problems(output, delay)
    if settings and not output.quiet:
        output.info("settings: tfmq status --json, or tfmq-server --check-config")


def transaction_rows(found: Mapping[str, Any]) -> dict[str, str]:
    if not found:
        return {}
    counts = [f"{found.get(state, 0):,} {state}" for state in STATES]
    oldest = found.get("oldest_prepared_seconds") or 0
    if found.get("prepared"):
        counts[STATES.index("prepared")] += f" (the oldest for {age_text(oldest)})"
    journal = found.get("journal", "open")
    size = size_text(found.get("journal_bytes", 0))
    return {"transactions": ", ".join(counts), "transaction journal": f"{journal}, {size}"}


def schedule_rows(found: Mapping[str, int]) -> dict[str, str]:
    if not found.get("schedules"):
        return {}
    states = [f"{found[state]:,} {state}" for state in ("paused", "waiting") if found.get(state)]
    return {"schedules": ", ".join([f"{found['schedules']:,}", *states])}


def verification_rows(found: Mapping[str, Any]) -> dict[str, str]:
    """Return a row if segments were verified since the start; it counts the findings, which `topic show` lists."""
    if not found.get("segments"):
        return {}
    counts = [f"{count:,} {kind}" for kind, count in found.get("findings", {}).items() if count]
    done = f"{with_noun(found['segments'], 'segment')}, {size_text(found['bytes'])}"
    return {"verified": f"{done}, {', '.join(counts) or 'nothing found'}"}


def replication_rows(found: Mapping[str, Any]) -> dict[str, str]:
    """Return a row for a server with replicas: its role, term and mode, how far behind it is, and the store."""
    if not found:
        return {}
    parts = [str(found.get("role")), f"term {found.get('term')}", str(found.get("mode") or "")]
    parts.append(f"{behind_text(found)} behind" if behind_text(found) else "")
    parts.append(f"store {found['store']}" if found.get("store") else "")
    return {"replication": escape_unprintable(", ".join(filter(None, parts)))}


def print_transaction_problems(output: Output, found: Mapping[str, Any], alarm_seconds: float) -> None:
    if found.get("alarm"):
        output.info(
            f"transactions have been prepared for longer than {age_text(alarm_seconds)} and wait for their owners:"
            " tfmq tx list"
        )
    if found.get("heuristic"):
        output.info("some were ended by an operator, and their outcomes are not forgotten yet: tfmq tx list")


def delay_rows(found: Mapping[str, Any]) -> dict[str, str]:
    if not found:
        return {}
    waiting = [f"{found.get('pending', 0):,}"]
    if found.get("size_bytes"):
        waiting.append(size_text(found["size_bytes"]))
    if found.get("next_due_ms"):
        ahead = found["next_due_ms"] - found.get("now_ms", found["next_due_ms"])
        # For distant messages the broker knows only a range of due times; `next_due_ms` is the start of that range.
        waiting.append(f"the next in {age_text(ahead / 1_000)} at the earliest" if ahead > 0 else "some due now")
    late = found.get("lateness") or {}
    shares = [f"{share} within {late_text(late[key])}" for key, share in LATENESS.items() if late.get(key)]
    return {"delayed messages": ", ".join(waiting)} | ({"delivered late": ", ".join(shares)} if shares else {})


def late_text(late_ms: float) -> str:
    return f"{late_ms:.3g} ms" if late_ms < 1_000 else age_text(late_ms / 1_000)


def print_delay_problems(output: Output, found: Mapping[str, Any]) -> None:
    if found.get("arrivals", "open") != "open":
        output.info(f"delayed messages are rejected, their log is stopped: {found['arrivals']}")
    if found.get("held"):
        output.info(f"{with_noun(found['held'], 'delayed message')} blocked by partitions that accept none:")
        targets = list(found.get("waits_for", ()))
        for target, reason in targets[:TARGETS_SHOWN]:
            output.info(f"  {target}: {reason}")
        if len(targets) > TARGETS_SHOWN:
            output.info(f"  and {len(targets) - TARGETS_SHOWN:,} more: tfmq status --json")
    if found.get("damaged"):
        output.info(f"{with_noun(found['damaged'], 'delayed message')} lost by damage: see the broker's log")
    ahead = found.get("ahead_ms", 0)
    if abs(ahead) >= CLOCK_DIFFERENCE_MS:
        where = "ahead of" if ahead > 0 else "behind"
        output.info(
            f"broker time is {age_text(abs(ahead) / 1_000)} {where} the clock: docs/delay.md, “The clock” (tfmq --docs)"
        )


def row_label(key: str) -> str:
    """Return the label of a status field, without the unit if the printed value contains it."""
    return "size" if key == "bytes" else key.removesuffix("_bytes").removesuffix("_seconds")


def format_value(key: str, value: Any) -> Any:
    if key.endswith("bytes") and isinstance(value, int):
        return size_text(value)
    if key == "uptime_seconds":
        hours, rest = divmod(int(value), 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return value
