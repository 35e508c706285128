"""Some seconds of the soak (tools/rigs/soak.py), with everything that can be had: its clients, kills and faults."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.scale import SEED, scaled
from tools.rigs.live_server import LiveServer
from tools.rigs.soak import FEATURES, Rig, describe, missing_features, table

SECONDS = 60
SECONDS_MIN = 12.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_and_faults_lose_nothing_and_double_nothing_with_everything_on(tmp_path: Path) -> None:
    missing = missing_features()
    assert set(missing) <= {"disk"}, "what needs root may be missing"
    rig = Rig(max(SECONDS_MIN, scaled(SECONDS)), SEED, tmp_path, [each for each in FEATURES if each not in missing], [])
    rig.report_path = tmp_path / "soak.json"
    report = rig.run()
    assert (report.faults, report.verdict) == ([], "everything held"), describe(report)
    assert any(report.counts.values()) and report.events
    if rig.seconds >= SECONDS:  # fewer seconds of a busy machine may be too few for each kind
        assert report.counts["transactions_committed"] and report.counts["delayed_delivered"]
        assert report.counts["copied_exactly_once"] and report.counts["dead_letters"]
        assert sum(report.events.values()) > 1, "a busy machine leaves time for few"
    assert rig.server not in LiveServer.alive
    silent = {role for role, figures in report.processes.items() if "in_use_mb_mean" not in figures}
    assert silent == {"broker"}, "each client tells what it has allocated"
    written = json.loads(rig.report_path.read_text())
    assert written == json.loads(json.dumps(asdict(report)))
    assert "**everything held**" in table(written)
