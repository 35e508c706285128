"""`tfmq-server`: the command that runs a broker."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tfmq.config import Config
    from tfmq.server.service import Service

logger = logging.getLogger("tfmq.server")

GC_THRESHOLDS = (50_000, 20, 100)
"""Collections look at many young objects at once: requests make few cycles, and a full pass costs
milliseconds.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", "file", metavar="FILE", help="Configuration in TOML; --check-config prints every key."
)
@click.option("--data", metavar="DIR", help="Data folder; the default is ./tfmq-data.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where to listen, 127.0.0.1:8367 by default; port 0 takes a free one.",
)
@click.option(
    "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one key; may be repeated."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="How much is logged on standard error; info by default.",
)
@click.option("--log-json", is_flag=True, default=None, help="One JSON object a log line.")
@click.option(
    "--check-config", is_flag=True, help="Print every key, its value and where that is from, and exit."
)
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
    from tfmq.errors import ConfigError

    flags = {
        "server.data": data,
        "server.listen": listen,
        "server.log_level": log_level,
        "server.log_json": log_json,
    }
    load = partial(configuration.load, file, environment=os.environ, flags=flags, sets=sets)
    try:
        config = load()
    except ConfigError as error:
        _refuse(error.sentence, 2)
    if check_config:
        click.echo(configuration.describe(config))
        return
    sys.exit(run(config, partial(load, again=True)))


def run(config: Config, load: Callable[[], Config]) -> int:
    """Serve until a signal; the exit code. `load` reads the configuration again, for SIGHUP."""
    from tfmq.server import logs, memory
    from tfmq.server.reactor import installed

    logs.set_up(config.server.log_level, config.server.log_json)
    # A terminal that is closed sends it, also while the start is under way, and it must not end the server.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reactor = installed()
    logs.take_twisted()
    service = _started(config, reactor)
    _calm_collector()
    memory.keep_freed()
    data = os.path.abspath(config.server.data)
    reactor.callWhenRunning(_announce, service.address, data)
    _stop_on_signals(reactor, service, data)
    signal.signal(signal.SIGHUP, lambda number, frame: reactor.callFromThread(reload, service, load))
    service.on_idle = lambda: _stop(reactor, service, data, "having no client")
    reactor.run(installSignalHandlers=False)
    logger.info("stopped")
    return 0


def _started(config: Config, reactor: Any) -> Service:
    """The service, accepting; where something forbids that, one sentence and the end."""
    from journal.clock import SystemClock
    from journal.disk import RealDisk
    from tfmq.data_dir import check_data_folder
    from tfmq.server import refusals
    from tfmq.server.service import Service

    try:
        check_data_folder(config.server.data)
        service = Service(config, reactor, RealDisk(), SystemClock(), os.urandom)
        service.start()
    except Exception as error:
        sentence = refusals.sentence(error, config.server.data)
        if sentence is None:
            raise
        logger.debug("the start failed", exc_info=error)
        _refuse(sentence, refusals.exit_code(error))
    return service


def _announce(address: str, data: str) -> None:
    from tfmq.data_dir import write_address
    from tfmq.server.readiness import notify_systemd, say_ready

    write_address(data, address)
    say_ready(sys.stdout, address)
    notify_systemd("READY=1")


def _calm_collector() -> None:
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _stop_on_signals(reactor: Any, service: Service, data: str) -> None:
    """The first SIGTERM or SIGINT stops cleanly, the second at once: recovery is made for that."""
    stopping = False

    def handle(number: int, _: Any) -> None:
        nonlocal stopping
        if stopping:
            os._exit(1)
        stopping = True
        reactor.callFromThread(_stop, reactor, service, data, signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def reload(service: Service, load: Callable[[], Config]) -> None:
    """Read the configuration again and apply what can change while the server runs; one line says what came of it."""
    from tfmq.config import reloaded
    from tfmq.errors import ConfigError
    from tfmq.server import logs

    try:
        config, changed, later = reloaded(service.config, load())
    except ConfigError as error:
        logger.error("SIGHUP: the configuration stays as it was: %s", error.sentence)
        return
    parts = [", ".join(changed) if changed else "nothing that can change at run time has changed"]
    if later:
        parts.append(f"needs a restart: {', '.join(later)}")
    said = logger.isEnabledFor(logging.INFO)
    if said:  # by the level of before: the new one may leave it out
        logger.info("SIGHUP: %s", "; ".join(parts))
    logs.set_up(config.server.log_level, config.server.log_json)
    if not said:
        logger.info("SIGHUP: %s", "; ".join(parts))
    service.reload(config)


def _stop(reactor: Any, service: Service, data: str, why: str) -> None:
    from tfmq.data_dir import remove_address
    from tfmq.server.readiness import notify_systemd

    logger.info("stopping on %s", why)
    remove_address(data)
    notify_systemd("STOPPING=1")
    service.stop(reactor.stop)


def _refuse(sentence: str, code: int) -> Any:
    click.echo(f"tfmq-server: {sentence}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
