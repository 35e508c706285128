"""`tfmq completion`: the line that teaches a shell to complete commands, options, and names that the broker knows."""

import os
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from tfmq.admin import Admin

SECONDS: Final = 1.0
"""For a broker to answer: a person waits with a finger on the key."""
ITEMS: Final = 200

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def offered(names: "Callable[[Admin], Iterable[str | CompletionItem]]") -> Complete:
    """What the shell offers for an argument: names that the broker knows; where none answers soon, nothing."""

    def complete(context: click.Context, argument: click.Parameter, start: str) -> list[CompletionItem]:
        from tfmq.admin import Admin
        from tfmq.errors import TfmqError

        servers = context.params.get("servers")
        if (servers or os.environ.get("TFMQ_SERVERS", "")).startswith("file:"):
            return []  # it would start a broker
        try:
            with Admin(servers, timeout=SECONDS) as admin:
                items = (CompletionItem(each) if isinstance(each, str) else each for each in names(admin))
                found = (each for each in items if each.value.startswith(start) and each.value.isprintable())
                return list(islice(found, ITEMS))
        except TfmqError:
            return []

    return complete


topics: Final = offered(lambda admin: (each.name for each in admin.topics()))
groups: Final = offered(lambda admin: (each.group for each in admin.groups()))


@click.command(epilog='\b\nExample:\n  eval "$(tfmq completion bash)"      put it into ~/.bashrc to keep it')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from tfmq.cli.main import commands

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(commands, {}, "tfmq", "_TFMQ_COMPLETE").source())
