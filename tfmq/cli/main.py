"""The `tfmq` command: the group, shell completion, and the one place where an error becomes a sentence and a code.

Exit codes: 0 done, 1 not done (the sentence says why), 2 wrong usage, 3 no broker reached, 4 damage found.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

# Commands load when they are used, so that `tfmq --help` and completion answer at once.
COMMANDS = {
    "send": "tfmq.cli.send:send",
    "read": "tfmq.cli.read:read",
    "topic": "tfmq.cli.topic:topic",
    "group": "tfmq.cli.group:group",
    "log": "tfmq.cli.log:log",
    "status": "tfmq.cli.status:status",
    "bench": "tfmq.cli.bench:bench",
    "completion": "tfmq.cli.completion:completion",
}

EXAMPLES = """\b
Examples:
  tfmq-server &                          start a broker in this folder
  tfmq send greetings "hello"            send a message; the topic is made
  tfmq read greetings                    read it back
  tfmq topic list                        what is there
"""


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        target = COMMANDS.get(name)
        if target is None:
            return None
        module, attribute = target.split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, arguments)
        except click.UsageError as error:
            from tfmq.cli.output import did_you_mean

            hint = did_you_mean(arguments[0], self.list_commands(context))
            raise click.UsageError(f"there is no command {arguments[0]!r}.{hint}", context) from error


@click.group(cls=LazyGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tfmq", message="tfmq %(version)s")
def commands() -> None:
    """Talk to a tfmq broker: send, read, look after topics, check files."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code. Every expected error is one sentence on standard error."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code comes back."""
    try:
        code = commands.main(
            args=list(sys.argv[1:] if arguments is None else arguments), standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        return quiet_pipe()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return explained(error)


def quiet_pipe() -> int:
    """The reader of our output went away (`tfmq read t | head`): that is no error of ours; nothing more to say."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def explained(error: Exception) -> int:
    """Say an expected error in its own sentence; anything else is a bug of ours and keeps its traceback."""
    from journal.errors import Corrupt, JournalError
    from tfmq.errors import ConnectionFailed, Damaged, TfmqError

    if not isinstance(error, TfmqError | JournalError | OSError):
        raise error
    click.echo(f"tfmq: {error}", err=True)
    if isinstance(error, Damaged | Corrupt):
        return 4
    return 3 if isinstance(error, ConnectionFailed) else 1
