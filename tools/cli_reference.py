"""What every command of `tfmq` says of itself, for docs/cli.md."""

from collections.abc import Iterator

import click

from tfmq.cli.main import commands

WIDTH = 100
"""Letters a line, so that a browser does not break them."""


def cli_reference() -> str:
    """A heading and the help of each command, in the order of `tfmq --help`."""
    return "\n".join(f"### {name}\n```\n{text.rstrip()}\n```\n" for name, text in helps(commands, "tfmq"))


def helps(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, str]]:
    """(its name, its help) of a command, then of those in it."""
    context = click.Context(
        command,
        parent=parent,
        info_name=name,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        **command.context_settings,
    )
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None:
                yield from helps(found, each, context)
