"""`tfmq run`: run the listeners of a consumer that the user's module defines, in one or several processes.

A supervisor starts several processes, restarts a process that ended with an error, restarts all when a source file
changes, and stops them. Each process has its own process group, so that Ctrl-C in a terminal reaches only the
supervisor, which passes one signal on to each process. A process ends by itself if the supervisor has died.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from tfmq.backoff import Backoff
from tfmq.cli.main import WRONG_USAGE
from tfmq.cli.option_types import client_id_option
from tfmq.cli.output import Output, did_you_mean, output_options
from tfmq.client.connection.factory import CLIENT_ID_VARIABLE
from tfmq.errors import TfmqError

POLL_SECONDS: Final = 0.1
"""Interval at which ended processes are noticed."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0
"""Maximum pause before a restart; the pause doubles each time a process ended within a minute."""
STABLE_SECONDS: Final = 60.0
NOT_STARTED: Final = 64
"""A process adds this to its exit code if its consumer could not start, so that the supervisor notices that."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def worker_command(target: str, workers: int, order: str, tracebacks: bool, quiet: bool) -> list[str]:
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    options = ["--workers", str(workers), "--order", order, "--watched"]
    options += [*([] if tracebacks else ["--no-tracebacks"]), *(["--quiet"] if quiet else [])]
    return [sys.executable, "-c", main, "run", *options, "--", target]


class WorkerSlot:
    """One of the processes of a supervisor: the running process, or the time at which to start the next one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.start_at = 0.0
        self.backoff = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        self.has_started = False
        """Whether the consumer could start at least once in a process of this slot."""
        self.has_ended = False
        """Whether the last process ended and is not restarted."""


class Supervisor:
    """Starts, restarts and stops `count` processes, each with the command line `command`.

    `report` prints a sentence for the user. `folder`: all processes are restarted when a source file below this folder
    changes (the option --reload); None: never.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        report: Callable[[str], None],
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = list(command)
        self._slots = [WorkerSlot() for _ in range(count)]
        self._print = report
        self._clock = clock
        self._sources = None if folder is None else SourceWatcher(folder)
        self._signals: list[int] = []
        self._stopping = False
        self._restarting = False
        self._code = 0

    def run(self) -> int:
        """Run until all processes have ended, by themselves or after a signal; return the exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            while not all(slot.has_ended for slot in self._slots):
                self.poll()
                time.sleep(POLL_SECONDS)
        finally:
            for slot in self._slots:
                if slot.process is not None:
                    slot.process.kill()
                    slot.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def poll(self) -> None:
        """Pass signals on to the processes, handle changed files and ended processes, start processes that are due."""
        while self._signals:
            number = self._signals.pop(0)
            self._stopping = True
            self._forward_signal(number)
        if self._sources is not None and not self._stopping and self._sources.has_changed():
            self._print("A source file changed: restarting.")
            self._restarting = True
            self._forward_signal(signal.SIGTERM)
        for slot in self._slots:
            self._check_slot(slot)
        if self._restarting and all(slot.process is None for slot in self._slots):
            self._restarting = False
            for slot in self._slots:
                slot.has_ended, slot.start_at = False, 0.0
                slot.backoff.reset()

    def _forward_signal(self, number: int) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.send_signal(number)

    def _check_slot(self, slot: WorkerSlot) -> None:
        process = slot.process
        if process is None:
            if self._stopping:
                slot.has_ended = True
            elif not (slot.has_ended or self._restarting) and self._clock() >= slot.start_at:
                self._start(slot)
            return
        code = process.poll()
        if code is not None:
            slot.process = None
            assert process.stdin is not None
            process.stdin.close()
            self._process_ended(slot, process.pid, code)

    def _start(self, slot: WorkerSlot) -> None:
        slot.started = self._clock()
        slot.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)

    def _process_ended(self, slot: WorkerSlot, pid: int, code: int) -> None:
        lived = self._clock() - slot.started >= STABLE_SECONDS
        has_started = lived or code <= NOT_STARTED
        code -= NOT_STARTED if code > NOT_STARTED else 0
        if self._stopping or self._restarting:
            self._code = self._code or max(0, code)
            return
        cannot_begin = self._sources is None and not (has_started or slot.has_started)
        slot.has_started = slot.has_started or has_started
        if code in (0, WRONG_USAGE) or cannot_begin:  # a new process would end in the same way
            slot.has_ended = self._sources is None
            slot.start_at = float("inf")  # with --reload, the next change of a file restarts the process
            self._code = self._code or code
            if code and self._sources is None:
                self._stopping = True
                self._forward_signal(signal.SIGTERM)
            return
        if lived:
            slot.backoff.reset()
        pause = slot.backoff.advance()
        self._print(f"Process {pid} ended with {code}; it is restarted in {pause:g} s.")
        slot.start_at = self._clock() + pause


