"""What operators ask, as operations."""

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.client.fake_broker import CUT, LOSE, FakeBroker
from tests.client.fake_delays import NOW_MS, Waiting
from tests.client.in_doubt_broker import InDoubtBroker, row
from tests.client.rig import Rig
from tfmq.client.admin.admin import AdminCore, locate_fields
from tfmq.errors import (
    BadRequest,
    ConnectionFailed,
    GroupIncomplete,
    NotAllowed,
    OffsetOutOfRange,
    UnknownTopic,
    UnknownTransaction,
)
from tfmq.message import Ordinal
from tfmq.protocol import commands


class Operated(FakeBroker):
    """The fake broker with what operators ask for."""

    def describe_topic(self, request: commands.DescribeTopic) -> object:
        row = {"name": request.topic, "incarnation": 1, "partitions": [], "settings": {}}
        return commands.DescriptionReply(row)

    def create_topic(self, request: commands.CreateTopic) -> object:
        self.incarnations[request.topic] = 9
        return commands.CreateTopicReply(9, request.partitions or 1)

    def delete_topic(self, request: commands.DeleteTopic) -> object:
        return commands.DeletedReply(self.incarnations.pop(request.topic, None) == request.incarnation)

    def grow_topic(self, request: commands.GrowTopic) -> object:
        return commands.GrowTopicReply(request.partitions)

    def resume_partition(self, request: commands.ResumePartition) -> object:
        return commands.StateReply("open")

    def truncate(self, request: commands.Truncate) -> object:
        return commands.TruncateReply(request.before_offset)

    def locate(self, request: commands.Locate) -> object:
        return commands.LocateReply(request.value + request.by, 1, 2, 3, 4, 5, 6)

    def status(self, request: commands.Status) -> object:
        return commands.StatusReply({"version": "1"})

    def list_groups(self, request: commands.ListGroups) -> object:
        return commands.ListGroupsReply([{"group": "g"}])

    def describe_group(self, request: commands.DescribeGroup) -> object:
        return commands.DescriptionReply({"group": request.group})

    def read_offsets(self, request: commands.ReadOffsets) -> object:
        return commands.ReadOffsetsReply([])

    def reset_group(self, request: commands.ResetGroup) -> object:
        self.reset = request
        return commands.ResetGroupReply(len(request.offsets))


@pytest.fixture
def rig() -> Rig:
    return Rig(Operated(partitions=2))


@pytest.fixture
def admin(rig: Rig) -> AdminCore:
    return AdminCore(rig.link, 5.0)


def test_topics_are_made_described_grown_and_deleted(rig: Rig, admin: AdminCore) -> None:
    assert rig.run(admin.create_topic("orders", 2, {"flush.messages": 1})).name == "orders"
    assert [each.name for each in rig.run(admin.topics())] == ["orders"]
    assert rig.run(admin.topic("orders")).incarnation == 1
    assert rig.run(admin.grow_topic("orders", 3)) == 3
    assert rig.run(admin.resume("orders", 0)) == "open"
    assert rig.run(admin.truncate_before("orders", 0, 4)) == 4
    assert rig.run(admin.delete_topic("orders")) is True
    with pytest.raises(UnknownTopic):
        rig.run(admin.delete_topic("orders"))


def test_creating_is_not_repeated_by_itself(rig: Rig, admin: AdminCore) -> None:
    rig.broker.plan(commands.CreateTopic, CUT)
    with pytest.raises(ConnectionFailed) as caught:
        rig.run(admin.create_topic("orders", 2, None))
    assert caught.value.outcome == "unknown"


def test_creating_on_an_idle_connection_that_the_broker_has_closed_works(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.ping())
    assert rig.session is not None
    rig.session.cut = True  # Found out only by the next request, whatever it is.
    assert rig.run(admin.create_topic("orders", 2, None)).name == "orders"
    assert [type(each) for each in rig.broker.requests].count(commands.CreateTopic) == 1


