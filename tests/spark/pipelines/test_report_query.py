"""Births are read out of attributes by Spark's own expressions: held against the attributes' own decoder."""

from typing import Any

from tests.scale import seeded
from tfmq.message import decode_attribute, encode_attribute
from tfmq.spark.pipelines.report import collect_figures, count_bins

NOW = 1_763_700_000_000


def rows() -> list[tuple[bytes | None, str, int, int, bytes | None]]:
    """(value, topic, partition, append time ms, attributes): born, not born, with keys that look like a birth."""
    random = seeded("births")
    found: list[tuple[bytes | None, str, int, int, bytes | None]] = []
    for n in range(200):
        born = random.choice([None, NOW + n - 5, NOW + n + 9, NOW - 10**9])
        key = random.choice([None, "k", bytes([1, 0xCF]) * 6])
        attribute = encode_attribute(born, key, random.choice([None, "tag"])) or None
        value = random.choice([None, b"", b"x" * n])
        found.append((value, f"topic{n % 2}", n % 3, NOW + n, attribute))
    return found


def test_counts_births_and_sizes_are_those_of_each_message(spark: Any) -> None:
    given = rows()
    frame = spark.createDataFrame(
        given, "value binary, topic string, partition int, at bigint, attributes binary"
    ).selectExpr("value", "topic", "partition", "timestamp_millis(at) AS timestamp", "attributes")
    widths = {"topic0": 1, "topic1": 60, "empty": 1}
    found = {each.topic: each for each in collect_figures(count_bins(frame, widths), widths)}
    assert found["empty"].messages == 0
    for topic in ("topic0", "topic1"):
        mine = [row for row in given if row[1] == topic]
        assert {moment.seconds for moment in found[topic].moments} == {widths[topic]}
        assert all(moment.at % widths[topic] == 0 for moment in found[topic].moments)
        born = [None if row[4] is None else decode_attribute(row[4]).born_ms for row in mine]
        latencies = [row[3] - time for row, time in zip(mine, born, strict=True) if time is not None]
        each = found[topic]
        assert each.messages == len(mine) and each.size_bytes == sum(len(row[0] or b"") for row in mine)
        assert each.unborn == born.count(None) and each.early == sum(latency < 0 for latency in latencies)
        assert each.latencies.count_values == sum(latency >= 0 for latency in latencies)
        assert each.latencies.bins[-1].most == max(latencies)
        assert sum(bin.total for bin in each.latencies.bins) == sum(
            latency for latency in latencies if latency >= 0
        )


def test_births_that_no_sender_gives_end_no_report(spark: Any) -> None:
    wrong = [b"\x81\x01\xcf" + bytes([255] * 8), b"\x81\x01\xcf\xff", b"\x81\x01", b"", b"\xc1"]
    far = [b"\x81\x01\xcf\x7f" + bytes([255] * 7)] * 3
    given = [(b"v", "hostile", 0, NOW, attribute) for attribute in wrong + far]
    frame = spark.createDataFrame(
        given, "value binary, topic string, partition int, at bigint, attributes binary"
    ).selectExpr("value", "topic", "partition", "timestamp_millis(at) AS timestamp", "attributes")
    (found,) = collect_figures(count_bins(frame, {"hostile": 1}), {"hostile": 1})
    assert (found.messages, found.unborn, found.early, found.latencies.count_values) == (
        8,
        len(wrong),
        len(far),
        0,
    )
