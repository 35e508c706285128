"""`tfmq-server`: the command that runs a broker."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from journal.errors import Corrupt, Full, JournalError, Locked, NewerFormat
from journal.filenames import TRANSACTIONS_FOLDER
from tfmq.data_dir import check_data_folder, path_error_advice, remove_address, write_address
from tfmq.errors import ConfigError, TfmqError
from tfmq.server.log_lines import set_up_logging

if TYPE_CHECKING:
    from tfmq.config import Config
    from tfmq.server.server import Server


HUNG_SECONDS: Final = 1.0
"""How long the end of the process waits for calls of a store."""


# Notifications to systemd that the server is ready, or that it stops


def notify_systemd(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send `state` ("READY=1", "STOPPING=1") to systemd, if it started this process. Return whether it was sent.

    Protocol of sd_notify(3): a datagram to the socket in NOTIFY_SOCKET; a leading "@" denotes an abstract socket.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as there:
        try:
            there.sendto(state.encode(), "\0" + path[1:] if path[0] == "@" else path)
        except OSError:
            return False
    return True


# Start failures: a sentence that says what to do, and the exit code


def unknown_host_sentence(listen: str) -> str:
    """Return a sentence that follows another one if the host of `listen` (HOST:PORT) does not resolve, else ""."""
    from tfmq.config import split_address

    host = split_address(listen)[0] if listen else ""
    if not host:
        return ""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is too long
        return f" Besides, the host {host!r} is not known ({getattr(error, 'strerror', None) or error})."
    return ""


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error at the start: 2 for a wrong configuration, else 1."""
    return 2 if isinstance(error, ConfigError) else 1


def startup_sentence(error: BaseException, data: str) -> str | None:
    """Return the message for a start failure; None for an error that needs a traceback."""
    if isinstance(error, TfmqError):
        return error.sentence
    if isinstance(error, JournalError):
        return _journal_error_sentence(error, data)
    if isinstance(error, OSError):
        return _os_error_sentence(error, data)
    return None


def _journal_error_sentence(error: JournalError, data: str) -> str:
    if isinstance(error, Locked):
        process = f" (process {error.holder})" if error.holder else ""
        return (
            f"The data folder {data} is in use by another tfmq server{process}. Stop that one, or choose another "
            "folder with --data."
        )
    if isinstance(error, NewerFormat):
        return (
            f"The data folder {data} was written by a newer version of tfmq: {error.path} has format version "
            f"{error.found}, this one knows up to {error.known}. Start the newer version."
        )
    if isinstance(error, Full):
        return f"There is no space left on the disk of {data}. Make some, then start again."
    if isinstance(error, Corrupt) and os.path.basename(os.path.dirname(error.path)) == TRANSACTIONS_FOLDER:
        folder = os.path.dirname(error.path)
        return (
            f"The journal of transactions is damaged: {error}. Nothing was changed. `tfmq log verify {folder}` says"
            f" what is left of it, `tfmq log repair {data}` repairs it and reports what is lost; or restore the whole"
            " data folder from a backup (docs/operations.md)."
        )
    if isinstance(error, Corrupt) and "start again" in error.reason:
        return f"The data folder {data} is not whole: {error}. See docs/operations.md."
    if isinstance(error, Corrupt):
        return (
            f"The data folder {data} is damaged: {error}. `tfmq log repair {data}` repairs it and reports what is lost"
            " and what cannot be known; or restore the whole data folder from a backup (docs/operations.md)."
        )
    return f"The server cannot start on {data}: {error}."


def _os_error_sentence(error: OSError, data: str) -> str:
    path = error.filename or data
    if error.errno in (errno.EACCES, errno.EPERM):
        user = f"user {os.geteuid()}"
        # The path of a file that could not be created does not exist. The rights that are missing are its folder's.
        there = _existing_path(path)
        return f"The server may not use {there}: {user} has no rights there. Change its owner or rights, or use --data."
    if error.errno == errno.EROFS:
        return f"{path} is on a file system that is mounted read-only. Choose another folder with --data."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"There is no space left on the disk of {data}. Make some, then start again."
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not os.path.isdir(data):
        return f"{data} is no folder. Choose another place for the data with --data."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "The limit of open files is too low for the logs of this data folder. Raise it (ulimit -n)."
    if error.errno == errno.ENOENT:
        return f"{path} cannot be created: {error.strerror}. Choose another place for the data with --data."
    way_on = path_error_advice(error, data)
    if way_on is not None:
        return f"The server cannot start: {way_on}"
    return f"The server cannot start: {path}: {error.strerror or error}."


