"""The `tfmq` command: the group, shell completion, and the one place where an error becomes a sentence and a code.

Exit codes: 0 done, 1 not done (the sentence says why), 2 wrong usage, 3 no broker reached, 4 damage found.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from tfmq.admin import Admin


# Commands load when they are used, so that `tfmq --help` and completion answer at once.
COMMANDS = {
    "send": "tfmq.cli.send:send",
    "read": "tfmq.cli.read:read",
    "run": "tfmq.cli.worker:run",
    "topic": "tfmq.cli.topic:topic",
    "group": "tfmq.cli.group:group",
    "tx": "tfmq.cli.tx:tx",
    "delay": "tfmq.cli.delay:delay",
    "schedule": "tfmq.cli.schedule:schedule",
    "dlq": "tfmq.cli.dlq:dlq",
    "log": "tfmq.cli.log:log",
    "status": "tfmq.cli.status:status",
    "bench": "tfmq.cli.bench:bench",
    "completion": "tfmq.cli.main:completion",
}

EXAMPLES = """\b
Examples:
  tfmq-server &                          start a broker in this folder
  tfmq send greetings "hello"            send a message; the topic is made
  tfmq read greetings                    read it back
  tfmq topic list                        what is there
"""


PIPELINES = ("archive", "replay", "audit", "reconcile", "report", "spark", "pipelines")
"""Words of what Spark does, which are no commands of `tfmq`."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended


class ReaderGone(Exception):
    """Whoever read our output went away; click would call a plain BrokenPipeError a failure."""


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are asked for."""

    targets: Mapping[str, str] = COMMANDS

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            raise ReaderGone from error

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.targets)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        target = self.targets.get(name)
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
            if arguments[0] in PIPELINES and arguments[0] not in self.targets:
                hint = " Pipelines on Spark: `python -m tfmq.spark.pipelines` lists them."
            raise click.UsageError(f"there is no command {arguments[0]!r}.{hint}", context) from error


def print_docs(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print where the docs of this installation are: in its checkout, or where pip put those of the wheel."""
    if not wanted:
        return
    from importlib.metadata import distribution

    page = Path("docs", "README.md")
    root = Path(__file__).resolve().parents[2]
    folders = [root, root / "share" / "doc" / "tfmq"]  # a checkout; pip install --target
    files = distribution("tfmq").files or ()
    folders += [Path(str(each.locate())).resolve().parents[1] for each in files if each.match(f"tfmq/{page}")]
    found = [folder for folder in folders if (folder / page).exists()]
    if not found:
        raise click.ClickException(
            "This installation of tfmq has no docs: install it with pip, from a wheel."
        )
    click.echo(found[0])
    context.exit()


@click.group(cls=LazyGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tfmq", message="tfmq %(version)s")
@click.option(
    "--docs",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_docs,
    help="Print the folder that has docs/, conf/ and examples/, and exit.",
)
def commands() -> None:
    """Talk to a tfmq broker: send, read, look after topics, check files."""


def main(
    arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "tfmq"
) -> None:
    """Run the command line and leave with its exit code. Every expected error is one sentence on standard error."""
    open_what_is_closed()
    say_warnings()
    sys.exit(run(arguments, command, name))


def run(
    arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "tfmq"
) -> int:
    """Run the command line, `tfmq` or another `command`; the exit code comes back."""
    try:
        code = (command or commands).main(
            args=list(sys.argv[1:] if arguments is None else arguments),
            prog_name=name,
            standalone_mode=False,
        )
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            return INTERRUPTED
        click.echo("stopped", err=True)
        return 1
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption):
            known = near(error.option_name, error.possibilities)
            error = click.NoSuchOption(error.option_name, error.message, known, error.ctx)
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"tfmq: {error.format_message()}", err=True)
        return error.exit_code
    except ReaderGone:
        return quiet_pipe()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return explained(error)


