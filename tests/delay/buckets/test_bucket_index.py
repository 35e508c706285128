"""The leaves of the wheel on the disk: found by due, never overlapping, whatever comes when."""

from __future__ import annotations

from typing import NamedTuple

from tests.scale import scaled, seeded
from tfmq.delay.buckets.format import FINEST_LEVEL, TimeSpan, span_of
from tfmq.delay.buckets.store import BucketIndex, SpillPlan
from tfmq.delay.due_time import DUE_MAX

NOW = 1_700_000_000_000


class Leaf(NamedTuple):
    span: TimeSpan


def leaves(*spans: TimeSpan) -> BucketIndex:
    return BucketIndex(map(Leaf, spans))  # type: ignore[arg-type]


def test_a_due_finds_the_leaf_that_holds_it() -> None:
    near, far = span_of(NOW, 16), span_of(NOW + (1 << 24), 22)
    found = leaves(far, near)
    assert [leaf.span for leaf in found.all] == [near, far]
    assert found.covering(NOW) == Leaf(near) and found.covering(near.end) is None
    assert found.covering(near.start - 1) is None and found.covering(far.end - 1) == Leaf(far)
    assert leaves().covering(NOW) is None


def test_from_a_due_on_come_those_that_end_after_it() -> None:
    near, far = span_of(NOW, 16), span_of(NOW + (1 << 24), 22)
    found = leaves(near, far)
    assert [leaf.span for leaf in found.ending_after(0)] == [near, far]
    assert [leaf.span for leaf in found.ending_after(near.end - 1)] == [near, far]
    assert [leaf.span for leaf in found.ending_after(near.end)] == [far]
    assert list(found.ending_after(far.end)) == []


def test_overlaps_are_seen() -> None:
    coarse = span_of(NOW, 22)
    assert leaves(coarse, span_of(coarse.start, 16)).overlapping_pairs() != []
    assert leaves(coarse, TimeSpan(coarse.end, 16)).overlapping_pairs() == []


def test_a_new_span_is_as_coarse_as_its_distance_but_never_over_a_leaf() -> None:
    far = NOW + (1 << 26)
    assert SpillPlan([], NOW).span_of(far).exponent == 22
    finer = span_of(far, 16)
    assert SpillPlan([Leaf(finer)], NOW).span_of(far) == finer
    assert SpillPlan([Leaf(finer)], NOW).span_of(finer.end) == TimeSpan(finer.end, 16)
    finest = span_of(far, 10)
    assert SpillPlan([Leaf(finest)], NOW).span_of(finest.end) == TimeSpan(finest.end, 10)
    assert SpillPlan([Leaf(span_of(far, 28))], NOW).span_of(far).exponent == 28


def test_a_name_that_is_taken_is_not_given() -> None:
    taken = span_of(NOW, 16)
    assert SpillPlan([], NOW, {taken}).span_of(NOW) == span_of(NOW, FINEST_LEVEL)


def test_whatever_comes_when_spans_never_overlap() -> None:
    generator = seeded("leaves")
    for _ in range(scaled(60)):
        now, spans = NOW, set[TimeSpan]()
        for _ in range(10):
            plan = SpillPlan(map(Leaf, spans), now)
            for _ in range(40):
                due = min(DUE_MAX, now + generator.randrange(1 << generator.randrange(1, 63)))
                span = plan.span_of(due)
                assert due in span and plan.span_of(due) == span
                spans.add(span)
            assert leaves(*spans).overlapping_pairs() == []
            now += generator.randrange(1 << generator.randrange(30))
