"""Common parts of the pipelines' command lines: options, Spark session, errors, exit codes.

Exit codes are those of `tfmq`: 0 success, 1 failure (with a sentence on standard error), 2 wrong usage, 3 broker
not reachable, 4 damage found.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from tfmq.cli import main as tfmq_command
from tfmq.cli.option_types import Duration
from tfmq.cli.output import Output
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.errors import BadRequest, NotSupported
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.spark_jobs import SparkTaskRunner, java_reason
from tfmq.units import parse_size

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Function = TypeVar("Function", bound=Callable[..., Any])

HELP: Final = {"help_option_names": ["-h", "--help"]}
PROGRAM: Final = "python -m tfmq.spark.pipelines"
MASTER: Final = "local[*]"
UNDER_SPARK_SUBMIT: Final = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit in the environment of the program that it runs."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a pipeline's command: its output and Spark options."""

    name: str
    output: Output
    master: str | None = None

    @contextmanager
    def spark(self) -> Iterator[SparkSession]:
        """Use the active session (a notebook, spark-submit), else start one and stop it at the end.

        Raises NotSupported (no Java), BadRequest (a master that Spark does not know).
        """
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        if SparkContext._active_spark_context is not None:
            yield SparkSession.builder.getOrCreate()
            return
        with single_interrupt() as as_before:
            session = start_session(f"tfmq {self.name}", self.master)
            as_before()
            try:
                yield session
            finally:
                session.stop()

    @contextmanager
    def tasks(self) -> Iterator[SparkTaskRunner]:
        """Yield a runner of tasks in a session that starts at its first call and ends with the block."""
        with ExitStack() as stack:
            yield SparkTaskRunner(lambda: stack.enter_context(self.spark()))


@contextmanager
def single_interrupt() -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C in the block into one KeyboardInterrupt, without output on standard error.

    Yields a function to call right after the block has started Spark: it restores the handler of SIGINT that was
    set before. PySpark's own handler would call Java to cancel the running job while a call to Java is in progress;
    py4j then logs tracebacks to the root logger, which are suppressed here.
    """
    silent = logging.NullHandler()
    logging.getLogger().addHandler(silent)
    before = signal.getsignal(signal.SIGINT)

    def as_before() -> None:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)

    try:
        yield as_before
    except BaseException as error:
        if was_interrupted(error):
            raise KeyboardInterrupt from None
        raise
    finally:
        logging.getLogger().removeHandler(silent)


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether the error is a KeyboardInterrupt, or was raised while one was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def start_session(title: str, master: str | None) -> SparkSession:
    """Start a session for one run: no console output, this Python in workers, local on 127.0.0.1.

    Raises NotSupported (no Java), BadRequest (a master that Spark does not know).
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(title).config("spark.ui.showConsoleProgress", "false")
    if UNDER_SPARK_SUBMIT not in os.environ:
        master = master or MASTER
        builder = builder.master(master).config("spark.ui.enabled", "false").config("spark.log.level", "ERROR")
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise NotSupported(
            "Spark did not start: it needs a Java runtime, 17 or later, on the PATH or in $JAVA_HOME"
            f" (`java -version` shows it). It said: {str(error).splitlines()[0]}"
        ) from error
    except Exception as error:
        if (reason := java_reason(error)) is not None and "master" in reason.lower():
            raise BadRequest(f"Spark cannot use the master {master!r}: {reason}") from error
        raise


def pipeline_options(name: str) -> Callable[[Function], Function]:
    """Add the options that all pipelines have; the command gets them as one argument `job`."""

    def decorate(command: Function) -> Function:
        @click.option("--master", metavar="URL", help=f"Spark's master [spark-submit's, else {MASTER}].")
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
        @click.option("-q", "--quiet", is_flag=True, help="Print nothing that was not asked for.")
        @functools.wraps(command)
        def wrapped(*args: Any, master: str | None, as_json: bool, quiet: bool, **kwargs: Any) -> Any:
            output = Output(kwargs.get("servers"), as_json, quiet)
            return command(*args, job=Job(name, output, master), **kwargs)

        return wrapped  # type: ignore[return-value]

    return decorate


def check_topics(topics: Sequence[str], everything: bool) -> None:
    """Check that either topics or --all are given. Raises UsageError."""
    if topics and everything:
        raise click.UsageError("name the topics, or give --all, not both.")
    if not topics and not everything:
        raise click.UsageError("name the topics, or give --all.")


def to_ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def parse_window(since: datetime | None, until: datetime | None) -> tuple[int | None, int | None]:
    """Return both ends of a range of append times, in ms since 1970. Raises BadParameter if it is empty."""
    if since is not None and until is not None and until <= since:
        raise click.BadParameter("is not after --since", param_hint="--until")
    return to_ms(since), to_ms(until)


def run_command(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command line of a pipeline, or of all if `name` is empty; return its exit code.

    Errors are printed as a sentence on standard error.
    """
    code = tfmq_command.run(arguments, command, f"{PROGRAM}.{name}" if name else PROGRAM)
    if code == tfmq_command.INTERRUPTED:
        click.echo("tfmq: interrupted. Run the same command again: the result is that of one complete run.", err=True)
    return code


def run_and_exit(command: click.Command, name: str) -> None:
    tfmq_command.open_closed_streams()
    tfmq_command.print_log_warnings()
    sys.exit(run_command(command, name))


timeout_option = click.option(
    "--timeout",
    type=Duration(),
    default=REQUEST_TIMEOUT_SECONDS,
    show_default=True,
    help="How long to wait for a broker that is down.",
)


servers_option = click.option(
    "--servers", metavar="HOST:PORT", help="The broker's address [$TFMQ_SERVERS, else 127.0.0.1:8367]."
)


def address_options(command: Any) -> Any:
    for option in (
        timeout_option,
        click.option(
            "--path",
            metavar="DATA",
            type=click.Path(path_type=Path),
            help="Read the files of this data folder instead of asking a broker.",
        ),
        servers_option,
    ):
        command = option(command)
    return command


def parse_address(servers: str | None, path: Path | None, timeout: float) -> SourceAddress:
    """Return where to read from. Raises BadRequest if both are given."""
    if path is not None:
        if servers is not None:
            raise BadRequest("Name either --servers or --path, not both.")
        return SourceAddress(None, str(path.resolve()), timeout)
    return SourceAddress(resolve_broker(servers), None, timeout)


def resolve_broker(servers: str | None) -> str:
    """Return the broker's address: `servers`, else $TFMQ_SERVERS, else the default.

    Resolved on the driver, because the environment of tasks is another one.
    """
    return servers or os.environ.get("TFMQ_SERVERS") or "127.0.0.1:8367"


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """Click parameter type of a size in bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        size = value if isinstance(value, int) else parse_size(value)
        if not size:
            self.fail(f"{value!r} is no size: write a number above 0 and a unit, as in 64MiB", param, context)
        return size