def test_a_deletion_whose_first_reply_is_lost_is_one(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.create_topic("orders", 2, None))
    rig.broker.plan(commands.DeleteTopic, LOSE)
    assert rig.run(admin.delete_topic("orders")) is True
    assert [type(each) for each in rig.broker.requests].count(commands.DeleteTopic) == 2


def test_the_limit_in_force_is_named_for_any_number_of_partitions() -> None:
    rig = Rig(Operated(limits={"partitions_per_topic": 7}))
    admin = AdminCore(rig.link, 5.0)
    for operation in (admin.create_topic("orders", 99_999, None), admin.grow_topic("orders", 8)):
        with pytest.raises(BadRequest, match=r"above the limit of 7 \(limits\.partitions_per_topic\)"):
            rig.run(operation)
    assert rig.broker.incarnations == {}


def test_a_purge_before_a_time_in_the_future_removes_nothing(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.create_topic("orders", 2, None))
    now = rig.run(admin.ping()) / 1000
    with pytest.raises(BadRequest, match="in the future by the broker's clock, and nothing was removed"):
        rig.run(admin.purge("orders", None, datetime.fromtimestamp(now + 1, UTC)))
    assert not any(isinstance(each, commands.Truncate) for each in rig.broker.requests)
    assert rig.run(admin.purge("orders", 0, datetime.fromtimestamp(now - 1, UTC))).first_offsets


def test_a_group_is_put_to_one_place_in_all_partitions_or_one(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.create_topic("orders", 2, None))
    assert rig.run(admin.reset_group("g", "orders", "latest", None)) == {0: 1, 1: 1}
    assert rig.run(admin.reset_group("g", "orders", "earliest", 1)) == {1: 0}
    (offset,) = rig.broker.reset.offsets  # type: ignore[attr-defined]
    assert offset == ("orders", 9, 1, 0, 0, 2)


@pytest.mark.parametrize(("place", "what"), [(100, "an offset"), (Ordinal(7), "an ordinal")])
def test_one_offset_or_ordinal_for_several_partitions_is_refused(
    rig: Rig, admin: AdminCore, place: int | Ordinal, what: str
) -> None:
    rig.run(admin.create_topic("orders", 2, None))
    for operation in (admin.purge("orders", None, place), admin.reset_group("g", "orders", place, None)):
        with pytest.raises(BadRequest, match=f"has 2 partitions, and {what} belongs to one of them"):
            rig.run(operation)
    assert not any(isinstance(each, commands.Truncate | commands.ResetGroup) for each in rig.broker.requests)


def test_a_purge_before_what_is_not_there_yet_removes_nothing(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.create_topic("orders", 2, None))
    for before, sentence in ((5, "ends at offset 4; 5 is not there"), (Ordinal(7), "ordinal 6; 7 is not")):
        with pytest.raises(OffsetOutOfRange, match=sentence) as caught:
            rig.run(admin.purge("orders", 0, before))
        assert (caught.value.first, caught.value.end) == (3, 4)
    assert not any(isinstance(each, commands.Truncate) for each in rig.broker.requests)
    assert rig.run(admin.purge("orders", 0, 4)).first_offsets == {0: 8}


def test_no_offset_after_the_end_is_one_to_truncate_at_or_to_go_on_at(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.create_topic("orders", 2, None))
    for operation, outcome in (
        (admin.truncate_before("orders", 0, 10**9), "nothing was removed"),
        (admin.reset_group("g", "orders", 10**9, 0), "no offset was changed"),
        (admin.reset_group("g", "orders", Ordinal(7), 0), "no offset was changed"),
    ):
        with pytest.raises(OffsetOutOfRange, match=rf"Partition 0 of orders ends at .* is not there, and {outcome}"):
            rig.run(operation)
    assert not any(isinstance(each, commands.Truncate | commands.ResetGroup) for each in rig.broker.requests)
    assert rig.run(admin.truncate_before("orders", 0, 4)) == 4
    with pytest.raises(BadRequest, match="An offset is a whole number, not 'latest'"):
        rig.run(admin.truncate_before("orders", 0, "latest"))  # type: ignore[arg-type]