@click.command(
    short_help="Run the listeners of a consumer.",
    epilog="\b\nExamples:\n  tfmq run billing:consumer\n  tfmq run shop.billing:consumer --processes 4\n"
    "  tfmq run billing:consumer --workers 8 --order key\n  tfmq run billing:consumer --reload",
)
@click.argument("target", metavar="MODULE:CONSUMER")
@click.option(
    "--processes", type=click.IntRange(1, 1000), default=1, help="Number of processes, each a member of the group [1]."
)
@click.option(
    "--workers", type=click.IntRange(1, 1000), default=1, help="Messages handled at a time in each process [1]."
)
@click.option(
    "--order",
    type=click.Choice(["partition", "key", "none"]),
    default="partition",
    help="What a message waits for [partition].",
)
@click.option(
    "--tracebacks/--no-tracebacks",
    default=True,
    help="Log the traceback of each call that fails, or only the class of the error [--tracebacks].",
)
@click.option("--reload", is_flag=True, help="Restart when a Python file below this folder changes.")
@click.option(
    "--watched", is_flag=True, hidden=True, help="One of several processes: exit at the end of standard input."
)
@click.option("--check", is_flag=True, hidden=True, help="Only check that the consumer can be imported.")
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
    """Import MODULE, also from the current folder, and run the listeners that its CONSUMER has registered with
    `@consumer.on(...)`.

    CONSUMER is a `tfmq.Consumer` or `tfmq.aio.Consumer`, or a function that creates one. SIGTERM and Ctrl-C
    complete the current messages, commit, and leave the group; a second signal ends at once. With
    --processes, a process that ends with an error is restarted.
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
            log_process_id()
            exit_on_stdin_eof()
        return run_worker(target, workers, order, tracebacks, output.quiet, watched)
    begin = worker_command(target, workers, order, tracebacks, output.quiet)
    if not reload:  # first check the consumer in one process, so that an error is printed once
        checked = subprocess.run([*begin[:-2], "--check", "--", target], check=False)
        if checked.returncode:
            return checked.returncode
    return Supervisor(begin, processes, report=output.info, folder=Path.cwd() if reload else None).run()


def run_worker(target: str, workers: int, order: Any, tracebacks: bool, quiet: bool, watched: bool = False) -> int:
    """Run the consumer in this process until a signal or an error; return the exit code.

    `watched`: a supervisor started this process; add NOT_STARTED to the exit code if the consumer could not run.
    """
    consumer = consumer_of(target)
    if not quiet:
        logging.getLogger("tfmq").setLevel(logging.INFO)
    if watched:
        freeze_imports(consumer)
    from tfmq.aio_consumer import Consumer as AsyncConsumer

    try:
        if isinstance(consumer, AsyncConsumer):
            from tfmq.client.worker.asyncio_runner import run_in_new_loop as to_the_end

            to_the_end(consumer.run(workers=workers, order=order, tracebacks=tracebacks))
        else:
            consumer.run(workers=workers, order=order, tracebacks=tracebacks)
    except TfmqError as error:
        if not watched or consumer.stats()["messages"]:
            raise
        from tfmq.cli.main import report_error as explained

        return NOT_STARTED + explained(error)
    except Exception as error:
        frames = handler_frames(error)
        if not frames:
            raise  # a mistake of ours: it keeps its traceback
        raise click.ClickException(handler_error_text(error, frames, tracebacks)) from None
    return 0


def handler_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the calls in the traceback from the handler on; none if no handler raised the error."""
    package, library = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    caller = ""
    for number, frame in enumerate(frames):
        if frame.filename.startswith(package + os.sep):
            caller = frame.filename
        elif not frame.filename.startswith(library + os.sep) or "site-packages" in frame.filename:
            return frames[number:] if caller.startswith(os.path.join(package, "client", "worker", "")) else []
    return []


def handler_error_text(error: BaseException, frames: list[traceback.FrameSummary], with_text: bool) -> str:
    """Return why the run of a consumer without a dead-letter store ended. `with_text`: not only the error's class."""
    words = "".join(traceback.format_exception_only(error)).strip() if with_text else type(error).__name__
    return (
        f"a handler failed finally, in {os.path.relpath(frames[0].filename)}:{frames[0].lineno}: {words}."
        " The run ended before its message, because dead_letters= names no store."
    )


def freeze_imports(consumer: Any) -> None:
    """Import the module of the dead-letter store, then exclude all imported objects from garbage collection.

    Otherwise the last garbage collections of the interpreter take most of the time that an idle process needs to end.
    That adds up when several processes end at the same time.
    """
    where = consumer._core.options.dead_letters
    if where is not None and not str(where).startswith("topic:"):
        import_module("tfmq.dead_letters.sql_store")
    gc.freeze()


