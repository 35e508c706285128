"""`tfmq run`: a worker. It imports a consumer of the user's and runs its listeners, in one process or several."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from tfmq.cli.output import Output, did_you_mean, output_options
from tfmq.cli.values import client_id_option
from tfmq.client.connection.factory import CLIENT_ID_VARIABLE
from tfmq.errors import TfmqError

ORDERS = ("partition", "key", "none")


@click.command(
    short_help="Run the listeners of a consumer.",
    epilog="\b\nExamples:\n  tfmq run billing:consumer\n  tfmq run shop.billing:consumer --processes 4\n"
    "  tfmq run billing:consumer --workers 8 --order key\n  tfmq run billing:consumer --reload",
)
@click.argument("target", metavar="MODULE:CONSUMER")
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    default=1,
    help="Number of processes, each a member of the group [1].",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 1000),
    default=1,
    help="Messages handled at a time in each process [1].",
)
@click.option(
    "--order", type=click.Choice(ORDERS), default="partition", help="What a message waits for [partition]."
)
@click.option(
    "--tracebacks/--no-tracebacks",
    default=True,
    help="Log the traceback of each call that fails, or only the class of the error [--tracebacks].",
)
@click.option("--reload", is_flag=True, help="Restart when a Python file below this folder changes.")
@click.option("--watched", is_flag=True, hidden=True, help="One of several: end when standard input does.")
@click.option("--check", is_flag=True, hidden=True, help="Only look whether the consumer is there.")
@client_id_option
@output_options
def run(
    target: str,
    processes: int,
    workers: int,
    order: str,
    tracebacks: bool,
    reload: bool,
    watched: bool,
    check: bool,
    client_id: str | None,
    output: Output,
) -> int:
    """Import MODULE, from this folder too, and run what its CONSUMER has registered with `@consumer.on(...)`.

    CONSUMER is a `tfmq.Consumer` or `tfmq.aio.Consumer`, or a function that makes one. SIGTERM and Ctrl-C finish the
    messages in work, save, and leave the group; a second one ends at once. With --processes, one that dies is started
    again.
    """
    if output.servers is not None:
        os.environ["TFMQ_SERVERS"] = output.servers
    if client_id is not None:
        os.environ[CLIENT_ID_VARIABLE] = client_id
    if check:
        consumer_of(target)
        return 0
    if processes == 1 and not reload:
        if watched:
            say_who()
            end_with_input()
        return work(target, workers, order, tracebacks, output.quiet, watched)
    from tfmq.cli.processes import Processes, checked, command_of

    begin = command_of(target, workers, order, tracebacks, output.quiet)
    if not reload and (code := checked(begin)):
        return code
    return Processes(begin, processes, say=output.say, folder=Path.cwd() if reload else None).run()


def work(target: str, workers: int, order: Any, tracebacks: bool, quiet: bool, watched: bool = False) -> int:
    """One process of it, until a signal or an error; the exit code. `watched`: that says whether it could begin."""
    consumer = consumer_of(target)
    if not quiet:
        logging.getLogger("tfmq").setLevel(logging.INFO)
    if watched:
        freeze_imports(consumer)
    from tfmq.aio_consumer import Consumer as AsyncConsumer

    try:
        if isinstance(consumer, AsyncConsumer):
            from tfmq.client.worker.asyncio_runner import to_the_end

            to_the_end(consumer.run(workers=workers, order=order, tracebacks=tracebacks))
        else:
            consumer.run(workers=workers, order=order, tracebacks=tracebacks)
    except TfmqError as error:
        if not watched or consumer.stats()["messages"]:
            raise
        from tfmq.cli.main import explained
        from tfmq.cli.processes import NEVER_BEGAN

        return NEVER_BEGAN + explained(error)
    return 0


def freeze_imports(consumer: Any) -> None:
    """Leave everything that is imported by now out of the garbage collections to come, with the store of dead letters,
    which `run` would import. The last collections, when the interpreter ends, are most of the time that an idle process
    takes to end, and several end at the same time."""
    where = consumer._core.options.dead_letters
    if where is not None and not str(where).startswith("topic:"):
        import_module("tfmq.dead_letters.sql_store")
    gc.freeze()


class NotRunnable(click.ClickException):
    """What the user's own module raised, so that there is no consumer to run."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"tfmq: {self.message}", err=True)


