"""`tfmq run`: a worker. It imports a consumer of the user's and runs its listeners, in one process or several."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from tfmq.cli.output import Output, did_you_mean, output_options

ORDERS = ("partition", "key", "none")


@click.command(
    short_help="Run the listeners of a consumer.",
    epilog="\b\nExamples:\n  tfmq run billing:consumer\n  tfmq run shop.billing:consumer --processes 4\n"
    "  tfmq run billing:consumer --workers 8 --order key\n  tfmq run billing:consumer --reload",
)
@click.argument("target", metavar="MODULE:CONSUMER")
@click.option(
    "--processes", type=click.IntRange(1, 1000), default=1, help="So many members of the group [1]."
)
@click.option(
    "--workers", type=click.IntRange(1, 1000), default=1, help="Messages at a time in each process [1]."
)
@click.option(
    "--order", type=click.Choice(ORDERS), default="partition", help="What a message waits for [partition]."
)
@click.option("--reload", is_flag=True, help="Begin anew when a file of Python below this folder changes.")
@click.option("--watched", is_flag=True, hidden=True, help="End when standard input does.")
@output_options
def run(
    target: str, processes: int, workers: int, order: str, reload: bool, watched: bool, output: Output
) -> int:
    """Import MODULE, from this folder too, and run what its CONSUMER has registered with `@consumer.on(...)`.

    CONSUMER is a `tfmq.Consumer` or `tfmq.aio.Consumer`, or a function that makes one. SIGTERM and Ctrl-C finish the
    messages in work, save, and leave the group; a second one ends at once. With --processes, one that dies is started
    again.
    """
    if output.servers is not None:
        os.environ["TFMQ_SERVERS"] = output.servers
    if processes == 1 and not reload:
        if watched:
            end_with_input()
        work(target, workers, order, output.quiet)
        return 0
    from tfmq.cli.processes import Processes, command_of

    begin = command_of(target, workers, order, output.quiet)
    return Processes(begin, processes, say=output.say, folder=Path.cwd() if reload else None).run()


def work(target: str, workers: int, order: Any, quiet: bool) -> None:
    """One process of it, until a signal or an error."""
    consumer = consumer_of(target)
    if not quiet:
        logging.getLogger("tfmq").setLevel(logging.INFO)
    from tfmq.aio_consumer import Consumer as AsyncConsumer

    if isinstance(consumer, AsyncConsumer):
        from tfmq.client.run_tasks import to_the_end

        to_the_end(consumer.run(workers=workers, order=order))
    else:
        consumer.run(workers=workers, order=order)


def consumer_of(target: str) -> Any:
    """The consumer that `MODULE:CONSUMER` names. Raises `click.UsageError`; what the module raises passes."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise click.UsageError(f"{target!r} names no consumer: write MODULE:CONSUMER, as billing:consumer.")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise click.UsageError(f"there is no module {module_name!r} here ({os.getcwd()}).") from None
    for name in path.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [each for each in dir(found) if not each.startswith("_")])
            raise click.UsageError(f"{module_name!r} has no {name!r}.{hint}")
        found = getattr(found, name)
    if not is_consumer(found) and callable(found):
        found = found()
    if not is_consumer(found):
        raise click.UsageError(
            f"{target} is a {type(found).__name__}, not a tfmq.Consumer or tfmq.aio.Consumer."
        )
    return found


def is_consumer(found: Any) -> bool:
    from tfmq.aio_consumer import Consumer as AsyncConsumer
    from tfmq.consumer import Consumer

    return isinstance(found, Consumer | AsyncConsumer)


def end_with_input() -> None:
    """Whoever started this process holds the other end of its standard input: when he dies, it ends in order."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="tfmq-parent", daemon=True).start()
