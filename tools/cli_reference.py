"""What every command of `tfmq`, and every pipeline, says of itself, for docs/cli.md and docs/pipelines.md."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import click

from tfmq.cli.main import commands

WIDTH = 100
"""Letters a line, so that a browser does not break them."""


def cli_reference() -> str:
    """A heading and the help of each command, in the order of `tfmq --help`."""
    return "\n".join(f"### {name}\n```\n{text.rstrip()}\n```\n" for name, text in helps(commands, "tfmq"))


def pipelines_reference() -> str:
    """Likewise of the pipelines that are there."""
    from tfmq.spark.pipelines import NAMES

    texts = []
    for name in NAMES:
        path = f"tfmq.spark.pipelines.{name}"
        if find_spec(path) is not None:
            found = vars(import_module(path)).values()
            own = [each for each in found if isinstance(each, click.Command)]
            texts += [text for each in own for _, text in helps(each, f"python -m {path}")]
    return "\n".join(f"```\n{text.rstrip()}\n```\n" for text in texts)


def helps(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
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
