"""The whole broker on servers that share a store, with faults at random: what was answered holds."""

from __future__ import annotations

import pytest

import tfmq.replication.primary as primary_module
from tests.replication.replicated_broker import Course
from tests.scale import scaled


@pytest.mark.parametrize("seed", range(scaled(2_000, 18)))
def test_random_courses_of_a_broker_lose_double_and_tear_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    is_swept = seed % 3 == 0
    if is_swept:
        monkeypatch.setattr(primary_module, "SNAPSHOT_BYTES", 60_000)
        monkeypatch.setattr(primary_module, "SWEEP_SECONDS", 10.0)
    course = Course(seed, history_seconds=30.0 if is_swept else 7 * 86_400.0)
    course.play(course.world.generator.randint(3, 15))
