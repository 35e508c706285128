"""The metrics: each is in the table, counts what it says, and stays small however much the broker holds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tfmq
from journal.histogram import BOUNDS_SECONDS, TimeHistogram
from tests.broker.group_member import Seat, seats
from tests.broker.helpers import Broker
from tests.paths import ROOT
from tests.server.fakes import FakeReactor
from tests.server.test_http import HTTP, url_of
from tests.server.wire import PATIENCE_SECONDS, running
from tests.zookeeper.test_group_membership import until
from tfmq.broker.broker import Broker as Engine
from tfmq.protocol.commands import Heartbeat, LeaveGroup
from tfmq.server import survey
from tfmq.server.http_message import HttpAnswer
from tfmq.server.metrics import METRICS, PAUSE_SECONDS, STANDBY_METRICS, Scraper, exposition
from tfmq.server.survey import Figures, Survey

PROCESS = {
    **{"version": "tfmq", "ready": True, "memory_bytes": 1, "cpu_seconds": 0.5, "connections": 2, "buffer_bytes": 0},
    **{"connections_refused": 3, "http_connections": 1, "http_connections_refused": 0, "request_count": 7},
    **{"received_bytes": 100, "sent_bytes": 200, "unsent_bytes": 0, "failed_handshakes": 4},
}

Samples = dict[str, float]
"""NAME{LABEL="VALUE"} -> value, as in Prometheus' text format."""


def figures_of(engine: Engine) -> tuple[Figures, int]:
    """The figures of a broker, and in how many steps they were gathered."""
    later: deque[tuple[Any, ...]] = deque()
    found: list[Figures] = []

    def done(figures: Figures | None, error: BaseException | None) -> None:
        assert figures is not None, error
        found.append(figures)

    Survey(engine, lambda seconds, *call: later.append(call), engine.clock.monotonic).gather(PROCESS, done)
    steps = 1
    while later:
        call, *arguments = later.popleft()
        call(*arguments)
        steps += 1
    return found[0], steps


def samples_in(text: str) -> Samples:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def samples_of(broker: Broker) -> Samples:
    """The metrics of a broker in a simulation."""
    return samples_in(exposition(figures_of(broker.engine.broker)[0]).body.decode())


# The table


def test_exactly_the_metrics_of_the_table_are_exported_with_their_meaning() -> None:
    text = exposition(figures_of(Broker().engine.broker)[0]).body.decode()
    assert re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE) == [(each.name, each.kind) for each in METRICS]
    for each in METRICS:
        assert f"# HELP {each.name} {each.meaning}\n" in text
        assert re.fullmatch(r"tfmq_[a-z_]+", each.name) and each.meaning.endswith(".")
        assert each.name.endswith("_total") == (each.kind == "counter")


def names_in(text: str) -> set[str]:
    """The metrics that a text names, histograms without the endings of their series."""
    histograms = {each.name for each in METRICS if each.kind == "histogram"}
    found = set(re.findall(r"\btfmq_[a-z_]+", text))
    return {name.removesuffix("_bucket") if name.removesuffix("_bucket") in histograms else name for name in found}


def test_the_dashboard_names_only_metrics_and_labels_that_exist() -> None:
    board = json.loads((ROOT / "conf" / "grafana-dashboard.json").read_text())
    known = {each.name: each.labels for each in METRICS}
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        (name,) = names_in(expression)
        assert name in known, expression
    for panel in board["panels"]:
        for target in panel["targets"]:
            (name,) = names_in(target["expr"])
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= {"instance", *known[name]}, target


def test_the_alert_rules_name_only_metrics_that_exist_and_each_has_its_advice() -> None:
    rules, page = (ROOT / "conf" / "alerts.yml").read_text(), (ROOT / "docs" / "metrics.md").read_text()
    assert names_in(rules) <= {each.name for each in METRICS}
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert alerts and all(f"`{alert}`" in page for alert in alerts)
    tried = (ROOT / "tests" / "server" / "alerts_test.yml").read_text()
    assert all(f'alertname="{alert}"' in tried for alert in alerts)