def test_a_topic_has_a_partition_at_least(rig: Rig, admin: AdminCore) -> None:
    with pytest.raises(BadRequest, match=r"1 partition or more, up to limits\.partitions_per_topic, not 0"):
        rig.run(admin.create_topic("orders", 0, None))


def test_a_group_that_is_not_there_is_set_only_where_that_is_meant(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.create_topic("orders", 2, None))
    with pytest.raises(NotAllowed, match=r"no group 'gg'\. Did you mean 'g'\? With create=True it is made"):
        rig.run(admin.reset_group("gg", "orders", "earliest", None))
    assert rig.run(admin.reset_group("gg", "orders", "earliest", None, create=True)) == {0: 0, 1: 0}


@pytest.mark.parametrize("settings", [None, "retention.seconds=7d", ["retention.seconds"]])
def test_settings_that_are_no_mapping_are_reported_in_a_sentence(rig: Rig, admin: AdminCore, settings: Any) -> None:
    with pytest.raises(BadRequest, match="settings of a topic are a mapping"):
        rig.run(admin.set_topic("orders", settings))


def test_the_rest(rig: Rig, admin: AdminCore) -> None:
    assert rig.run(admin.ping()) > 0
    assert rig.run(admin.status()) == {"version": "1"}
    assert [each.group for each in rig.run(admin.groups())] == ["g"]
    assert rig.run(admin.group("g")).lag == 0


def test_what_waits_is_listed_counted_described_moved_and_taken_back(rig: Rig, admin: AdminCore) -> None:
    rig.broker.waiting = [Waiting(NOW_MS + 1000 * n, n, "orders", 0, b"r" * 20) for n in range(5)]
    found = rig.run(admin.delayed("orders", first=NOW_MS / 1000 + 1, limit=3))
    assert [each.due_ms - NOW_MS for each in found] == [1000, 2000, 3000]
    assert rig.run(admin.delayed_histogram([0, NOW_MS / 1000 + 2, 1 << 40], "orders")).counts == (2, 3)
    assert rig.run(admin.describe_delayed(found[0].handle)) == found[0]
    moved = rig.run(admin.reschedule(found[0].handle, deliver_at=1 << 37))
    assert rig.run(admin.describe_delayed(moved.handle)).due_ms == 1000 << 37
    assert rig.run(admin.cancel(moved.handle)) == "cancelled"
    assert [each.number for each in rig.broker.waiting] == [0, 2, 3, 4]


def in_doubt(*rows: tuple[str, int]) -> tuple[Rig, InDoubtBroker, AdminCore]:
    broker = InDoubtBroker(*(row(xid, epoch) for xid, epoch in rows))
    rig = Rig(broker)
    return rig, broker, AdminCore(rig.link, 5.0)


def test_pages_on_which_nothing_is_wanted_are_passed() -> None:
    rig, _, admin = in_doubt(*((f"x-{number}", number) for number in range(1, 2502)))
    assert [each.epoch for each in rig.run(admin.transactions(["open"]))] == []
    rig, broker, admin = in_doubt(*((f"x-{number}", number) for number in range(1, 2502)))
    broker.rows[2200]["state"] = "applying"
    assert [each.epoch for each in rig.run(admin.transactions(["applying"]))] == [2201]


@pytest.mark.parametrize(
    ("states", "limit", "error", "sentence"),
    [
        (["weird"], None, BadRequest, "no unfinished transaction in a state 'weird': states are open, preparing"),
        ("prepared", None, TypeError, r"states is a list, as \[\"prepared\"\], not 'prepared'"),
        (5, None, TypeError, "states is a list"),
        (None, -1, BadRequest, "limit is 0 or more"),
        (None, "x", TypeError, "limit is a whole number, or None for all, not 'x'"),
    ],
)
def test_states_and_limits_that_are_none_are_reported(
    states: Any, limit: Any, error: type[Exception], sentence: str
) -> None:
    rig, broker, admin = in_doubt(("x", 1))
    with pytest.raises(error, match=sentence):
        rig.run(admin.transactions(states, limit=limit))
    assert not any(isinstance(each, commands.ListTransactions) for each in broker.requests)


