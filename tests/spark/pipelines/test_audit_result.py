"""What an audit says in the end."""

from pathlib import Path

from tests.spark.pipelines.audited import audit_here, batch, segments, write_log


def test_sums_and_sentence(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [([batch(50, 40 * n, [80] * 40)], None) for n in range(20)])
    result = audit_here(tmp_path / "data")
    files = segments(folder)
    assert (result.logs, result.segments, result.messages, result.blocks) == (1, len(files), 800, 20)
    assert result.summary().startswith(f"1 data folder, 1 log, {len(files)} segments: 800 records in ")
    assert result.summary().endswith("; nothing is wrong")
    files[1].unlink()
    result = audit_here(tmp_path / "data")
    assert result.summary().endswith("; 1 finding")
    row = result.to_json()
    assert row["findings"][0]["kind"] == "missing segment" and row["messages"] == result.messages


def test_findings_are_in_the_order_of_topics_and_offsets(tmp_path: Path) -> None:
    for partition in (1, 0):
        folder = write_log(
            tmp_path / "data",
            partition,
            [([batch(50 + partition, 40 * n, [80] * 40)], None) for n in range(30)],
        )
        for path in segments(folder)[1:4:2]:
            path.unlink()
    findings = audit_here(tmp_path / "data").findings
    assert [(each.partition, each.first) for each in findings] == [
        (0, 20500),
        (0, 61500),
        (1, 20500),
        (1, 61500),
    ]
