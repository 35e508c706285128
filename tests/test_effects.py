"""An effect is a value: where to, what, from which place of which source."""

from journal.shapes import Batch, Source
from tfmq.effects import Append


def test_an_append_names_its_target_and_its_source() -> None:
    source = Source(2, 7, 100, 1)
    effect = Append("orders", 16, 0, [Batch(b"", (), 1, 0, 0)], source)
    assert (effect.topic, effect.incarnation, effect.partition, effect.source) == ("orders", 16, 0, source)
    assert effect == Append("orders", 16, 0, [Batch(b"", (), 1, 0, 0)], source)
