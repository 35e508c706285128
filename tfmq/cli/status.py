"""`tfmq status`: how the broker is."""

from typing import Any

import click

from tfmq.cli.output import Output, output_options, size_text


@click.command(short_help="Show how the broker is.", epilog="\b\nExample:\n  tfmq status --json")
@output_options
def status(output: Output) -> None:
    """Show how the broker is: version, uptime, topics, connections, memory, what is stopped."""
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        found = dict(admin.status())
    if output.json:
        output.object(found)
        return
    settings = found.pop("settings", {})
    output.object({label(key): readable(key, value) for key, value in found.items() if not nested(value)})
    if settings and not output.quiet:
        output.say("settings: tfmq status --json, or tfmq-server --check-config")


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
