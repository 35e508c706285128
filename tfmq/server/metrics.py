"""`/metrics` for Prometheus: the table of all metrics, and the answer made of it.

docs/metrics.md is generated from the table. Names of topics and groups are the only texts of clients in it; payloads,
keys and settings never are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

from twisted.internet.defer import Deferred

from tfmq.server.http_message import HttpAnswer, HttpRequest
from tfmq.server.survey import Figures, HistogramFigures, Survey

Value = float | HistogramFigures
Values = Iterable[tuple[tuple[str, ...], Value]]


class Metric(NamedTuple):
    """One metric. `values` returns the values for each combination of `labels`, from the figures of a scrape."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    values: Callable[[Figures], Values]


def _one(value: Callable[[Figures], Any]) -> Callable[[Figures], Values]:
    """Return `values` of a metric without labels. Where `value` returns None, the metric has no value."""

    def values(figures: Figures) -> Values:
        found = value(figures)
        return () if found is None else (((), found if isinstance(found, HistogramFigures) else float(found)),)

    return values


def _server(name: str) -> Callable[[Figures], Values]:
    return _one(lambda figures: figures.server[name])


def _broker(*path: str) -> Callable[[Figures], Values]:
    def value(figures: Figures) -> Any:
        found: Any = figures.broker
        for name in path:
            found = found[name]
        return found

    return _one(value)


def _logs(name: str) -> Callable[[Figures], Values]:
    return _one(lambda figures: getattr(figures.all_logs, name))


def _topics(name: str) -> Callable[[Figures], Values]:
    return lambda figures: [((each.topic,), float(getattr(each, name))) for each in figures.topics]


def _times(name: str) -> Callable[[Figures], Values]:
    return _one(lambda figures: figures.histograms[name])


def _states(part: str, *states: str) -> Callable[[Figures], Values]:
    return lambda figures: [((state,), float(figures.broker[part][state])) for state in states]


def _replication(value: Callable[[dict[str, Any]], Any]) -> Callable[[Figures], Values]:
    """`value` gets the map `replication` of STATUS; there is no value for a broker without replicas."""
    return _one(lambda figures: value(figures.server["replication"]) if figures.server.get("replication") else None)


def _schedules(figures: Figures) -> Values:
    found = figures.broker["schedules"]
    active = found["schedules"] - found["paused"] - found["waiting"]
    return [(("active",), active), (("paused",), found["paused"]), (("waiting",), found["waiting"])]


