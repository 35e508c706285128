"""The end of the interpreter: every open producer gets its share of the time. tests/test_producer.py ends programs."""

import pytest

from tfmq.client.producer import delivery


class Unclosed:
    def __init__(self, lost: int = 0, error: Exception | None = None) -> None:
        self.lost, self.error, self.seconds = lost, error, 0.0

    def close_at_exit(self, seconds: float) -> int:
        self.seconds = seconds
        if self.error:
            raise self.error
        return self.lost


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_open_producers", set())


def test_all_that_are_open_are_finished_in_bounded_time_and_losses_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fine, lossy, broken, closed = Unclosed(), Unclosed(3), Unclosed(error=OSError("gone")), Unclosed()
    for each in (fine, lossy, broken, closed):
        delivery.register_open(each)
    delivery.unregister_open(closed)
    delivery._close_all_at_exit()
    assert fine.seconds == pytest.approx(delivery.EXIT_SECONDS / 3)
    assert closed.seconds == 0
    assert "3 messages were not delivered" in caplog.text
    assert "could not be flushed" in caplog.text
