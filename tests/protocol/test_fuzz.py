"""A seeded fraction of tools/fuzz_protocol.py, whose head lists the invariants; and proof that it can find
faults.
"""

import random

import pytest

from tests.scale import SEED, scaled
from tfmq.protocol import frames
from tools import fuzz_protocol


def test_wrong_bytes_do_no_more_than_they_may(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_protocol.plain(scaled(100_000), SEED) == 0, capsys.readouterr().out


@pytest.mark.parametrize("data", fuzz_protocol.corpus(), ids=lambda data: data[:12].hex())
def test_known_inputs_pass_with_bounded_memory(data: bytes) -> None:
    fuzz_protocol.try_with_memory(data)


def test_a_seed_brings_back_the_same_bytes() -> None:
    data = fuzz_protocol.corpus()[0]
    assert fuzz_protocol.mutated(data, random.Random(7)) == fuzz_protocol.mutated(data, random.Random(7))


def test_it_finds_a_reader_without_its_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Take the catching away from the header's reader: an exception of msgpack's own must surface soon."""
    monkeypatch.setattr(frames, "Malformed", ZeroDivisionError)
    assert fuzz_protocol.plain(2000, 1) == 1
    assert "--bytes" in capsys.readouterr().out
