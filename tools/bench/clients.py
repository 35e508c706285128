"""64 synchronous clients, synced answers, on one and on 64 partitions: what group commit is for."""

from contextlib import ExitStack

from tools.bench.broker import broker
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.load import Client, messages_per_second
from tools.bench.peers.brokers import PeerMissing, kafka

CLIENTS = 64
SECONDS = 4.0
KAFKA_EACH = 60


def measure(runs: int, peers: bool) -> list[Figure]:
    """Acknowledged messages a second; Kafka, forced, in turn where it is there."""
    note = ""
    with ExitStack() as stack:
        server = stack.enter_context(broker())
        client = Client(server.address)
        client.call(11, "one", 1, {})
        client.call(11, "many", CLIENTS, {})
        client.close()
        programs = {
            "1 partition": lambda: messages_per_second(server.address, "one", CLIENTS, 1, SECONDS),
            "64 partitions": lambda: messages_per_second(server.address, "many", CLIENTS, CLIENTS, SECONDS),
        }
        if peers:
            try:
                other = stack.enter_context(kafka(forced=True))
                programs["kafka"] = lambda: other.rate("clients", "clients", CLIENTS, KAFKA_EACH)
            except PeerMissing as missing:
                note = str(missing)
        values = dict(zip(programs, alternately(runs, *programs.values()), strict=True))
    rows = [
        Figure(
            f"64 clients, {where}", "tfmq, synced", median(values[where]), "msg/s", target, note=spread(values[where])
        )
        for where, target in (("1 partition", 30e3), ("64 partitions", 18e3))
    ]
    if "kafka" in values:
        kept = values["kafka"]
        rows.append(Figure("64 clients, 1 partition", "Kafka, forced", median(kept), "msg/s", note=spread(kept)))
    if note:
        rows.append(Figure("64 clients", "Kafka", float("nan"), "msg/s", note=note))
    return rows
