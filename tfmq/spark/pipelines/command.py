"""What the command lines of all pipelines share: options, the Spark session, errors as sentences, exit codes.

Exit codes are those of `tfmq`: 0 done, 1 not done (the sentence says why), 2 wrong usage, 3 no broker reached, 4
damage found.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from tfmq.cli import main as tfmq_command
from tfmq.cli.output import Output
from tfmq.cli.values import Duration
from tfmq.client.connection.connection import SECONDS
from tfmq.errors import BadRequest, NotSupported
from tfmq.spark.log_reader import Address
from tfmq.spark.pipelines.spark_jobs import Progress, reason_in, shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Function = TypeVar("Function", bound=Callable[..., Any])

PROGRAM: Final = "python -m tfmq.spark.pipelines"
MASTER: Final = "local[*]"
UNDER_SPARK_SUBMIT: Final = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit in the environment of the program that it runs."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a pipeline: what the user asked of output and Spark."""

    name: str
    output: Output
    master: str | None = None

    @contextmanager
    def spark(self) -> Iterator[SparkSession]:
        """The session that is there already (a notebook, spark-submit), else one of its own, stopped at the end.

        Raises NotSupported (no Java), BadRequest (a master that Spark does not know).
        """
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        if SparkContext._active_spark_context is not None:
            yield SparkSession.builder.getOrCreate()
            return
        with interruptible() as as_before:
            session = started(f"tfmq {self.name}", self.master)
            as_before()
            try:
                yield session
            finally:
                session.stop()

    @contextmanager
    def progress(self, text: str, total_bytes: int | None) -> Iterator[Progress]:
        """Rows, bytes, rate and rest on standard error while the block runs; silent with --quiet or --json."""
        with shown(self.output, text, total_bytes) as progress:
            yield progress


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl-C in the block is one KeyboardInterrupt, with nothing on standard error. The block starts a Spark, and then
    calls what it gets.

    PySpark would ask Java from within its own handler to cancel what runs, while it waits for an answer of Java's;
    py4j tells the root logger of that, with tracebacks.
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
    """Whether it is a Ctrl-C, or came while one was cleared up after."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def started(title: str, master: str | None) -> SparkSession:
    """A session for one run: quiet, on 127.0.0.1 where it is local, with this Python in its workers."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(title).config("spark.ui.showConsoleProgress", "false")
    if UNDER_SPARK_SUBMIT not in os.environ:
        master = master or MASTER
        builder = (
            builder.master(master).config("spark.ui.enabled", "false").config("spark.log.level", "ERROR")
        )
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
        if (reason := reason_in(error)) is not None and "master" in reason.lower():
            raise BadRequest(f"Spark cannot use the master {master!r}: {reason}") from error
        raise


def pipeline_options(name: str) -> Callable[[Function], Function]:
    """The options that each pipeline has; the command gets them as one argument `job`."""

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
    """Raises UsageError unless there are either names of topics or --all."""
    if topics and everything:
        raise click.UsageError("name the topics, or say --all, not both.")
    if not topics and not everything:
        raise click.UsageError("name the topics, or say --all.")


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a pipeline's command line, or that of all where `name` is empty; its exit code. Errors are a sentence on
    standard error."""
    code = tfmq_command.run(arguments, command, f"{PROGRAM}.{name}" if name else PROGRAM)
    if code == tfmq_command.INTERRUPTED:
        click.echo("tfmq: interrupted. Run the same again: it gives what one run would have given.", err=True)
    return code


def leave(command: click.Command, name: str) -> None:
    """Run it and leave with its exit code."""
    tfmq_command.open_what_is_closed()
    tfmq_command.say_warnings()
    sys.exit(run(command, name))


# Which broker, or whose data folder, a pipeline reads: options and what they mean.


def address_options(command: Any) -> Any:
    """--servers, --path, --timeout."""
    for option in (
        click.option(
            "--timeout",
            type=Duration(),
            default=SECONDS,
            show_default=True,
            help="How long a broker that is away is waited for.",
        ),
        click.option(
            "--path",
            metavar="DATA",
            type=click.Path(path_type=Path),
            help="Read the files of this data folder instead of asking a broker.",
        ),
        click.option(
            "--servers",
            metavar="HOST:PORT",
            help="The broker's address [$TFMQ_SERVERS, else 127.0.0.1:8367].",
        ),
    ):
        command = option(command)
    return command


def address_of(servers: str | None, path: Path | None, timeout: float) -> Address:
    """Raises BadRequest where both are named."""
    if path is not None:
        if servers is not None:
            raise BadRequest("Name either --servers or --path, not both.")
        return Address(None, str(path.resolve()), timeout)
    return Address(broker_of(servers), None, timeout)


def broker_of(servers: str | None) -> str:
    """What is meant where none is named; tasks elsewhere have another environment, so it is settled here."""
    return servers or os.environ.get("TFMQ_SERVERS") or "127.0.0.1:8367"


# How a command line reads sizes in bytes.

UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE: Final = re.compile(r"(\d+) ?([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)


def size_bytes(text: str) -> int:
    """'64M', '64 MiB', '4g', '65536'; units are powers of 1024. Raises ValueError with what to write."""
    found = SIZE.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no size: write a number above 0 and K, M, G or T, as in 64M")
    return int(found[1]) * UNITS[found[2].upper()]


class Size(click.ParamType):  # type: ignore[type-arg]
    """A size in bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return size_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, context)