class ImportFailed(click.ClickException):
    """The user's module raised an error, so that there is no consumer to run."""

    exit_code = WRONG_USAGE

    def show(self, file: Any = None) -> None:
        click.echo(f"tfmq: {self.message}", err=True)


def consumer_of(target: str) -> Any:
    """Return the consumer that `target` (MODULE:CONSUMER) names. Raises UsageError if `target` names no consumer,
    ImportFailed if the user's code raises an error."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise click.UsageError(f"{target!r} is no consumer: write MODULE:CONSUMER, as billing:consumer.")
    plain = ".".join(part for part in module_name.removesuffix(".py").split("/") if part not in ("", "."))
    if module_name != plain or not all(part.isidentifier() for part in plain.split(".")):
        hint = f" write {plain}:{path}." if all(each.isidentifier() for each in plain.split(".")) else ""
        raise click.UsageError(f"{module_name!r} is no name of a module;{hint or ' it is one as import takes it.'}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = import_consumer_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [each for each in dir(found) if not each.startswith("_")])
            raise click.UsageError(f"{module_name!r} has no {name!r}.{hint}")
        found = getattr(found, name)
    if not is_consumer(found) and callable(found):
        found = call_factory(found, target)
    if not is_consumer(found):
        raise click.UsageError(f"{target} is {describe_object(found)}, not a tfmq.Consumer or tfmq.aio.Consumer.")
    return found


def import_consumer_module(module_name: str) -> Any:
    try:
        return import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise click.UsageError(f"there is no module {module_name!r} here ({os.getcwd()}).") from None
        raise ImportFailed(f"{module_name} cannot be imported: {import_error_text(error)}") from None


def call_factory(factory: Any, target: str) -> Any:
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
        pass  # inspect.signature() fails for some built-ins
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise ImportFailed(f"{target} made no consumer: {import_error_text(error)}") from None


def import_error_text(error: BaseException) -> str:
    """Return the text of an error in the user's module, with its location and the calls in the user's files."""
    ours = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(importlib.__file__) + os.sep)
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(("<frozen importlib", *ours))
    ]
    location = (frames[-1].filename, frames[-1].lineno) if frames else None
    if isinstance(error, SyntaxError) and error.filename:
        location = (error.filename, error.lineno)
        words = f"{type(error).__name__}: {error.msg}"
    else:
        words = "".join(traceback.format_exception_only(error)).strip()
    where = "" if location is None else f"{os.path.relpath(location[0])}:{location[1]}: "
    way = "\n" + "".join(traceback.format_list(frames)).rstrip() if len(frames) > 1 else ""
    return f"{where}{words}{way}"


def describe_object(found: Any) -> str:
    kind = type(found)
    if (kind.__module__, kind.__name__) == ("tfmq.twisted_consumer", "Consumer"):
        return "a tfmq.twisted.Consumer, which your own program runs in its reactor (docs/twisted.md)"
    return f"{'an' if kind.__name__[0].lower() in 'aeiou' else 'a'} {kind.__name__}"


def is_consumer(found: Any) -> bool:
    from tfmq.aio_consumer import Consumer as AsyncConsumer
    from tfmq.consumer import Consumer

    return isinstance(found, Consumer | AsyncConsumer)


def log_process_id() -> None:
    """Prefix log lines with the process id, because several processes write to one terminal."""
    for handler in logging.getLogger("tfmq").handlers:
        handler.setFormatter(logging.Formatter("tfmq[%(process)d]: %(message)s"))


def exit_on_stdin_eof() -> None:
    """Start a thread that stops this process at the end of standard input, because the supervisor has died then."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="tfmq-parent", daemon=True).start()


FILES_MAX: Final = 10_000
"""Maximum number of watched files. A folder with more Python files is probably the whole disk, and takes too long."""


class SourceWatcher:
    """Detects changes of the Python files below a folder, without hidden folders and virtual environments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_times = self._scan()

    def has_changed(self) -> bool:
        before, self._last_times = self._last_times, self._scan()
        return before != self._last_times

    def _scan(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for folder, folders, names in os.walk(self._folder):
            folders[:] = [
                name
                for name in folders
                if not name.startswith((".", "__pycache__")) and not (Path(folder) / name / "pyvenv.cfg").exists()
            ]
            for name in names:
                if name.endswith(".py") and len(found) < FILES_MAX:
                    path = os.path.join(folder, name)
                    try:
                        found[path] = os.stat(path).st_mtime_ns
                    except FileNotFoundError:  # an editor is just replacing the file
                        continue
        return found