def near(option: str, possibilities: Sequence[str] | None) -> list[str]:
    """Those that may be meant; click counts the dashes, too, as letters that are alike."""
    known = {each.lstrip("-"): each for each in possibilities or ()}
    return [known[each] for each in difflib.get_close_matches(option.lstrip("-"), known)]


def open_what_is_closed() -> None:
    """Whoever closes a standard stream (`tfmq status >&-`) wants nothing from it: neither a traceback, nor that what is
    opened next gets its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


class PresentStandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is standard error at the time: a progress bar replaces it, so that lines are printed above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def say_warnings() -> None:
    """What the client has to say besides its results (a lost connection, a damaged range), as sentences of ours."""
    logger = logging.getLogger("tfmq")
    if "_TFMQ_COMPLETE" in os.environ:  # whatever is said would stand on the line that somebody types
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    if not logger.handlers:
        handler = PresentStandardError()
        handler.setFormatter(logging.Formatter("tfmq: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        for what_waits in ("tfmq.connection", "tfmq.client"):  # for a broker, or for room in it
            logging.getLogger(what_waits).setLevel(logging.INFO)


def quiet_pipe() -> int:
    """The reader of our output went away (`tfmq read t | head`): that is no error of ours; nothing more to say."""
    discard_output()
    return 0


def discard_output() -> None:
    """What is still buffered cannot be written: without this Python tries again as it ends, and exits with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explained(error: Exception) -> int:
    """Say an expected error in its own sentence; anything else is a bug of ours and keeps its traceback."""
    from journal.errors import JournalError
    from tfmq.errors import TfmqError

    if isinstance(error, UnicodeEncodeError):
        click.echo(f"tfmq: {error.object!r} is not UTF-8: only payloads may be any bytes.", err=True)
        return WRONG_USAGE
    if not isinstance(error, TfmqError | JournalError | OSError):
        raise error
    if isinstance(error, OSError) and error.filename is None and error.errno in NO_ROOM:
        click.echo(
            f"tfmq: {error.strerror}: the output, or a file here, could not be written. What the command did before"
            " stays done.",
            err=True,
        )
        try:
            sys.stdout.flush()
        except OSError:
            discard_output()
        return NOT_DONE
    said: object = reason_of(error)
    if isinstance(error, OSError) and not isinstance(error, TfmqError | JournalError) and error.filename:
        said = f"{error.filename}: {error.strerror}"  # without [Errno 13]
    click.echo(f"tfmq: {said}", err=True)
    return exit_code(error)


NOT_DONE, WRONG_USAGE, NOT_REACHED, DAMAGE_FOUND = 1, 2, 3, 4


def reason_of(error: Exception) -> Exception:
    """What a single lost delivery was lost by says more than that it was lost."""
    from tfmq.errors import DeliveryFailed

    if isinstance(error, DeliveryFailed) and len(error.deliveries) == 1:
        return error.deliveries[0].peek() or error
    return error


def exit_code(error: BaseException) -> int:
    """The exit code for an expected error; that of several lost deliveries is the first one's."""
    from journal.errors import Corrupt
    from tfmq.errors import BadRequest, ConfigError, ConnectionFailed, Damaged, DeliveryFailed

    if isinstance(error, DeliveryFailed) and error.deliveries:
        reason = error.deliveries[0].peek()
        return NOT_DONE if reason is None else exit_code(reason)
    if isinstance(error, Damaged | Corrupt):
        return DAMAGE_FOUND
    if isinstance(error, ConnectionFailed):
        return NOT_REACHED
    return WRONG_USAGE if type(error) in (BadRequest, ConfigError) else NOT_DONE


# `tfmq completion`: the line that teaches a shell to complete commands, options, and names that the broker knows.

SECONDS: Final = 1.0
"""For a broker to answer: a person waits with a finger on the key."""
ITEMS: Final = 200

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def offered(names: Callable[[Admin], Iterable[str | CompletionItem]]) -> Complete:
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
