"""Claims of letters, sorted by partition; what stands where they point is asked in test_reconcile.py."""

from tests.spark.pipelines.test_reconcile_rows import letter
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.reconcile import CLAIMS_PER_TASK, plan_claim_checks
from tfmq.spark.ranges import PartitionLog

ADDRESS = SourceAddress("127.0.0.1:1")
LOG, OTHER = PartitionLog("orders", 0, 20, 20 << 24), PartitionLog("again", 3, 30, 30 << 24 | 3)


def test_a_letter_claims_its_own_place_and_that_where_it_was_sent_again() -> None:
    sent = letter(9, sent=("again", 30, 3, 700, 55))
    asked = {each.log: each.claims for each in plan_claim_checks(ADDRESS, [LOG, OTHER], [sent, letter(3)])}
    assert [(claim.offset, claim.id, claim.resent) for claim in asked[LOG]] == [
        (30, 7, False),
        (90, 7, False),
    ]
    assert [(claim.offset, claim.id, claim.resent) for claim in asked[OTHER]] == [(700, 55, True)]


def test_of_partitions_that_are_gone_nothing_is_asked() -> None:
    assert plan_claim_checks(ADDRESS, [OTHER], [letter(3)]) == []


def test_of_another_brokers_topic_with_the_same_number_nothing_is_asked() -> None:
    namesake = LOG._replace(topic="payments")
    assert (
        plan_claim_checks(
            ADDRESS, [namesake, OTHER._replace(topic="else")], [letter(9, sent=("again", 30, 3, 700, 55))]
        )
        == []
    )


def test_many_letters_are_many_tasks() -> None:
    asked = plan_claim_checks(ADDRESS, [LOG], [letter(n) for n in range(CLAIMS_PER_TASK + 1)])
    assert [len(each.claims) for each in asked] == [CLAIMS_PER_TASK, 1]
    assert asked[1].claims[0].offset == 10 * CLAIMS_PER_TASK
