"""`tfmq status`: how the broker is."""

from collections.abc import Mapping
from typing import Any

import click

from tfmq.cli.output import Output, age_text, output_options, size_text

STATES = ("open", "prepared", "applying", "heuristic")


@click.command(short_help="Show how the broker is.", epilog="\b\nExample:\n  tfmq status --json")
@output_options
def status(output: Output) -> None:
    """Show how the broker is: version, uptime, topics, transactions, connections, memory, what is stopped."""
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        found = dict(admin.status())
    if output.json:
        output.object(found)
        return
    settings = found.pop("settings", {})
    transactions = found.pop("transactions", {})
    shown = {label(key): readable(key, value) for key, value in found.items() if not nested(value)}
    output.object({**shown, **transaction_rows(transactions)})
    tell_transactions(output, transactions, settings.get("transaction.alarm_seconds", 0))
    if settings and not output.quiet:
        output.say("settings: tfmq status --json, or tfmq-server --check-config")


def transaction_rows(found: Mapping[str, Any]) -> dict[str, str]:
    """Transactions in two lines: how many in which state, and their journal."""
    if not found:
        return {}
    counts = [f"{found.get(state, 0):,} {state}" for state in STATES]
    oldest = found.get("oldest_prepared_seconds") or 0
    if found.get("prepared"):
        counts[STATES.index("prepared")] += f" (the oldest for {age_text(oldest)})"
    journal = found.get("journal", "open")
    size = size_text(found.get("journal_bytes", 0))
    return {"transactions": ", ".join(counts), "transaction journal": f"{journal}, {size}"}


def tell_transactions(output: Output, found: Mapping[str, Any], alarm_seconds: float) -> None:
    """What somebody should do about them."""
    if found.get("alarm"):
        output.say(
            f"transactions are prepared for longer than {age_text(alarm_seconds)} and wait for their owners:"
            " tfmq tx list"
        )
    if found.get("heuristic"):
        output.say("some were ended by hand, and their outcomes wait to be forgotten: tfmq tx list")


def label(key: str) -> str:
    """The name of a row for a person, whose value bears its unit itself."""
    return "size" if key == "bytes" else key.removesuffix("_bytes").removesuffix("_seconds")


def readable(key: str, value: Any) -> Any:
    if key.endswith("bytes") and isinstance(value, int):
        return size_text(value)
    if key == "uptime_seconds":
        hours, rest = divmod(int(value), 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return value


def nested(value: Any) -> bool:
    return isinstance(value, dict)
