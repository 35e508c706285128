"""`tfmq completion`: the line that teaches a shell to complete tfmq's commands and options."""

import click
from click.shell_completion import get_completion_class


@click.command(epilog='\b\nExample:\n  eval "$(tfmq completion bash)"      put it into ~/.bashrc to keep it')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from tfmq.cli.main import commands

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(commands, {}, "tfmq", "_TFMQ_COMPLETE").source())
