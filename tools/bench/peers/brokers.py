"""Brokers of other projects for a benchmark: one node on loopback and a temporary folder, stopped with its context.

Each yields a `Peer`, which runs its client in a process of its own. `forced`: every message is fsynced before it is
acknowledged. install.sh brings them; a peer that is not installed raises PeerMissing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from socket import create_connection, socket
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
INSTALLED = HERE.parents[2] / ".bench"
PYTHON = INSTALLED / "venv" / "bin" / "python"
START_SECONDS = 90.0
CLIENT_SECONDS = 300.0
STOP_SECONDS = 20.0


class PeerMissing(Exception):
    """The peer is not installed; the table names it."""


class Peer(NamedTuple):
    """A running broker: `command` runs its client, before the client's mode; `address` is where it listens."""

    command: list[str]
    address: str

    def measure(self, mode: str, *arguments: object) -> float | list[float]:
        """Run one mode of the client; what it measured. Raises: PeerMissing if the client fails."""
        done = subprocess.run(
            [*self.command, mode, self.address, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
        )
        if done.returncode:
            raise PeerMissing(f"the client failed: {(done.stderr.strip() or done.stdout.strip())[-300:]}")
        measured: float | list[float] = json.loads(done.stdout.strip().splitlines()[-1])
        return measured

    def rate(self, mode: str, *arguments: object) -> float:
        """A mode whose figure is one number."""
        measured = self.measure(mode, *arguments)
        assert isinstance(measured, float)
        return measured


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(name: str) -> str:
    """The path of a Debian package's program. Raises: PeerMissing."""
    # RabbitMQ's own script first: Debian's in /usr/sbin changes to another user, who may not read the folder.
    path = os.pathsep.join(["/usr/lib/rabbitmq/bin", os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(name, path=path)
    if found is None or not PYTHON.exists():
        raise PeerMissing(f"{name} is not installed: bash tools/bench/peers/install.sh")
    return found


def jars(peer: str) -> str:
    """The class path of a Java peer. Raises: PeerMissing."""
    if not (INSTALLED / peer).is_dir():
        raise PeerMissing(f"{peer} is not installed: bash tools/bench/peers/install.sh")
    return f"{INSTALLED / peer}/*"


@contextmanager
def running(
    command: list[str], folder: Path, is_ready: Callable[[], bool], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the context. Raises: PeerMissing if it ends or is not ready in time."""
    log = folder / f"{Path(command[0]).name}-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env={**os.environ, **(environment or {})}
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not is_ready():
            if server.poll() is not None or time.monotonic() > until:
                raise PeerMissing(f"{Path(command[0]).name} did not start: {log.read_text()[-400:]}")
            time.sleep(0.2)
        yield server
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def is_open(port: int) -> bool:
    try:
        create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def properties(path: Path, **lines: object) -> Path:
    path.write_text("".join(f"{key.replace('__', '.')}={value}\n" for key, value in lines.items()))
    return path


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tfmq-peer-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def python_client(peer: str, port: int) -> Peer:
    return Peer([str(PYTHON), str(HERE / "python_clients.py"), peer], f"127.0.0.1:{port}")


@contextmanager
def kafka(forced: bool = False) -> Iterator[Peer]:
    """Kafka with KRaft; forced by log.flush.interval.messages=1."""
    java = ["java", "-Xmx1g", "-Dlog4j2.level=ERROR", "-cp", jars("kafka")]
    port, controller = free_port(), free_port()
    with temporary_folder() as folder:
        config = properties(
            folder / "server.properties",
            process__roles="broker,controller",
            node__id=1,
            controller__quorum__voters=f"1@127.0.0.1:{controller}",
            listeners=f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            advertised__listeners=f"PLAINTEXT://127.0.0.1:{port}",
            controller__listener__names="CONTROLLER",
            log__dirs=folder / "data",
            offsets__topic__replication__factor=1,
            transaction__state__log__replication__factor=1,
            transaction__state__log__min__isr=1,
            offsets__topic__num__partitions=1,
            group__initial__rebalance__delay__ms=0,
            message__max__bytes=16 << 20,
            **({"log__flush__interval__messages": 1} if forced else {}),
        )
        form = [*java, "kafka.tools.StorageTool", "format", "-t", "tfmqBenchTfmqBenchTfmQ", "-c", str(config)]
        subprocess.run(form, check=True, capture_output=True)
        with running([*java, "kafka.Kafka", str(config)], folder, lambda: is_open(port)):
            yield Peer([str(PYTHON), str(HERE / "kafka_client.py")], f"127.0.0.1:{port}")


@contextmanager
def rocketmq(forced: bool = False) -> Iterator[Peer]:
    """RocketMQ's name server and broker, in a network namespace, as the broker would listen on all addresses.

    Forced by flushDiskType=SYNC_FLUSH. Needs the right to make network namespaces.
    """
    java = ["java", "-Xmx1g", "-Drocketmq.client.logUseSlf4j=true", "-cp"]
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        home = [f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
        path = f"{INSTALLED / 'classes'}:{jars('rocketmq')}"
        ready = folder / "namespace"
        hold = ["unshare", "--net", "sh", "-c", f"ip link set lo up && touch {ready} && exec sleep 36000"]
        holder = stack.enter_context(running(hold, folder, ready.exists))
        inside = ["nsenter", "--net", "-t", str(holder.pid)]

        def is_listening(port: int) -> bool:
            probe = f"from socket import *; create_connection(('127.0.0.1', {port}), 1)"
            return not subprocess.run([*inside, str(PYTHON), "-c", probe], capture_output=True).returncode

        names = properties(folder / "names.properties", listenPort=9876, bindAddress="127.0.0.1")
        config = properties(
            folder / "broker.properties",
            brokerName="bench",
            brokerIP1="127.0.0.1",
            bindAddress="127.0.0.1",
            listenPort=10911,
            namesrvAddr="127.0.0.1:9876",
            storePathRootDir=folder / "store",
            storePathCommitLog=folder / "store" / "commitlog",
            mappedFileSizeCommitLog=256 << 20,
            autoCreateTopicEnable="true",
            defaultTopicQueueNums=1,
            flushDiskType="SYNC_FLUSH" if forced else "ASYNC_FLUSH",
            diskMaxUsedSpaceRatio=99,
            sendThreadPoolQueueCapacity=100_000,
            waitTimeMillsInSendQueue=30_000,
        )
        for main, file, port in (("namesrv.NamesrvStartup", names, 9876), ("broker.BrokerStartup", config, 10911)):
            command = [*inside, *java, path, *home, f"org.apache.rocketmq.{main}", "-c", str(file)]
            stack.enter_context(running(command, folder, partial(is_listening, port)))
        yield Peer([*inside, *java, path, *home, "RocketMqClient"], "127.0.0.1:9876")


@contextmanager
def redis(forced: bool = False) -> Iterator[Peer]:
    """Redis streams, with an append-only file that is synced each second, or always."""
    port = free_port()
    with temporary_folder() as folder:
        command = [program("redis-server"), "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always" if forced else "everysec", "--dir", str(folder)]
        with running(command, folder, lambda: is_open(port)):
            yield python_client("redis", port)


@contextmanager
def nats(forced: bool = False) -> Iterator[Peer]:
    """NATS JetStream with file storage, synced every two minutes; this release cannot sync before it answers."""
    if forced:
        raise PeerMissing("NATS 2.9 cannot fsync before it answers")
    port = free_port()
    with temporary_folder() as folder:
        command = [program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "store")]
        with running(command, folder, lambda: is_open(port)):
            yield python_client("nats", port)


@contextmanager
def _rabbitmq(stream: bool) -> Iterator[Peer]:
    port, stream_port, epmd, distribution = (free_port() for _ in range(4))
    with temporary_folder() as folder:
        properties(folder / "enabled_plugins").write_text("[rabbitmq_stream].\n" if stream else "[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{port}\nstream.listeners.tcp.1 = 127.0.0.1:{stream_port}\n"
            f"stream.advertised_host = 127.0.0.1\nstream.advertised_port = {stream_port}\n"
            if stream
            else f"listeners.tcp.1 = 127.0.0.1:{port}\n"
        )
        environment = {
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(epmd),
        }
        # Erlang's port mapper would outlive the broker if the broker started it.
        with running([program("epmd"), "-port", str(epmd)], folder, lambda: is_open(epmd), environment):
            server = program("rabbitmq-server")
            ready = stream_port if stream else port
            with running([server], folder, lambda: is_open(ready), environment):
                yield python_client("stream" if stream else "quorum", ready)


@contextmanager
def rabbitmq_quorum(forced: bool = True) -> Iterator[Peer]:
    """A RabbitMQ quorum queue, which syncs its log before it confirms; it has no other way."""
    if not forced:
        raise PeerMissing("a quorum queue always fsyncs before it confirms")
    with _rabbitmq(stream=False) as peer:
        yield peer


@contextmanager
def rabbitmq_stream(forced: bool = False) -> Iterator[Peer]:
    """A RabbitMQ stream, which never syncs."""
    if forced:
        raise PeerMissing("a RabbitMQ stream never fsyncs")
    with _rabbitmq(stream=True) as peer:
        yield peer


@contextmanager
def beanstalkd(forced: bool = False) -> Iterator[Peer]:
    """beanstalkd with its write-ahead log, synced at each write or each second."""
    port = free_port()
    with temporary_folder() as folder:
        (folder / "log").mkdir()
        command = [program("beanstalkd"), "-l", "127.0.0.1", "-p", str(port), "-b", str(folder / "log")]
        with running([*command, "-f", "0" if forced else "1000"], folder, lambda: is_open(port)):
            yield python_client("beanstalkd", port)