def consumer_of(target: str) -> Any:
    """The consumer that `MODULE:CONSUMER` names. Raises `click.UsageError`; NotRunnable for what the module raises."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise click.UsageError(f"{target!r} names no consumer: write MODULE:CONSUMER, as billing:consumer.")
    plain = ".".join(part for part in module_name.removesuffix(".py").split("/") if part not in ("", "."))
    if module_name != plain or not all(part.isidentifier() for part in plain.split(".")):
        hint = f" write {plain}:{path}." if all(each.isidentifier() for each in plain.split(".")) else ""
        raise click.UsageError(
            f"{module_name!r} is no name of a module;{hint or ' it is one as import takes it.'}"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = imported(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [each for each in dir(found) if not each.startswith("_")])
            raise click.UsageError(f"{module_name!r} has no {name!r}.{hint}")
        found = getattr(found, name)
    if not is_consumer(found) and callable(found):
        found = made_by(found, target)
    if not is_consumer(found):
        raise click.UsageError(f"{target} is {described(found)}, not a tfmq.Consumer or tfmq.aio.Consumer.")
    return found


def imported(module_name: str) -> Any:
    """The module. Raises as `consumer_of`."""
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise click.UsageError(f"there is no module {module_name!r} here ({os.getcwd()}).") from None
        raise NotRunnable(f"{module_name} cannot be imported: {told(error)}") from None
    except (Exception, SystemExit) as error:
        raise NotRunnable(f"{module_name} cannot be imported: {told(error)}") from None


def made_by(factory: Any, target: str) -> Any:
    """What it returns. Raises as `consumer_of`."""
    if inspect.iscoroutinefunction(factory):
        raise click.UsageError(f"{target} is a coroutine function; what makes a consumer is a plain one.")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise click.UsageError(
            f"{target} cannot be called without arguments, as `tfmq run` calls a function that makes a consumer:"
            f" {error}."
        ) from None
    except ValueError:
        pass  # of some that are built in nothing is known
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise NotRunnable(f"{target} made no consumer: {told(error)}") from None


def told(error: BaseException) -> str:
    """Where it came from, in files that are not ours, and its own words; if it went through several places, all."""
    ours = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(importlib.__file__) + os.sep)
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(("<frozen importlib", *ours))
    ]
    place = (frames[-1].filename, frames[-1].lineno) if frames else None
    if isinstance(error, SyntaxError) and error.filename:
        place = (error.filename, error.lineno)
        words = f"{type(error).__name__}: {error.msg}"
    else:
        words = "".join(traceback.format_exception_only(error)).strip()
    where = "" if place is None else f"{os.path.relpath(place[0])}:{place[1]}: "
    way = "\n" + "".join(traceback.format_list(frames)).rstrip() if len(frames) > 1 else ""
    return f"{where}{words}{way}"


def described(found: Any) -> str:
    """It in a sentence."""
    kind = type(found)
    if (kind.__module__, kind.__name__) == ("tfmq.twisted_consumer", "Consumer"):
        return "a tfmq.twisted.Consumer, which your own program runs in its reactor (docs/twisted.md)"
    return f"{'an' if kind.__name__[0].lower() in 'aeiou' else 'a'} {kind.__name__}"


def is_consumer(found: Any) -> bool:
    from tfmq.aio_consumer import Consumer as AsyncConsumer
    from tfmq.consumer import Consumer

    return isinstance(found, Consumer | AsyncConsumer)


def say_who() -> None:
    """What is logged here names this process, as several write to one terminal."""
    for handler in logging.getLogger("tfmq").handlers:
        handler.setFormatter(logging.Formatter("tfmq[%(process)d]: %(message)s"))


def end_with_input() -> None:
    """Whoever started this process holds the other end of its standard input: when he dies, it ends in order."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="tfmq-parent", daemon=True).start()
