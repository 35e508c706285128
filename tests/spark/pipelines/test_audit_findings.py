"""Every kind of finding says what to do."""

from tfmq.spark.pipelines import audit_plan
from tfmq.spark.pipelines.audit_plan import ADVICE, Finding


def test_each_kind_has_its_advice() -> None:
    words = {value for name, value in vars(audit_plan).items() if name.isupper() and isinstance(value, str)}
    assert set(ADVICE) <= words and len(ADVICE) == 14


def test_a_row_has_the_place_and_the_advice() -> None:
    finding = Finding(audit_plan.CUT, "/data", "orders", 3, "x.zxQueue", 5, 9, "it was cut")
    assert finding.to_json() == {
        "kind": "cut file", "data": "/data", "topic": "orders", "partition": 3, "segment": "x.zxQueue",
        "first": 5, "next": 9, "text": "it was cut", "do": ADVICE["cut file"],
    }  # fmt: skip
