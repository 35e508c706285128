"""A broker with users, or with TLS, read and written by Spark; and what Spark shows of it: plans, its status store, its
errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.e2e import commands
from tools.rigs.live_server import LiveServer

PASSWORD = "p4ss/w@rd"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    users = tmp_path / "users.json"
    added = commands.tfmq(
        "user", "add", "spark", "--right", "admin", "--file", str(users), "--password-stdin", given=PASSWORD.encode()
    )
    assert added.code == 0, added.err
    made = LiveServer(tmp_path / "data", f"server.users={users}", "topics.partitions=2")
    made.start()
    yield made
    made.stop()
    assert PASSWORD not in made.log.read_text()


def test_spark_logs_in_with_the_option_password_and_does_not_show_it(
    spark: Any, server: LiveServer, topic: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"servers": f"tfmq://spark@{server.address}", "password": PASSWORD}
    rows = spark.createDataFrame([(bytearray(b"a"),), (bytearray(b"b"),)], "value binary")
    rows.write.format("tfmq").mode("append").options(**options, topic=topic).save()
    frame = spark.read.format("tfmq").options(**options, subscribe=topic).load()
    assert sorted(bytes(row.value) for row in frame.select("value").collect()) == [b"a", b"b"]
    frame.explain(extended=True)
    shown = [
        *capfd.readouterr(),
        frame._jdf.queryExecution().toString(),
        frame._jdf.queryExecution().logical().toJSON(),
    ]
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    for number in range(executions.size()):
        each = executions.apply(number)
        shown += [each.physicalPlanDescription(), each.modifiedConfigs().toString(), each.description(), each.details()]
    text = "".join(shown)
    assert "tfmq" in text.lower() and PASSWORD not in text and "p4ss" not in text


def test_a_wrong_password_is_told_once_and_not_shown(spark: Any, server: LiveServer, topic: str) -> None:
    options = {"servers": f"tfmq://spark@{server.address}", "password": "wr0ng"}
    with pytest.raises(Exception, match="The broker did not accept the login") as caught:
        spark.read.format("tfmq").options(**options, subscribe=topic).load().collect()
    assert "wr0ng" not in str(caught.value)


def test_spark_reads_and_writes_over_tls(spark: Any, tmp_path: Path, topic: str, authority: Authority) -> None:
    """Driver and tasks: each has connections of its own, and accepts only a broker that the authority has signed."""
    pair, client = authority.issue("localhost"), authority.issue("spark")
    settings = [f"server.tls_certificate={pair.certificate}", f"server.tls_key={pair.key}"]
    made = LiveServer(tmp_path / "data", *settings, f"server.tls_client_ca={authority.ca}", "topics.partitions=2")
    made.start()
    try:
        port = made.address.rpartition(":")[2]
        options = {
            "servers": f"tfmqs://localhost:{port}?ca={authority.ca}&certificate={client.certificate}&key={client.key}"
        }
        rows = spark.createDataFrame([(bytearray(b"a"),), (bytearray(b"b"),)], "value binary")
        rows.write.format("tfmq").mode("append").options(**options, topic=topic).save()
        frame = spark.read.format("tfmq").options(**options, subscribe=topic).load()
        assert sorted(bytes(row.value) for row in frame.select("value").collect()) == [b"a", b"b"]
        plain = spark.read.format("tfmq").options(servers=f"tfmq://localhost:{port}", subscribe=topic)
        with pytest.raises(Exception, match="tfmqs://"):
            plain.load().collect()
    finally:
        made.stop()