def _existing_path(path: str) -> str:
    """Return `path`, or the nearest folder above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path) or "."
    return path


logger = logging.getLogger("tfmq.server")

GC_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of Python's garbage collector. They are high, because requests create few cycles of objects, and a full
collection takes milliseconds."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "file", metavar="FILE", help="Configuration in TOML; --check-config prints every key.")
@click.option("--data", metavar="DIR", help="Data folder; the default is ./tfmq-data.")
@click.option(
    "--listen", metavar="HOST:PORT", help="Where to listen, 127.0.0.1:8367 by default; port 0 takes a free one."
)
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one key; may be repeated.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="How much is logged on standard error; info by default.",
)
@click.option("--log-json", is_flag=True, default=None, help="One JSON object a log line.")
@click.option("--check-config", is_flag=True, help="Print every key, its value and where that is from, and exit.")
@click.version_option(package_name="tfmq", message="tfmq-server %(version)s")
def main(
    file: str | None,
    data: str | None,
    listen: str | None,
    sets: tuple[str, ...],
    log_level: str | None,
    log_json: bool | None,
    check_config: bool,
) -> None:
    """Run a tfmq broker.

    It prints `ready HOST:PORT` when it accepts commands, logs to standard error, and stops cleanly on SIGTERM
    or Ctrl-C (a second one stops at once). On SIGHUP it reads the configuration again. Example:

        tfmq-server --data ./tfmq-data --listen 127.0.0.1:8367
    """
    from tfmq import config as configuration

    flags = {"server.data": data, "server.listen": listen, "server.log_level": log_level, "server.log_json": log_json}
    load = partial(configuration.load, file, environment=os.environ, flags=flags, sets=sets)
    try:
        config = load()
    except ConfigError as error:
        _exit_with(error.sentence + unknown_host_sentence(error.details.get("listen", "")), 2)
    if check_config:
        from tfmq.server.server import tls_context

        try:
            tls_context(config)
            if config.server.users:
                from tfmq.access.users import load_users

                load_users(config.server.users)
            if config.replicate.url:
                from tfmq.server.replication import check_store

                check_store(config)
        except ConfigError as error:
            _exit_with(error.sentence, 2)
        click.echo(configuration.describe(config))
        return
    code = run(config, partial(load, again=True))
    _leave_hung_calls(code)
    sys.exit(code)


def run(config: Config, load: Callable[[], Config]) -> int:
    """Run the server until a signal stops it, and return the exit code. `load` reads the configuration again."""
    from twisted.logger import STDLibLogObserver, globalLogBeginner

    from tfmq.server.reactor import install_reactor
    from tfmq.server.server import retain_freed_memory

    set_up_logging(config.server.log_level, config.server.log_json)
    # Until the server has started, SIGHUP is ignored. Otherwise the SIGHUP of a closed terminal would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reactor = install_reactor()
    globalLogBeginner.beginLoggingTo([STDLibLogObserver("twisted")], redirectStandardIO=False)
    service = _start_server(config, reactor)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    retain_freed_memory()
    data = os.path.abspath(config.server.data)
    service.on_ready = lambda: _announce(data, "ready", service.address)
    service.on_standby = lambda: _announce(data, "standby", service.address)
    service.on_restart = lambda reason: _restart(reactor, service.address, data, reason)
    failures: list[int] = []
    service.on_failure = lambda error: _fail(reactor, data, error, failures)
    _stop_on_signals(reactor, service, data)
    signal.signal(signal.SIGHUP, lambda number, frame: reactor.callFromThread(reload, service, load))
    service.on_idle = lambda: _stop(reactor, service, data, "having no client")
    reactor.run(installSignalHandlers=False)
    service.end_calls()
    logger.info("stopped")
    return failures[0] if failures else 0


def _start_server(config: Config, reactor: Any) -> Server:
    """Return the started server. If the start fails for a known reason, print one sentence and exit."""
    from journal.clock import SystemClock
    from journal.disk import RealDisk
    from tfmq.server.server import Server as Service

    try:
        check_data_folder(config.server.data)
        service = Service(config, reactor, RealDisk(), SystemClock(), os.urandom)
        service.start()
    except Exception as error:
        sentence = startup_sentence(error, config.server.data)
        if sentence is None:
            raise
        logger.debug("the start failed", exc_info=error)
        _exit_with(sentence, exit_code(error))
    return service


def _announce(data: str, state: str, address: str) -> None:
    if state == "ready":
        write_address(data, address)
    print(f"{state} {address}", flush=True)  # scripts wait for this line
    notify_systemd("READY=1")


def _restart(reactor: Any, address: str, data: str, reason: str) -> None:
    """Replace this process by a new one with the same arguments, at the same address."""
    logger.warning("this server is not primary any more (%s): it starts again", reason)
    remove_address(data)
    for handler in logging.getLogger().handlers:
        handler.flush()
    # The last --listen counts. All sockets and files close at the exec, and so does the lock of the data folder.
    os.execv(sys.executable, [*sys.orig_argv, "--listen", address])


def _fail(reactor: Any, data: str, error: BaseException, failures: list[int]) -> None:
    """End the process with a sentence: it can neither follow nor serve. What it had accepted is on the disk."""
    from tfmq.replication.errors import ReplicationError

    sentence = str(error) if isinstance(error, ReplicationError) else startup_sentence(error, data)
    logger.error("%s", sentence or "the replication failed", exc_info=error if sentence is None else None)
    failures.append(exit_code(error))
    remove_address(data)
    reactor.stop()


def _stop_on_signals(reactor: Any, service: Server, data: str) -> None:
    """Stop cleanly at the first SIGTERM or SIGINT. At the second, end the process: the next start recovers files."""
    stopping = False

    def handle(number: int, _: Any) -> None:
        nonlocal stopping
        if stopping:
            os._exit(1)
        stopping = True
        reactor.callFromThread(_stop, reactor, service, data, signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def reload(service: Server, load: Callable[[], Config]) -> None:
    """Read the configuration again, and apply the settings that can change while the server runs."""
    from tfmq.config import merge_reload

    try:
        config, changed, later = merge_reload(service.config, load())
        service.reload(config)
    except ConfigError as error:
        logger.error("SIGHUP: the configuration stays as it was: %s", error.sentence)
        return
    parts = [", ".join(changed) if changed else "nothing that can change at run time has changed"]
    if config.server.tls_certificate:
        parts.append("the certificates were read again")
    if config.server.users:
        parts.append("the users were read again")
    if later:
        parts.append(f"needs a restart: {', '.join(later)}")
    is_info = logger.isEnabledFor(logging.INFO)
    if is_info:  # before the level changes, because the new one may suppress the line
        logger.info("SIGHUP: %s", "; ".join(parts))
    set_up_logging(config.server.log_level, config.server.log_json)
    if not is_info:
        logger.info("SIGHUP: %s", "; ".join(parts))


def _stop(reactor: Any, service: Server, data: str, why: str) -> None:
    logger.info("stopping on %s", why)
    remove_address(data)
    notify_systemd("STOPPING=1")
    service.on_restart = lambda reason: reactor.stop()  # a primary may learn only now that its term has ended
    service.stop(reactor.stop)


def _leave_hung_calls(code: int) -> None:
    """End the process if calls of a store that does not answer would keep it: Python waits for threads of executors."""
    from tfmq.server.reactor import CHUNK_THREAD

    until = time.monotonic() + HUNG_SECONDS
    threads = [each for each in threading.enumerate() if each.name.startswith(CHUNK_THREAD)]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    count = sum(thread.is_alive() for thread in threads)
    if count:
        logger.warning("the store has not answered %d calls: the process ends without the answers", count)
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stdout.flush()
        os._exit(code)


def _exit_with(sentence: str, code: int) -> Any:
    click.echo(f"tfmq-server: {sentence}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