def test_the_alert_rules_fire_when_they_should_and_only_then() -> None:
    promtool = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
    if promtool is None:
        pytest.skip("promtool is missing: tools/setup_system.sh fetches it")
    for command in (["check", "rules", "conf/alerts.yml"], ["test", "rules", "tests/server/alerts_test.yml"]):
        ran = subprocess.run([promtool, *command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert ran.returncode == 0, ran.stdout + ran.stderr


# Replicas


def test_a_standby_exports_its_replication_and_is_not_called_unready() -> None:
    status = {"role": "standby", "term": 3, "behind_seconds": 1.5, "behind_bytes": 0, "trouble": "the store is away"}
    figures = Figures({"memory_bytes": 1000, "cpu_seconds": 2.0, "replication": status})
    assert samples_in(exposition(figures, STANDBY_METRICS).body.decode()) == {
        "tfmq_memory_bytes": 1000.0,
        "tfmq_cpu_seconds_total": 2.0,
        "tfmq_replication_primary": 0.0,
        "tfmq_replication_term": 3.0,
        "tfmq_replication_behind_seconds": 1.5,
        "tfmq_replication_behind_bytes": 0.0,
        "tfmq_replication_trouble": 1.0,
    }
    assert not [name for name in samples_of(Broker()) if "replication" in name], "a broker without replicas"


# What is counted


def test_each_batch_fsync_and_fetch_is_counted_once() -> None:
    broker = Broker()
    broker.create()
    before = samples_of(broker)
    producer = broker.lease()
    leased = samples_of(broker)
    for sequence in range(3):
        broker.produce(producer, 2 * sequence, [b"a", b"b"])
    broker.fetch()
    after = samples_of(broker)
    assert after["tfmq_produce_seconds_count"] - before["tfmq_produce_seconds_count"] == 3
    assert after["tfmq_fsync_seconds_count"] - leased["tfmq_fsync_seconds_count"] == 3
    assert after["tfmq_fetch_seconds_count"] - before["tfmq_fetch_seconds_count"] == 1
    assert after['tfmq_produce_seconds_bucket{le="+Inf"}'] == after["tfmq_produce_seconds_count"]


def test_times_are_in_their_buckets() -> None:
    histogram = TimeHistogram()
    for seconds in (0.0, BOUNDS_SECONDS[0], 0.02, 11.0):
        histogram.record(seconds)
    assert histogram.counts[0] == 2 and histogram.counts[BOUNDS_SECONDS.index(0.025)] == 1 and histogram.counts[-1] == 1
    assert histogram.sum_seconds == pytest.approx(11.02 + BOUNDS_SECONDS[0])


def test_a_fetch_that_waited_for_messages_is_not_counted() -> None:
    broker = Broker()
    broker.create()
    waiting = broker.fetch(wait_ms=60_000)
    broker.advance(61)
    assert waiting.done and samples_of(broker)["tfmq_fetch_seconds_count"] == 0


def test_logs_are_added_up_and_the_largest_topics_have_their_own_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "TOPIC_SERIES_MAX", 2)
    broker = Broker()
    for name in ("small", "large", "larger"):
        broker.create(name, partitions=2)
    producer = broker.lease()
    broker.produce(producer, 0, [b"a" * 100], topic="large")
    broker.produce(producer, 0, [b"a" * 100] * 3, topic="larger", partition=1)
    found = samples_of(broker)
    assert found["tfmq_messages"] == 4 and found["tfmq_partitions"] == 6
    assert found["tfmq_log_bytes"] == sum(
        broker.log(topic, number).size_bytes for topic in ("small", "large", "larger") for number in (0, 1)
    )
    assert found['tfmq_topic_messages_appended_total{topic="larger"}'] == 3
    assert 'tfmq_topic_messages{topic="small"}' not in found and found['tfmq_left_out{series="topics"}'] == 1


def test_stopped_and_damaged_logs_are_counted() -> None:
    broker = Broker()
    broker.create(partitions=3)
    assert samples_of(broker)["tfmq_logs_stopped"] == 0
    broker.log("orders", 1).stop("its disk failed")
    broker.engine.broker.catalog.log.stop("its disk failed")
    broker.engine.broker.full_disk.refused("orders-0", 1)
    found = samples_of(broker)
    assert found["tfmq_logs_stopped"] == 2 and found['tfmq_topic_logs_stopped{topic="orders"}'] == 1
    assert found["tfmq_disk_full"] == 1


def test_the_lag_of_a_group_is_that_of_all_its_partitions() -> None:
    broker = Broker()
    broker.create(partitions=2)
    producer = broker.lease()
    (member,) = seats(broker, "ada")
    first = broker.produce(producer, 0, [b"a", b"b", b"c"])
    broker.produce(producer, 0, [b"d", b"e"], partition=1)
    member.commit(0)
    assert samples_of(broker)['tfmq_group_lag_messages{group="billing",topic="orders"}'] == 5
    member.commit(broker.log("orders", 0).end_offset, ("orders", broker.incarnation(), 0))
    found = samples_of(broker)
    assert found['tfmq_group_lag_messages{group="billing",topic="orders"}'] == 2
    assert found['tfmq_group_members{group="billing"}'] == 1 and first.done


@pytest.mark.parametrize(("limit", "value"), [("GROUP_SERIES_MAX", 2), ("OFFSETS_MAX", 2)])
def test_groups_above_the_limits_are_left_out_and_counted(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, limit, value)
    broker = Broker()
    broker.create()
    for group in ("a", "b", "c", "d"):
        (member,) = seats(broker, "ada", group=group)
        member.commit(0)
    found = samples_of(broker)
    assert len([name for name in found if name.startswith("tfmq_group_lag")]) == 2
    assert found['tfmq_left_out{series="groups"}'] == 2


def test_transactions_and_delayed_messages_are_counted() -> None:
    broker = Broker()
    broker.create()
    stream = broker.stream()
    began = broker.begin(stream, "x1")
    broker.send(stream, began)
    broker.prepare(began)
    broker.clock.advance(2)
    broker.begin(broker.stream(), "x2")
    broker.begin(broker.stream(), "x3")
    producer = broker.lease()
    broker.delay(producer, 0, [b"a", b"b"])
    broker.clock.advance(3)
    found = samples_of(broker)
    assert found['tfmq_transactions{state="prepared"}'] == 1 and found['tfmq_transactions{state="open"}'] == 2
    assert found["tfmq_transaction_oldest_prepared_seconds"] == 5
    assert found["tfmq_transaction_oldest_open_seconds"] == 3
    assert found["tfmq_delayed_messages"] == 2
    broker.advance(10)
    found = samples_of(broker)
    assert found["tfmq_delayed_messages"] == 0 and found["tfmq_delayed_delivered_total"] == 2
    assert found['tfmq_delayed_lateness_seconds_bucket{le="+Inf"}'] == 2
    assert 0 <= found['tfmq_delayed_lateness_seconds_bucket{le="1.024"}'] < 2


# Dead letters


def beat(seat: Seat, dead_letters: int) -> None:
    seat.ask(Heartbeat(seat.group, seat.name, seat.generation, [], 0, None, dead_letters))


def test_dead_letters_are_counted_once_however_often_a_member_reports_them() -> None:
    broker = Broker()
    broker.create(partitions=2)
    ada, bob = seats(broker, "ada bob")
    for seat, total in ((ada, 0), (bob, 0), (ada, 2), (ada, 2), (bob, 1), (ada, 3)):
        beat(seat, total)
    assert samples_of(broker)['tfmq_dead_letters_total{group="billing"}'] == 4
    restarted = broker.restart()
    ada.connect(restarted)
    for total in (3, 3, 5):
        beat(ada, total)
    ada.ask(LeaveGroup(ada.group, ada.name, ada.generation, 6))
    assert samples_of(restarted)['tfmq_dead_letters_total{group="billing"}'] == 3


def test_a_consumer_reports_its_dead_letters(tmp_path: Path) -> None:
    with running(tmp_path / "data", *HTTP) as (_, address):
        servers, url = f"{address[0]}:{address[1]}", url_of(address)
        with tfmq.Producer(servers) as producer:
            producer.send_many("orders", [b"secret-1", b"secret-2"])
        options = {"topics": "orders", "group": "billing", "dead_letters": tmp_path / "dead.db", "session": 1}
        with tfmq.Consumer(servers, start="earliest", retries=0, **options) as consumer:  # type: ignore[arg-type]

            def refuse(message: Any) -> None:
                if message.text == "secret-2":
                    # The first one has been reported by a heartbeat; the second one will be when it leaves the group.
                    assert until(lambda: scrape(url).get('tfmq_dead_letters_total{group="billing"}') == 1)
                    consumer.stop()
                raise tfmq.Reject("bad")

            consumer.run(refuse)
        found = scrape(url)
        assert found['tfmq_dead_letters_total{group="billing"}'] == 2
        assert found["tfmq_requests_total"] > 5 and found["tfmq_received_bytes_total"] > 100
        assert found["tfmq_sent_bytes_total"] > found["tfmq_requests_total"]
        assert found["tfmq_memory_bytes"] > 1 << 20 and found["tfmq_ready"] == 1
        assert "secret" not in text_at(url)


def text_at(url: str) -> str:
    with urllib.request.urlopen(url + "/metrics", timeout=PATIENCE_SECONDS) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text: str = response.read().decode()
    return text


def scrape(url: str) -> Samples:
    return samples_in(text_at(url))


# What a scrape costs


def test_ten_thousand_topics_are_read_in_steps_and_add_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    broker.create("t0")
    few = len(samples_of(broker))
    engine = broker.engine.broker
    for number in range(1, 10_000):
        engine.topics[f"t{number}"] = engine.topics["t0"]
    monkeypatch.setattr(engine.clock, "monotonic", iter(n * survey.STEP_SECONDS for n in range(10**6)).__next__)
    figures, steps = figures_of(engine)
    assert steps > 50
    found = samples_in(exposition(figures).body.decode())
    assert len(found) <= few + 4 * survey.TOPIC_SERIES_MAX
    assert found['tfmq_left_out{series="topics"}'] == 9900


def test_scrapes_share_one_survey_and_surveys_have_pauses_between_them() -> None:
    gathered: list[Any] = []
    jobs: list[Any] = []

    class Slow:
        def gather(self, server: Any, done: Any) -> None:
            gathered.append(done)

    reactor = FakeReactor()
    scraper = Scraper(
        Slow(),  # type: ignore[arg-type]
        lambda: dict(PROCESS),
        lambda work, done: jobs.append((work, done)),
        reactor.callLater,
    )
    answers: list[HttpAnswer] = []
    for _ in range(3):
        scraper.scrape().addCallback(answers.append)
    assert len(gathered) == 1
    gathered[0](figures_of(Broker().engine.broker)[0], None)
    ((work, done),) = jobs
    done(work(), None)
    assert [answer.status for answer in answers] == [200] * 3
    for _ in range(3):
        scraper.scrape().addErrback(lambda failure: None)
    assert len(gathered) == 1, "the next survey begins after a pause, however many ask"
    reactor.advance(PAUSE_SECONDS)
    assert len(gathered) == 2
    gathered[1](None, ValueError("a test"))
    reactor.advance(PAUSE_SECONDS)
    scraper.scrape()
    assert len(gathered) == 3, "after the pause at once"


def test_a_scrape_that_fails_does_not_keep_later_ones_waiting() -> None:
    """The figures of the process are in /proc, which cannot be read while no file can be opened."""
    gathered: list[Any] = []
    failures = [OSError(24, "Too many open files") for _ in range(2)]

    def figures() -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return dict(PROCESS)

    survey: Any = SimpleNamespace(gather=lambda server, done: gathered.append(server))
    reactor = FakeReactor()
    scraper = Scraper(survey, figures, lambda work, done: None, reactor.callLater)
    seen: list[Any] = []
    for ending in range(1, 3):  # at once, and after a pause
        scraper.scrape().addErrback(lambda failure: seen.append(failure.type))
        reactor.advance(PAUSE_SECONDS * (ending - 1))
        assert seen == [OSError] * ending and gathered == []
    scraper.scrape()
    reactor.advance(PAUSE_SECONDS)
    assert len(gathered) == 1
