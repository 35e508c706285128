"""A Kafka broker of our own for a benchmark: one node, KRaft, loopback, a temporary folder; stops with its context."""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection, socket

JARS = Path(__file__).resolve().parents[3] / ".bench" / "kafka"
PYTHON = JARS.parent / "venv" / "bin" / "python"
START_SECONDS = 60.0
CLIENT_SECONDS = 300.0
STOP_SECONDS = 20.0


class PeerMissing(Exception):
    """The peer is not installed; the table names it."""


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def settings(folder: Path, port: int, controller: int, forced: bool) -> str:
    """`forced`: every append is fsynced before the answer (log.flush.interval.messages=1)."""
    lines = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(folder / "data"),
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "offsets.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        "message.max.bytes": str(16 << 20),
    }
    if forced:
        lines["log.flush.interval.messages"] = "1"
    return "".join(f"{key}={value}\n" for key, value in lines.items())


@contextmanager
def kafka(forced: bool = False) -> Iterator[str]:
    """Start Kafka, yield `host:port`, stop it. Raises PeerMissing when tools/bench/peers/install.sh did not run."""
    if not JARS.is_dir():
        raise PeerMissing("Kafka is not installed: bash tools/bench/peers/install.sh")
    with tempfile.TemporaryDirectory(prefix="tfmq-kafka-") as name:
        folder, port = Path(name), free_port()
        config = folder / "server.properties"
        config.write_text(settings(folder, port, free_port(), forced))
        java = ["java", "-Xmx1g", "-Dlog4j2.level=ERROR", "-cp", f"{JARS}/*"]
        identity = "tfmqBenchTfmqBenchTfmQ"
        subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(config)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with (folder / "log").open("wb") as log:
            broker = subprocess.Popen([*java, "kafka.Kafka", str(config)], stdout=log, stderr=log)
        try:
            wait_until_open(broker, port, folder / "log")
            yield f"127.0.0.1:{port}"
        finally:
            stop(broker)


def wait_until_open(broker: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if broker.poll() is not None:
            raise PeerMissing(f"Kafka ended at once: {log.read_text()[-400:]}")
        try:
            create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise PeerMissing(f"Kafka did not open its port within {START_SECONDS:.0f} s")


def stop(broker: subprocess.Popen[bytes]) -> None:
    broker.terminate()
    try:
        broker.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        broker.kill()
        broker.wait()


def client(mode: str, *arguments: object) -> "float | list[float]":
    """Run one mode of kafka_client.py with the peers' Python; what it measured."""
    program = Path(__file__).with_name("kafka_client.py")
    command = [str(PYTHON), str(program), mode, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=CLIENT_SECONDS)
    measured: float | list[float] = json.loads(done.stdout)
    return measured


def rate(mode: str, *arguments: object) -> float:
    """A mode whose figure is one number."""
    measured = client(mode, *arguments)
    assert isinstance(measured, float)
    return measured
