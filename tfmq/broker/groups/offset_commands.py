"""Commands for group offsets: owners of partitions commit, operators reset and delete."""

from collections.abc import Iterable, Sequence
from functools import partial

from tfmq.broker.catalog_state import GENERATION, GROUP_GONE
from tfmq.broker.groups.coordinator import GroupCoordinator, fenced_error
from tfmq.broker.groups.group import Group
from tfmq.broker.groups.members import client_identity, is_live
from tfmq.broker.groups.offsets import GroupOffsetStore, OffsetRow
from tfmq.broker.reply import Reply, Session, reply_when_done
from tfmq.broker.timers import Timers
from tfmq.errors import BadRequest, NotAllowed
from tfmq.protocol.commands import CommitOffsets, DeleteGroup, GroupOffset, PartitionName, ResetGroup


class OffsetCommands:
    """The commands for group offsets. `GroupCoordinator` knows who may commit, `GroupOffsetStore` has the offsets."""

    def __init__(self, groups: GroupCoordinator, offsets: GroupOffsetStore, timers: Timers) -> None:
        self._groups, self._offsets, self._timers = groups, offsets, timers

    def commit(self, request: CommitOffsets, reply: Reply, session: Session) -> None:
        """Commit the offsets of partitions that the member owns. The reply lists the other partitions as fenced.

        Raises Fenced if the member owns none of the partitions, Busy while a transaction has an offset in doubt.
        """
        group = self._groups.group_of_member(request.group, request.member, request.generation, session)
        places: list[OffsetRow] = []
        others: list[PartitionName] = []
        for each, place in self._existing(request.offsets):
            if group.owns(request.member, request.generation, place[:2]):
                places.append(place)
            else:
                others.append(PartitionName(each.topic, each.partition))
        if others and not places:
            raise _not_owned_error(group, request.member, others)
        self._offsets.commit(request.group, request.generation, places, reply, fenced=others)

    def transaction_rows(
        self, name: str, member_id: str, generation: int, offsets: Sequence[GroupOffset]
    ) -> list[OffsetRow]:
        """Return the offsets that a transaction will commit.

        Raises Fenced if the member does not own a partition, Busy if another transaction has an offset in doubt,
        NotAllowed if the offsets exceed the broker's limit.
        """
        # None says that the request did not come on the member's own connection, but on the producer's.
        group = self._groups.group_of_member(name, member_id, generation, None)
        # If a partition is named repeatedly, only its last offset is stored.
        known = {place[:2]: (each, place) for each, place in self._existing(offsets)}
        others = [
            PartitionName(each.topic, each.partition)
            for key, (each, _) in known.items()
            if not group.owns(member_id, generation, key)
        ]
        if others:
            raise _not_owned_error(group, member_id, others)
        places = [place for _, place in known.values()]
        self._offsets.require_free(name, places)
        return places

    def _existing(self, offsets: Sequence[GroupOffset]) -> Iterable[tuple[GroupOffset, OffsetRow]]:
        for each in offsets:
            place = self._offsets.offset_row(each)
            if place is not None:
                yield each, place

    def reset(self, request: ResetGroup, reply: Reply) -> None:
        """Set offsets of a group, and remove its members. Raises NotAllowed (live member), Busy (offset in doubt)."""
        self._check_no_live_member(request.group)
        if not request.offsets:
            raise BadRequest("A reset without offsets changes nothing: name at least one partition.")
        found = (self._offsets.offset_row(each, any_incarnation=True) for each in request.offsets)
        places = [place for place in found if place is not None]
        self._offsets.require_free(request.group, places)
        group, generation = self._groups.remove_all_members(request.group)
        self._offsets.commit(
            request.group,
            generation,
            places,
            reply,
            before=[(GENERATION, request.group, generation, "")],
            done=partial(self._groups.removal_written, group),
        )

    def delete(self, request: DeleteGroup, reply: Reply) -> None:
        """Delete a group. Reply whether it existed. Raises NotAllowed (live member), Busy (offset in doubt)."""
        self._check_no_live_member(request.group)
        if request.group not in self._groups.catalog.state.groups and self._groups.find(request.group) is None:
            reply.ok(False)
            return
        self._offsets.require_unlocked(request.group)
        group = self._groups.remove_all_members(request.group)[0]

        def gone(error: BaseException | None) -> None:
            self._groups.removal_written(group, error)
            reply_when_done(reply, lambda: (True,))(error)

        self._groups.catalog.submit((GROUP_GONE, request.group), gone)

    def _check_no_live_member(self, name: str) -> None:
        group = self._groups.find(name)
        for member in () if group is None else group.members.values():
            if is_live(member, self._timers.now()):
                raise NotAllowed(
                    f"The group {name} has a live member: {member.id} ({client_identity(member)})."
                    " Stop its members, or use another group.",
                    member=member.id,
                )


def _not_owned_error(group: Group, member_id: str, others: Sequence[PartitionName]) -> Exception:
    names = ", ".join(f"{each.topic}-{each.partition}" for each in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return fenced_error(group, member_id, f"has not got {names}{more} any more")
