"""Common parts of the pipelines' command lines: options, Spark session, errors, exit codes.

Exit codes are the same as for `tfmq`: 0 success, 1 failure (with a sentence on standard error), 2 wrong usage, 3 broker
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
from tfmq.cli.option_types import Duration, TextType
from tfmq.cli.output import Output
from tfmq.client.connection.addresses import PASSWORD_VARIABLE, with_password
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
"""Environment variable that spark-submit sets for the program that it runs."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a pipeline's command: its output and Spark options."""

    name: str
    output: Output
    master: str | None = None

    @contextmanager
    def spark(self) -> Iterator[SparkSession]:
        """Yield the session, or start one for the block. Raises NotSupported (no Java), BadRequest (unknown master)."""
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
        """Yield a runner of Spark tasks. Its Spark session starts at the first call and ends with the `with` block."""
        with ExitStack() as stack:
            yield SparkTaskRunner(lambda: stack.enter_context(self.spark()))


@contextmanager
def single_interrupt() -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C in the `with` block into one KeyboardInterrupt, without output on standard error.

    When Spark starts, it replaces the handler of SIGINT by one that calls Java to cancel the running job. The call
    fails if another call to Java is in progress, and py4j logs tracebacks to the root logger. So this context yields a
    function that restores the former handler; the caller must call this function right after Spark has started. The
    context also suppresses the tracebacks of py4j.
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
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__context__  # `error` may have been raised while the interrupt was handled
        if cause is not None:
            raise KeyboardInterrupt from None
        raise
    finally:
        logging.getLogger().removeHandler(silent)


def start_session(title: str, master: str | None) -> SparkSession:
    """Start a Spark session that prints no progress. Raises NotSupported (no Java), BadRequest (an unknown master)."""
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
    """Return a decorator that adds the options of all pipelines; the command gets a `Job` as its argument `job`."""

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
    """Raise UsageError if neither topics nor --all are given, or both."""
    if bool(topics) == everything:
        raise click.UsageError(f"name the topics, or give --all{', not both' if everything else ''}.")


def to_ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def parse_window(since: datetime | None, until: datetime | None) -> tuple[int | None, int | None]:
    """Return both ends of a range of append times, in ms since 1970. Raises BadParameter if the range is empty."""
    if since is not None and until is not None and until <= since:
        raise click.BadParameter("is not after --since", param_hint="--until")
    return to_ms(since), to_ms(until)


def run_command(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run `command`, print its error if it fails, and return its exit code. `name`: pipeline; "": the group of all."""
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


path_option = click.option(
    "--path",
    metavar="DATA",
    type=click.Path(path_type=Path),
    help="Read the files of this data folder instead of asking a broker.",
)


def address_options(command: Any) -> Any:
    return servers_option(path_option(timeout_option(command)))


def parse_address(servers: str | None, path: Path | None, timeout: float) -> SourceAddress:
    """Return the address of the broker or data folder to read. Raises BadRequest if `servers` and `path` are set."""
    if path is not None:
        if servers is not None:
            raise BadRequest("Name either --servers or --path, not both.")
        return SourceAddress(None, str(path.resolve()), timeout)
    return SourceAddress(resolve_broker(servers), None, timeout)


def resolve_broker(servers: str | None) -> str:
    """Return `servers`, else $TFMQ_SERVERS, else the default, with $TFMQ_PASSWORD for a user without a password.

    Only for the driver: tasks have another environment. The result may have a password, so do not show it.
    """
    broker = servers or os.environ.get("TFMQ_SERVERS") or "127.0.0.1:8367"
    password = os.environ.get(PASSWORD_VARIABLE)
    return with_password(broker, password) if password else broker


class SizeType(TextType):
    name = "SIZE"

    def parse(self, text: str) -> int:
        size = parse_size(text)
        if not size:
            raise ValueError(f"{text!r} is no size: write a number above 0 and a unit, as in 64MiB")
        return size