METRICS: Final = (
    Metric(
        "tfmq_info",
        "gauge",
        ("version", "node"),
        "Always 1; version and permanent id of the broker.",
        lambda figures: [((figures.server["version"], figures.broker["node"]), 1.0)],
    ),
    Metric("tfmq_ready", "gauge", (), "1 if `/ready` answers 200, else 0.", _server("ready")),
    Metric("tfmq_uptime_seconds", "gauge", (), "Time since the start.", _broker("uptime_seconds")),
    Metric("tfmq_memory_bytes", "gauge", (), "Resident memory of the process.", _server("memory_bytes")),
    Metric("tfmq_cpu_seconds_total", "counter", (), "Processor time of the process.", _server("cpu_seconds")),
    Metric(
        "tfmq_produce_seconds",
        "histogram",
        (),
        "Time from the request to the answer of a batch that was stored, with the durability that it asked for; without"
        " sends in transactions.",
        _times("produce"),
    ),
    Metric(
        "tfmq_fsync_seconds", "histogram", (), "Time of a round of fsyncs, one for all that waits.", _times("fsync")
    ),
    Metric(
        "tfmq_fetch_seconds",
        "histogram",
        (),
        "Time from the request to the answer of a fetch that did not have to wait for messages.",
        _times("fetch"),
    ),
    Metric("tfmq_requests_total", "counter", (), "Requests of clients, of any kind.", _server("request_count")),
    Metric("tfmq_received_bytes_total", "counter", (), "Bytes of requests, before TLS.", _server("received_bytes")),
    Metric("tfmq_sent_bytes_total", "counter", (), "Bytes of answers, before TLS.", _server("sent_bytes")),
    Metric("tfmq_connections", "gauge", (), "Open connections of clients.", _server("connections")),
    Metric(
        "tfmq_connections_refused_total",
        "counter",
        (),
        "Connections of clients above the limit.",
        _server("connections_refused"),
    ),
    Metric("tfmq_http_connections", "gauge", (), "Open connections for HTTP.", _server("http_connections")),
    Metric(
        "tfmq_http_connections_refused_total",
        "counter",
        (),
        "Connections for HTTP above the limit.",
        _server("http_connections_refused"),
    ),
    Metric(
        "tfmq_tls_handshake_failures_total",
        "counter",
        (),
        "Connections whose TLS handshake failed, or that did not use TLS where it is needed; HTTP included.",
        _server("failed_handshakes"),
    ),
    Metric(
        "tfmq_unsent_bytes", "gauge", (), "Bytes of answers that clients have not read yet.", _server("unsent_bytes")
    ),
    Metric("tfmq_buffer_bytes", "gauge", (), "Memory for requests in progress.", _server("buffer_bytes")),
    Metric("tfmq_pending_bytes", "gauge", (), "Bytes of batches that wait for the disk.", _broker("pending_bytes")),
    Metric("tfmq_waiting_fetches", "gauge", (), "Fetches that wait for messages.", _broker("parked_fetches")),
    Metric("tfmq_free_bytes", "gauge", (), "Free space on the disk of the data folder.", _broker("free_bytes")),
    Metric(
        "tfmq_disk_full",
        "gauge",
        (),
        "1 while appends are refused because no space is left, or no more files can be opened.",
        _broker("disk_full"),
    ),
    Metric(
        "tfmq_logs_stopped",
        "gauge",
        (),
        "Partitions that take no messages, and the catalog, the transaction journal"
        " and the log of delayed messages where they do not.",
        _logs("stopped"),
    ),
    Metric("tfmq_logs_damaged", "gauge", (), "Partitions in which damage was found.", _logs("damaged")),
    Metric(
        "tfmq_verification_findings",
        "gauge",
        ("kind",),
        "Findings of the background verification that are still there, by kind.",
        lambda figures: [((kind,), float(n)) for kind, n in figures.broker["verification"]["findings"].items()],
    ),
    Metric(
        "tfmq_verified_bytes_total",
        "counter",
        (),
        "Bytes that the background verification has read since the start.",
        _broker("verification", "bytes"),
    ),
    Metric(
        "tfmq_verification_waiting_segments",
        "gauge",
        (),
        "Segments that the present pass of the background verification has still to read.",
        _broker("verification", "waiting"),
    ),
    Metric("tfmq_topics", "gauge", (), "Topics.", _broker("topics")),
    Metric("tfmq_partitions", "gauge", (), "Partitions.", _broker("partitions")),
    Metric("tfmq_segments", "gauge", (), "Segment files of all partitions.", _logs("segments")),
    Metric("tfmq_log_bytes", "gauge", (), "Size of all partitions.", _logs("bytes")),
    Metric("tfmq_messages", "gauge", (), "Messages in all partitions.", _logs("messages")),
    Metric(
        "tfmq_messages_removed",
        "gauge",
        (),
        "Messages that retention and purges have removed from the existing topics.",
        _logs("removed"),
    ),
    Metric("tfmq_topic_log_bytes", "gauge", ("topic",), "Size of a topic.", _topics("bytes")),
    Metric("tfmq_topic_messages", "gauge", ("topic",), "Messages in a topic.", _topics("messages")),
    Metric(
        "tfmq_topic_messages_appended_total",
        "counter",
        ("topic",),
        "Messages since the topic was created.",
        _topics("appended"),
    ),
    Metric("tfmq_topic_logs_stopped", "gauge", ("topic",), "Partitions that take no messages.", _topics("stopped")),
    Metric("tfmq_groups", "gauge", (), "Groups with offsets or members.", _broker("groups")),
    Metric(
        "tfmq_group_lag_messages",
        "gauge",
        ("group", "topic"),
        "Messages after the committed offsets of a group, in all partitions of a topic in which it has one.",
        lambda figures: [(pair, float(messages)) for pair, messages in figures.lags.items()],
    ),
    Metric(
        "tfmq_group_members",
        "gauge",
        ("group",),
        "Members of a group; a group without members has no value.",
        lambda figures: [((group,), float(count)) for group, count in figures.members.items()],
    ),
    Metric(
        "tfmq_dead_letters_total",
        "counter",
        ("group",),
        "Messages that became dead letters at members of a group, as these report since the start of the broker.",
        lambda figures: [((group,), float(count)) for group, count in figures.dead_letters.items()],
    ),
    Metric(
        "tfmq_left_out",
        "gauge",
        ("series",),
        "What is not exported because of the limits below: `topics`; `groups` of"
        " which at least one topic is missing; `offsets` whose lag cannot be known.",
        lambda figures: [((series,), float(count)) for series, count in figures.left_out.items()],
    ),
    Metric(
        "tfmq_transactions",
        "gauge",
        ("state",),
        "Transactions: `open`; `prepared`, which are in doubt; `applying`,"
        " committed and not yet stored in all targets; `heuristic`, ended by an operator and not forgotten.",
        _states("transactions", "open", "prepared", "applying", "heuristic"),
    ),
    Metric(
        "tfmq_transaction_oldest_prepared_seconds",
        "gauge",
        (),
        "Age of the transaction that has been prepared for the longest time; 0 without one.",
        _broker("transactions", "oldest_prepared_seconds"),
    ),
    Metric(
        "tfmq_transaction_oldest_open_seconds",
        "gauge",
        (),
        "Age of the open transaction that began first; 0 without one. It is rolled back when its timeout ends.",
        _broker("transactions", "oldest_open_seconds"),
    ),
    Metric(
        "tfmq_transaction_journal_bytes",
        "gauge",
        (),
        "Size of the transaction journal.",
        _broker("transactions", "journal_bytes"),
    ),
    Metric("tfmq_delayed_messages", "gauge", (), "Delayed messages that wait.", _broker("delay", "pending")),
    Metric("tfmq_delayed_bytes", "gauge", (), "Size of these messages.", _broker("delay", "size_bytes")),
    Metric(
        "tfmq_delayed_held",
        "gauge",
        (),
        "Messages that are due, and whose partition accepts none.",
        _broker("delay", "held"),
    ),
    Metric(
        "tfmq_delayed_delivered_total",
        "counter",
        (),
        "Delayed messages that were delivered since the start.",
        _broker("delay", "fired"),
    ),
    Metric(
        "tfmq_delayed_lateness_seconds",
        "histogram",
        (),
        "Time from the due time of a message to its append; without a sum.",
        _times("lateness"),
    ),
    Metric(
        "tfmq_delayed_damaged",
        "gauge",
        (),
        "Delayed messages that are lost because of damage.",
        _broker("delay", "damaged"),
    ),
    Metric(
        "tfmq_schedules",
        "gauge",
        ("state",),
        "Schedules: `active`; `paused`; `waiting`, which cannot send now.",
        _schedules,
    ),
    Metric(
        "tfmq_replication_primary",
        "gauge",
        (),
        "1 at the primary of a replicated broker, 0 at its standbys.",
        _replication(lambda status: status["role"] == "primary"),
    ),
    Metric(
        "tfmq_replication_term",
        "gauge",
        (),
        "The term of the primary that this server is or follows. Each failover begins a higher one.",
        _replication(lambda status: status["term"]),
    ),
    Metric(
        "tfmq_replication_behind_seconds",
        "gauge",
        (),
        "At the primary, since when changes wait for the store; at a standby, the age of what it has applied, while"
        " there is more. 0 if nothing waits.",
        _replication(lambda status: status["behind_seconds"]),
    ),
    Metric(
        "tfmq_replication_behind_bytes",
        "gauge",
        (),
        "Bytes of changes of the primary that are not in the store yet.",
        _replication(lambda status: status["behind_bytes"]),
    ),
    Metric(
        "tfmq_replication_trouble",
        "gauge",
        (),
        "1 while the replication of this server does not go on; `tfmq replica status` says why.",
        _replication(lambda status: bool(status["trouble"])),
    ),
)
"""Every metric. Nothing is exported that is not in this table."""
STANDBY_METRICS: Final = tuple(
    each
    for each in METRICS
    if each.name.startswith("tfmq_replication_") or each.name in ("tfmq_memory_bytes", "tfmq_cpu_seconds_total")
)
"""The metrics of a standby, which has no broker. `tfmq_ready` is not one of them: a standby is well without being
ready."""


