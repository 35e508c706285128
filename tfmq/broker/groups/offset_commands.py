"""Commands for group offsets: commit by owners, reset and delete by operators."""

from collections.abc import Iterable, Sequence
from functools import partial

from tfmq.broker.catalog_state import GENERATION, GROUP_GONE
from tfmq.broker.groups.coordinator import Groups, fenced
from tfmq.broker.groups.group import Group, client, is_live
from tfmq.broker.groups.offsets import GroupPlace, Offsets
from tfmq.broker.reply import Reply, Session, client_error
from tfmq.broker.timers import Timers
from tfmq.errors import BadRequest, NotAllowed
from tfmq.protocol.commands import CommitOffsets, DeleteGroup, GroupOffset, PartitionName, ResetGroup


class GroupOffsets:
    """Offset commands. `GroupCoordinator` decides who may commit, `GroupOffsetStore` stores."""

    def __init__(self, groups: Groups, offsets: Offsets, timers: Timers) -> None:
        self._groups, self._offsets, self._timers = groups, offsets, timers

    def commit(self, request: CommitOffsets, reply: Reply, session: Session) -> None:
        """Commit offsets of the member's partitions.

        Those of other partitions are reported as fenced.

        Raises Fenced if the member owns none of them, Busy while a transaction has some of them in doubt.
        """
        group = self._groups.member_of(request.group, request.member, request.generation, session)
        places: list[GroupPlace] = []
        others: list[PartitionName] = []
        for each, place in self._known(request.offsets):
            if group.has(request.member, request.generation, place[:2]):
                places.append(place)
            else:
                others.append(PartitionName(each.topic, each.partition))
        if others and not places:
            raise _not_its_own(group, request.member, others)
        self._offsets.save(request.group, request.generation, places, reply, fenced=others)

    def places(
        self, name: str, member_id: str, generation: int, offsets: Sequence[GroupOffset]
    ) -> list[GroupPlace]:
        """Return the offsets that a transaction is to commit: all of them, or an error.

        Raises Fenced, and what `GroupOffsetStore.require_free` raises.
        """
        # The request uses the producer's connection, so it is no sign of life on the member's own one.
        group = self._groups.member_of(name, member_id, generation, None)
        # The last offset of a partition counts; a partition that is named repeatedly is stored once.
        known = {place[:2]: (each, place) for each, place in self._known(offsets)}
        others = [
            PartitionName(each.topic, each.partition)
            for key, (each, _) in known.items()
            if not group.has(member_id, generation, key)
        ]
        if others:
            raise _not_its_own(group, member_id, others)
        places = [place for _, place in known.values()]
        self._offsets.require_free(name, places)
        return places

    def _known(self, offsets: Sequence[GroupOffset]) -> Iterable[tuple[GroupOffset, GroupPlace]]:
        """Yield the offsets whose partitions exist."""
        for each in offsets:
            place = self._offsets.place(each)
            if place is not None:
                yield each, place

    def reset(self, request: ResetGroup, reply: Reply) -> None:
        """Set the offsets of a group without live members, and release all its partitions.

        Raises NotAllowed, BadRequest, Busy.
        """
        self._refuse_live(request.group)
        if not request.offsets:
            raise BadRequest("A reset without offsets changes nothing: name at least one partition.")
        places = self._offsets.places(request.offsets, any_incarnation=True)
        self._offsets.require_free(request.group, places)
        group, generation = self._groups.clear(request.group)
        self._offsets.save(
            request.group,
            generation,
            places,
            reply,
            before=[(GENERATION, request.group, generation, "")],
            done=partial(self._groups.cleared, group),
        )

    def delete(self, request: DeleteGroup, reply: Reply) -> None:
        """Delete a group without live members. Reply whether it existed. Raises NotAllowed, Busy."""
        self._refuse_live(request.group)
        if not self._groups.known(request.group):
            reply.ok(False)
            return
        self._offsets.require_free_group(request.group)
        group = self._groups.clear(request.group)[0]

        def gone(error: BaseException | None) -> None:
            self._groups.cleared(group, error)
            if error is not None:
                reply.error(client_error(error))
            else:
                reply.ok(True)

        self._groups.submit((GROUP_GONE, request.group), gone)

    def _refuse_live(self, name: str) -> None:
        group = self._groups.find(name)
        for member in () if group is None else group.members.values():
            if is_live(member, self._timers.now()):
                raise NotAllowed(
                    f"The group {name} has a live member: {member.id} ({client(member)})."
                    " Stop its members, or use another group.",
                    member=member.id,
                )


def _not_its_own(group: Group, member_id: str, others: Sequence[PartitionName]) -> Exception:
    names = ", ".join(f"{each.topic}-{each.partition}" for each in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return fenced(group, member_id, f"has not got {names}{more} any more")
