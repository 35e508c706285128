"""XA's own rules: work ends before the first phase, and the second one says which it is."""

import pytest

from tests.client.transaction_rig import TransactionRig
from tfmq.client.producer.xa import XaBranches
from tfmq.client.transaction.transaction import TransactionCore
from tfmq.errors import HeuristicOutcome, TransactionExists, TransactionState, UnknownTransaction
from tfmq.protocol.commands import ListTransactions


class Resource(TransactionRig):
    """A rig with branches."""

    def __init__(self, other: TransactionRig | None = None, group: str | None = None) -> None:
        super().__init__(None if other is None else other.broker, group=group)
        self.branches = XaBranches(self.core.transactions)

    def start(self, xid: str, resume: bool = False) -> TransactionCore:
        branch: TransactionCore = self.run(self.branches.start(xid, resume=resume))
        return branch

    def work(self, xid: str) -> None:
        self.send(self.start(xid), xid.encode())
        self.branches.end(xid)

    def prepare_branch(self, xid: str) -> str:
        return str(self.run(self.branches.prepare(xid)))

    def commit_branch(self, xid: str, one_phase: bool = False) -> str:
        return str(self.run(self.branches.commit(xid, one_phase)).state)

    def rollback_branch(self, xid: str) -> str:
        return str(self.run(self.branches.rollback(xid)))

    def recover(self, group: str | None = None) -> list[str]:
        found: list[str] = self.run(self.branches.recover(group))
        return found


@pytest.fixture
def resource() -> Resource:
    return Resource()


def test_two_phases_and_one(resource: Resource) -> None:
    for xid in "abc":
        resource.work(xid)
    assert resource.prepare_branch("a") == "prepared" and resource.commit_branch("a") == "committed"
    assert resource.commit_branch("b", one_phase=True) == "committed"
    assert resource.rollback_branch("c") == "rolled_back"
    assert resource.broker.payloads("orders") == [b"a", b"b"]


def test_item_28_commit_without_prepare_is_refused(resource: Resource) -> None:
    resource.work("a")
    with pytest.raises(TransactionState, match="prepare it first, or give one_phase=True"):
        resource.commit_branch("a")
    with pytest.raises(TransactionState, match="prepare it first"):
        Resource(resource).commit_branch("a")
    assert resource.broker.states() == ["open"]


def test_one_phase_of_a_prepared_branch_is_refused(resource: Resource) -> None:
    resource.work("a")
    resource.prepare_branch("a")
    with pytest.raises(TransactionState, match="its commit is not one_phase"):
        resource.commit_branch("a", one_phase=True)
    assert resource.commit_branch("a") == "committed"


def test_item_28_preparing_nothing_is_read_only_and_over(resource: Resource) -> None:
    resource.start("a")
    resource.branches.end("a")
    assert resource.prepare_branch("a") == "read_only"
    assert resource.recover() == []


def test_item_28_recover_gives_what_is_in_doubt_filtered_and_in_pages(resource: Resource) -> None:
    shop = Resource(resource, group="shop")
    for number in range(5):
        for each in (resource, shop):
            xid = f"{'shop' if each is shop else 'plain'}-{number}"
            each.work(xid)
            each.prepare_branch(xid)
    shop.start("open")
    resource.commit_branch("plain-0")
    resource.broker.by_hand(2, True)
    assert shop.recover("shop") == [f"shop-{number}" for number in range(5)]
    assert sorted(resource.recover()) == sorted(
        [*(f"shop-{n}" for n in range(5)), *(f"plain-{n}" for n in range(1, 5))]
    )
    assert len(resource.requests(ListTransactions)) > 3


def test_a_client_that_recovers_a_branch_may_end_it(resource: Resource) -> None:
    for xid in "ab":
        resource.work(xid)
    resource.prepare_branch("a"), resource.prepare_branch("b")
    other = Resource(resource)
    assert other.recover() == ["a", "b"]
    assert other.commit_branch("a") == "committed" and other.rollback_branch("b") == "rolled_back"
    assert resource.commit_branch("a") == "committed"


def test_work_must_have_ended_and_nothing_is_sent_after_it(resource: Resource) -> None:
    branch = resource.start("a")
    resource.send(branch, b"1")
    for step in (resource.prepare_branch, resource.commit_branch, resource.rollback_branch):
        with pytest.raises(TransactionState, match=r"call end\('a'\) first"):
            step("a")
    resource.branches.end("a")
    assert not branch.shared_batches, "the short way of sends is closed"
    with pytest.raises(TransactionState, match="resume=True"):
        resource.send(branch, b"2")
    assert resource.start("a", resume=True) is branch
    resource.send(branch, b"3")
    resource.branches.end("a")
    resource.commit_branch("a", one_phase=True)
    assert resource.broker.payloads("orders") == [b"1", b"3"]


def test_what_an_operator_decided_is_reported_until_it_is_forgotten(resource: Resource) -> None:
    resource.work("a")
    resource.prepare_branch("a")
    resource.broker.by_hand(1, False)
    for _ in range(2):
        with pytest.raises(HeuristicOutcome):
            resource.commit_branch("a")
    assert resource.recover() == ["a"]
    assert resource.run(resource.branches.forget("a")) is True
    assert resource.recover() == []
    with pytest.raises(UnknownTransaction):
        resource.commit_branch("a")


def test_unknown_names(resource: Resource) -> None:
    for use in (resource.prepare_branch, resource.commit_branch, resource.rollback_branch):
        with pytest.raises(UnknownTransaction):
            use("nobody")
    with pytest.raises(UnknownTransaction):
        resource.branches.end("nobody")
    with pytest.raises(UnknownTransaction):
        resource.start("nobody", resume=True)
    resource.start("a")
    with pytest.raises(TransactionExists):
        resource.start("a")