class FigureCollector:
    """The metrics of one scrape, as prometheus_client takes them."""

    def __init__(self, figures: Figures, table: Sequence[Metric] = METRICS) -> None:
        self._figures, self._table = figures, table

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        for metric in self._table:
            family: Any = kinds[metric.kind](metric.name, metric.meaning, labels=metric.labels)
            for labels, value in metric.values(self._figures):
                if isinstance(value, HistogramFigures):
                    family.add_metric(labels, _buckets(value), value.sum_seconds)
                else:
                    family.add_metric(labels, value)
            yield family


def _buckets(histogram: HistogramFigures) -> list[tuple[str, float]]:
    """Return (upper bound, number of values up to it), as the format has them."""
    names = [*map(repr, histogram.bounds), "+Inf"]
    return list(zip(names, accumulate(histogram.counts), strict=True))


def exposition(figures: Figures, table: Sequence[Metric] = METRICS) -> HttpAnswer:
    """Return the metrics in Prometheus' text format. Runs in a worker: thousands of lines take some milliseconds."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # only a server that is scraped needs it

    return HttpAnswer(200, generate_latest(FigureCollector(figures, table)), CONTENT_TYPE_LATEST)


PAUSE_SECONDS = 0.25
"""Between the end of a survey and the next one. A survey and its text take milliseconds, in which the interpreter's
lock keeps others waiting, and anyone who reaches the HTTP server may ask for one after the other."""


class Scraper:
    """Answers `/metrics`. Requests that arrive during a survey share its result, and those in the pause after it the
    next one's, so their number costs nothing."""

    def __init__(
        self,
        survey: Survey,
        server_figures: Callable[[], dict[str, Any]],
        run: Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """`server_figures` returns `Figures.server`; `run` runs a job in a worker."""
        self._survey, self._server_figures, self._run, self._call_later = survey, server_figures, run, call_later
        self._waiting: list[Deferred[HttpAnswer]] = []
        self._is_pausing = False

    def scrape(self) -> Deferred[HttpAnswer]:
        answer: Deferred[HttpAnswer] = Deferred()
        self._waiting.append(answer)
        if len(self._waiting) == 1 and not self._is_pausing:
            self._begin()
        return answer

    def _begin(self) -> None:
        try:
            server = {**self._server_figures(), "cpu_seconds": time.process_time()}
            self._survey.gather(server, self._gathered)
        except Exception as error:  # such as an OSError of /proc; later requests must not wait for this one
            self._done(None, error)

    def _end_pause(self) -> None:
        self._is_pausing = False
        if self._waiting:
            self._begin()

    def _gathered(self, figures: Figures | None, error: BaseException | None) -> None:
        if figures is None:
            self._done(None, error)
        else:
            self._run(lambda: exposition(figures), self._done)

    def _done(self, answer: HttpAnswer | None, error: BaseException | None) -> None:
        waiting, self._waiting = self._waiting, []
        self._is_pausing = True
        self._call_later(PAUSE_SECONDS, self._end_pause)
        for each in waiting:
            if answer is not None:
                each.callback(answer)
            else:
                each.errback(error)


def metrics(request: HttpRequest) -> Deferred[HttpAnswer]:
    return request.context.scrape()
