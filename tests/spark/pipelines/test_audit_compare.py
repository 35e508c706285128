"""Facts side by side, held against the plain way: every id by itself."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from tfmq.spark.pipelines.audit_check import (
    APPEND,
    DECISION,
    EXPECTED,
    FORBIDDEN,
    RUN,
    Facts,
    LostSources,
    concatenate_facts,
    make_facts,
)
from tfmq.spark.pipelines.audit_compare import (
    AppliedState,
    JournalCoverage,
    MissingMessages,
    UndecidedAppend,
    compare_sides,
)

FIRST = 50 << 24
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(0, 1)), max_size=8)
LATE = AppliedState((5000, 0))


def runs(spans: list[tuple[int, int, int]]) -> Facts:
    return concatenate_facts(
        [
            make_facts(0, log, [[FIRST + first, RUN, count, 1000 * n, 1000 * n + 500, 0]])
            for n, (first, count, log) in enumerate(spans)
        ]
    )


def ids(spans: list[tuple[int, int, int]], log: int | None = None) -> Counter[int]:
    return Counter(n for first, count, here in spans if log in (None, here) for n in range(first, first + count))


@given(spans=SPANS)
@example(spans=[(0, 12, 0), (1, 2, 0), (5, 2, 1)])  # the third repeats the first, and not its neighbour
def test_what_stands_twice_is_reported_and_only_that(spans: list[tuple[int, int, int]]) -> None:
    found = compare_sides(runs(spans), {}, {}).repeats
    reported = {n for each in found for n in range(each.first_id - FIRST, each.first_id - FIRST + each.count)}
    assert reported == {n for n, times in ids(spans).items() if times > 1}
    assert all((each.log, each.offset) > (each.other_log, each.other_offset) for each in found)


@given(spans=SPANS, wanted=SPANS)
def test_what_a_transaction_brings_and_a_partition_lacks_is_reported(
    spans: list[tuple[int, int, int]], wanted: list[tuple[int, int, int]]
) -> None:
    rows = [
        make_facts(0, log, [[FIRST + first, EXPECTED, count, 1000, 70 + n, 5]])
        for n, (first, count, log) in enumerate(wanted)
    ]
    verdict = compare_sides(concatenate_facts([runs(spans), *rows]), {0: LATE, 1: LATE}, {})
    expected = {}
    for n, (first, count, log) in enumerate(wanted):
        missing = count - len(set(ids(spans, log)) & set(range(first, first + count)))
        if missing:
            expected[70 + n] = MissingMessages(log, 1000, 70 + n, FIRST + first, missing)
    assert {each.epoch: each for each in verdict.missing} == expected and verdict.pending == 0


@given(spans=SPANS, forbidden=SPANS, rolled=st.booleans())
def test_what_was_not_committed_and_stands_there_is_reported(
    spans: list[tuple[int, int, int]], forbidden: list[tuple[int, int, int]], rolled: bool
) -> None:
    rows = [
        make_facts(0, log, [[FIRST + first, FORBIDDEN, count, 0, 70 + n, int(rolled)]])
        for n, (first, count, log) in enumerate(forbidden)
    ]
    verdict = compare_sides(concatenate_facts([runs(spans), *rows]), {}, {})
    expected = {}
    for n, (first, count, log) in enumerate(forbidden):
        standing = len(set(ids(spans, log)) & set(range(first, first + count)))
        if standing:
            expected[70 + n] = standing
    assert {each.epoch: each.count for each in verdict.uncommitted} == expected
    assert all(each.rolled_back == rolled for each in verdict.uncommitted)


def lack(standing: AppliedState, number: int = 5) -> tuple[int, int]:
    facts = make_facts(0, 0, [[FIRST, EXPECTED, 3, 1000, 70, number]])
    verdict = compare_sides(facts, {0: standing}, {})
    return len(verdict.missing), verdict.pending


def test_what_a_partition_has_not_come_to_is_on_its_way() -> None:
    assert lack(AppliedState((999, 9))) == (0, 3)
    assert lack(AppliedState((1000, 4))) == (0, 3)
    assert lack(AppliedState((1000, 5))) == (1, 0)
    assert lack(AppliedState((1001, 1))) == (1, 0)


def test_what_may_have_been_where_damage_is_or_retention_was_is_not_reported_again() -> None:
    for low, high, lost in ((900, 1100, True), (1000, 1100, True), (900, 1000, True), (900, 999, False)):
        standing = AppliedState((5000, 0), [LostSources((low, 1), (high, 1), True)])
        assert lack(standing) == ((0, 0) if lost else (1, 0)), (low, high)


def test_an_append_counts_only_under_a_decision_that_the_journal_has() -> None:
    facts = make_facts(0, 4, [[place, APPEND, 9, place, place + 100, 9] for place in (500, 1500, 2500, 3500)])
    strange = make_facts(0, 4, [[1500, APPEND, 9, 7000, 7100, 8]])
    decided = make_facts(0, -1, [[2500, DECISION, 0, 0, 0, 9]])
    verdict = compare_sides(
        concatenate_facts([facts, strange, decided]), {}, {0: JournalCoverage(9, [(1000, 2000), (2200, 3000)])}
    )
    assert verdict.undecided == [UndecidedAppend(4, 1500, 1500, 1600), UndecidedAppend(4, 3500, 3500, 3600)]
    assert compare_sides(facts, {}, {}).undecided == []


def test_brokers_do_not_share_ids() -> None:
    one, two = make_facts(0, 0, [[FIRST, RUN, 5, 0, 9, 0]]), make_facts(1, 1, [[FIRST, RUN, 5, 0, 9, 0]])
    assert compare_sides(concatenate_facts([one, two]), {}, {}).repeats == []
