"""What every storage of offsets does: the tests of the promises of `tfmq.offsets.storage`, with a subclass for each.

Fixtures of the subclass: `open_one` opens the storage once more, as another member does; `open_shaky` one whose calls
fail at any step.
"""

import threading
from collections.abc import Callable

import pytest

from tests.offsets.contention import OpenShaky, Struggle
from tests.scale import scaled, seeded
from tfmq.errors import Closed, Fenced
from tfmq.offsets.storage import ClaimingStorage, PartitionName, StoredOffset, fenced_partitions

Open = Callable[[], ClaimingStorage]
A, B = PartitionName("orders", 0), PartitionName("orders", 11)
PLACE = StoredOffset(offset=1 << 40, index=3, incarnation=1 << 33, epoch=2)
CALLS = 400
GENERATION = 1 << 62
"""As large as one of ZooKeeper's numbers."""


class Contract:
    """One storage."""

    def test_what_was_saved_is_read_again_with_its_generation(self, open_one: Open) -> None:
        first = open_one()
        assert first.read("billing", [A, B]) == {}
        first.save("billing", GENERATION, {A: PLACE})
        first.close()
        assert open_one().read("billing", [A, B]) == {A: PLACE._replace(generation=GENERATION)}

    def test_groups_topics_and_partitions_do_not_disturb_each_other(self, open_one: Open) -> None:
        storage, other = open_one(), PartitionName("payments", 0)
        storage.save("one", 1, {A: PLACE})
        storage.save("one", 1, {B: PLACE._replace(offset=1), other: PLACE._replace(offset=3)})
        storage.save("two", 9, {A: PLACE._replace(offset=2)})
        kept = storage.read("one", [A, B, other])
        assert {name: each.offset for name, each in kept.items()} == {A: 1 << 40, B: 1, other: 3}
        assert storage.read("two", [A, B])[A].offset == 2
        assert list(storage.read("one", [B])) == [B]
        assert storage.read("one", []) == {}

    def test_offset_zero_is_an_offset(self, open_one: Open) -> None:
        open_one().save("billing", 1, {A: StoredOffset(0)})
        assert open_one().read("billing", [A])[A].offset == 0

    def test_a_member_may_go_back_in_what_it_owns(self, open_one: Open) -> None:
        storage = open_one()
        storage.save("billing", 1, {A: PLACE})
        storage.save("billing", 1, {A: StoredOffset(5)})
        assert open_one().read("billing", [A])[A].offset == 5

    def test_a_member_that_lost_a_partition_is_fenced_there_and_only_there(self, open_one: Open) -> None:
        old, new = open_one(), open_one()
        old.save("billing", 3, {A: PLACE, B: PLACE})
        new.save("billing", 4, {A: PLACE._replace(offset=900)})
        with pytest.raises(Fenced, match="generation 4") as caught:
            old.save("billing", 3, {A: PLACE._replace(offset=1), B: PLACE._replace(offset=2)})
        assert fenced_partitions(caught.value, [A, B]) == {A}
        assert {name: each.offset for name, each in old.read("billing", [A, B]).items()} == {A: 900, B: 2}

    def test_a_claim_fences_before_anything_is_saved(self, open_one: Open) -> None:
        old, new = open_one(), open_one()
        old.save("billing", 3, {A: PLACE})
        assert new.claim("billing", 4, [A, B]) == {A: PLACE._replace(generation=4)}
        for name in (A, B):
            with pytest.raises(Fenced):
                old.save("billing", 3, {name: PLACE._replace(offset=1)})
        assert new.read("billing", [A, B]) == {A: PLACE._replace(generation=4)}
        new.save("billing", 4, {B: PLACE})
        assert open_one().read("billing", [B]) == {B: PLACE._replace(generation=4)}

    def test_a_claim_of_a_generation_that_is_over_claims_what_is_free(self, open_one: Open) -> None:
        storage = open_one()
        storage.claim("billing", 9, [A])
        with pytest.raises(Fenced) as caught:
            storage.claim("billing", 5, [A, B])
        assert fenced_partitions(caught.value, [A, B]) == {A}
        with pytest.raises(Fenced):
            storage.save("billing", 4, {B: PLACE})
        assert storage.claim("billing", 5, [B]) == {}

    def test_rows_of_one_save_are_each_under_their_own_generation(self, open_one: Open) -> None:
        """A member has its partitions since different times; what it got later does not vouch for what it lost."""
        old, new = open_one(), open_one()
        old.claim("billing", 3, [A])
        old.claim("billing", 8, [B])
        new.claim("billing", 5, [A])
        with pytest.raises(Fenced) as caught:
            old.save("billing", 8, {A: PLACE._replace(generation=3), B: PLACE._replace(generation=8)})
        assert fenced_partitions(caught.value, [A, B]) == {A}
        assert old.read("billing", [A, B]) == {B: PLACE._replace(generation=8)}

    def test_members_that_claim_the_same_at_once_find_one_winner(self, open_one: Open) -> None:
        """Invariant: after all claims only the highest generation saves."""
        names = [PartitionName("orders", number) for number in range(4)]
        storages = {generation: open_one() for generation in range(1, 6)}
        refused: dict[int, BaseException] = {}

        def claim(generation: int) -> None:
            try:
                storages[generation].claim("billing", generation, names[:: 1 if generation % 2 else -1])
            except BaseException as error:
                refused[generation] = error

        threads = [threading.Thread(target=claim, args=(each,)) for each in storages]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert all(isinstance(error, Fenced) for error in refused.values()), refused
        assert 5 not in refused
        for generation, storage in storages.items():
            if generation < 5:
                with pytest.raises(Fenced):
                    storage.save("billing", generation, dict.fromkeys(names, PLACE))
        storages[5].save("billing", 5, dict.fromkeys(names, PLACE))

    def test_offsets_never_go_back_whichever_member_fails_or_is_late(
        self, open_one: Open, open_shaky: OpenShaky, request: pytest.FixtureRequest
    ) -> None:
        """Invariant: what a save has returned for stays, and after a claim no earlier owner changes anything."""
        struggle = Struggle(open_one, open_shaky, seeded("struggle", request.node.nodeid), max(10, scaled(CALLS)))
        struggle.run()
        assert struggle.looks

    def test_a_closed_one_is_used_no_more(self, open_one: Open) -> None:
        storage = open_one()
        storage.read("billing", [A])
        storage.close()
        storage.close()
        for use in (
            lambda: storage.read("billing", [A]),
            lambda: storage.save("billing", 1, {A: PLACE}),
            lambda: storage.claim("billing", 1, [A]),
        ):
            with pytest.raises(Closed):
                use()