def test_all_transactions_are_listed_however_many_pages_they_fill() -> None:
    rig, broker, admin = in_doubt(*((f"x-{number}", number) for number in range(1, 2502)))
    found = rig.run(admin.transactions())
    assert [each.epoch for each in found] == list(range(1, 2502))
    asked = [request for request in broker.requests if isinstance(request, commands.ListTransactions)]
    assert [request.after for request in asked] == [0, 1000, 2000]
    assert len(rig.run(admin.transactions(["prepared"], group="shop", limit=1500))) == 1500
    assert broker.requests[-1] == commands.ListTransactions(["prepared"], 1000, 500, "shop")
    assert [each.epoch for each in rig.run(admin.transactions(after=2499, limit=7))] == [2500, 2501]
    assert rig.run(admin.transactions(limit=0)) == []


def test_a_decision_names_the_very_transaction_that_bears_the_xid() -> None:
    rig, broker, admin = in_doubt(("order", 3), ("other", 5), ("order", 8))
    broker.rows[-1]["dropped"] = 2
    assert rig.run(admin.transaction("order", 3)).epoch == 3
    assert rig.run(admin.commit_transaction("order", 0)) == ("order", 8, "committed", 2, 0)
    assert rig.run(admin.commit_transaction("order", 3, heuristic=False)).state == "committed"
    assert rig.run(admin.rollback_transaction("other", 0)).state == "heuristic_rolled_back"
    assert rig.run(admin.forget_transaction("order", 0)) is True
    assert broker.decided == [
        commands.CommitTransaction("order", 8, False, True, []),
        commands.CommitTransaction("order", 3, False, False, []),
        commands.RollbackTransaction("other", 5, True),
        commands.ForgetTransaction("order", 8),
    ]


def test_nothing_is_decided_of_a_transaction_that_is_not_known() -> None:
    rig, broker, admin = in_doubt(("order", 3))
    assert rig.run(admin.transaction("ordre", 0)).state == "unknown"
    for operation in (
        admin.commit_transaction("ordre", 0),
        admin.rollback_transaction("ordre", 0),
        admin.forget_transaction("ordre", 0),
    ):
        with pytest.raises(UnknownTransaction, match="'ordre'"):
            rig.run(operation)
    assert broker.decided == []


def test_commit_groups_are_listed_committed_aborted_and_forgotten() -> None:
    rig, _, admin = in_doubt()
    found = rig.run(admin.commit_groups())
    assert [(each.group, each.sequence, each.details) for each in found] == [
        (f"query-{number}", number, {"members": 4}) for number in range(3)
    ]
    ended = rig.run(admin.commit_group("query-1", 7, "run", [("a", 1), ("b", 2)], 10))
    assert ended == ("committed", False, 10, 1)
    with pytest.raises(GroupIncomplete):
        rig.run(admin.commit_group("query-1", 7, "run", [("a", 1)], 10))
    assert rig.run(admin.abort_commit_group("query-1", 8, "run")) == "aborted"
    assert [rig.run(admin.forget_commit_group("query-1")) for _ in range(2)] == [True, False]


def test_places() -> None:
    assert locate_fields("earliest") == (commands.BY_EARLIEST, 0)
    assert locate_fields("latest") == (commands.BY_LATEST, 0)
    assert locate_fields(5) == (commands.BY_OFFSET, 5)
    assert locate_fields(Ordinal(7)) == (commands.BY_ORDINAL, 7)
    assert locate_fields(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == (commands.BY_TIME_MS, 1000)
    with pytest.raises(BadRequest, match="time zone"):
        locate_fields(datetime(2026, 1, 1))
    with pytest.raises(BadRequest, match="A position is"):
        locate_fields("tomorrow")
