"""What the tests of pipelines share."""

from __future__ import annotations

from typing import Any

import pytest

from tfmq.spark.pipelines.command import Job


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for a session fails the test: it takes most of a minute on a small machine."""

    def asked(job: Job) -> Any:
        pytest.fail(f"{job.name} starts Spark first")

    monkeypatch.setattr(Job, "spark", asked)
