"""The `tfmq` command: the command group, shell completion, and error output with exit codes.

Exit codes: 0 done, 1 not done (the printed sentence has the reason), 2 wrong usage, 3 no broker reached, 4 damage
found, 130 ended by Ctrl-C.
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


# Commands are imported when they are used, so that `tfmq --help` and completion are fast.
COMMANDS = {
    "send": "tfmq.cli.send:send",
    "read": "tfmq.cli.read:read",
    "run": "tfmq.cli.worker:run",
    "trace": "tfmq.cli.trace:trace",
    "topic": "tfmq.cli.topic:topic",
    "group": "tfmq.cli.group:group",
    "tx": "tfmq.cli.tx:tx",
    "delay": "tfmq.cli.delay:delay",
    "schedule": "tfmq.cli.schedule:schedule",
    "dlq": "tfmq.cli.dlq:dlq",
    "user": "tfmq.cli.user:user",
    "log": "tfmq.cli.log:log",
    "replica": "tfmq.cli.replica:replica",
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
"""Names of Spark pipelines, which are not commands of `tfmq`."""

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_DONE, WRONG_USAGE, NOT_REACHED, DAMAGE_FOUND = 1, 2, 3, 4
NO_NUMBER: Final = "is not a valid integer range."
"""How click says that a value of `click.IntRange` is not a number."""
INTERRUPTED = 130  # the exit code that shells expect of a program ended by Ctrl-C


class OutputClosed(Exception):
    """Replaces the BrokenPipeError of a closed pipe (`tfmq read t | head`), which click would report as a failure."""


class LazyGroup(click.Group):
    """A click group that imports each command when it is used. `targets`: name -> "module:attribute"."""

    targets: Mapping[str, str] = COMMANDS

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            raise OutputClosed from error

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
    """Print the folder that has the docs of this installation: the checkout, or the folder installed by the wheel."""
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
        raise click.ClickException("This installation of tfmq has no docs: install it with pip, from a wheel.")
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
    """Command line of a tfmq broker: send, read, manage topics, check files."""


def main(arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "tfmq") -> None:
    """Run the command line and exit with its code. Each expected error is one sentence on standard error."""
    open_closed_streams()
    print_log_warnings()
    sys.exit(run(arguments, command, name))


def run(arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "tfmq") -> int:
    """Run the command line, `tfmq` or another `command`; return the exit code."""
    try:
        code = (command or commands).main(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name=name, standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            return INTERRUPTED
        click.echo("stopped", err=True)
        return 1
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption):
            # click's own choice of similar options counts the dashes as common characters.
            known = {each.lstrip("-"): each for each in error.possibilities or ()}
            close = [known[each] for each in difflib.get_close_matches(error.option_name.lstrip("-"), known)]
            error = click.NoSuchOption(error.option_name, error.message, close, error.ctx)
        elif isinstance(error, click.BadParameter) and error.message.endswith(NO_NUMBER):
            said = f"{error.message.removesuffix(NO_NUMBER)}is not a whole number."
            error = click.BadParameter(said, error.ctx, error.param, error.param_hint)
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"tfmq: {error.format_message()}", err=True)
        return error.exit_code
    except OutputClosed:
        discard_output()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return report_error(error)


def open_closed_streams() -> None:
    """Open closed standard streams (`tfmq status >&-`) on /dev/null.

    Otherwise a write to a closed stream would fail with a traceback, or the next opened file would get the stream's
    file descriptor, and output would be written into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


class CurrentStderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Logging handler that writes to the current `sys.stderr`, which a progress bar replaces temporarily."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def print_log_warnings() -> None:
    """Print the client's log warnings, such as a lost connection or a damaged range, as sentences."""
    logger = logging.getLogger("tfmq")
    if "_TFMQ_COMPLETE" in os.environ:  # a warning would appear in the line that the user types
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    if not logger.handlers:
        handler = CurrentStderrHandler()
        handler.setFormatter(logging.Formatter("tfmq: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        for what_waits in ("tfmq.connection", "tfmq.client"):  # they log waits for a broker or buffer space as INFO
            logging.getLogger(what_waits).setLevel(logging.INFO)


def discard_output() -> None:
    """Discard buffered output: otherwise Python tries to write it again at exit, fails, and exits with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report_error(error: Exception) -> int:
    """Print an expected error as its sentence and return the exit code; raise any other error."""
    from journal.errors import JournalError
    from tfmq.errors import DeliveryFailed, TfmqError

    if isinstance(error, UnicodeEncodeError):
        click.echo(f"tfmq: {error.object!r} is not UTF-8: only payloads may be any bytes.", err=True)
        return WRONG_USAGE
    if not isinstance(error, TfmqError | JournalError | OSError):
        raise error
    if isinstance(error, OSError) and error.filename is None and error.errno in OUTPUT_ERRORS:
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
    text: object = error
    if isinstance(error, DeliveryFailed) and len(error.deliveries) == 1:
        text = error.deliveries[0].peek() or error  # more specific than the error of the flush
    if isinstance(error, OSError) and not isinstance(error, TfmqError | JournalError) and error.filename:
        text = f"{error.filename}: {error.strerror}"  # without [Errno 13]
    click.echo(f"tfmq: {text}", err=True)
    return exit_code(error)


def exit_code(error: BaseException) -> int:
    """Return the exit code for an expected error. For a DeliveryFailed, the error of the first delivery decides."""
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


# `tfmq completion`: the script that completes commands, options, and names of the broker.

COMPLETION_TIMEOUT: Final = 1.0
"""Timeout in seconds of a request for a completion. It is short, because the user waits at the prompt."""
COMPLETIONS_MAX: Final = 200

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_names(names: Callable[[Admin], Iterable[str | CompletionItem]]) -> Complete:
    """Return a click completion. It offers the names that `names` requests from the broker, if the reply is in time."""

    def complete(context: click.Context, argument: click.Parameter, start: str) -> list[CompletionItem]:
        from tfmq.admin import Admin
        from tfmq.errors import TfmqError

        servers = context.params.get("servers")
        if (servers or os.environ.get("TFMQ_SERVERS", "")).startswith("file:"):
            return []  # a request would start a broker
        try:
            with Admin(servers, timeout=COMPLETION_TIMEOUT) as admin:
                items = (CompletionItem(each) if isinstance(each, str) else each for each in names(admin))
                found = (each for each in items if each.value.startswith(start) and each.value.isprintable())
                return list(islice(found, COMPLETIONS_MAX))
        except TfmqError:
            return []

    return complete


complete_topics: Final = complete_names(lambda admin: (each.name for each in admin.topics()))
complete_groups: Final = complete_names(lambda admin: (each.group for each in admin.groups()))


@click.command(epilog='\b\nExample:\n  eval "$(tfmq completion bash)"      put it into ~/.bashrc to keep it')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(commands, {}, "tfmq", "_TFMQ_COMPLETE").source())
