"""The groups that the broker has in memory, and what bounds them: in number, in members, in what these ask for."""

from collections.abc import Iterator, Mapping

from tfmq.broker.group import Group
from tfmq.broker.group_member import Member, Wishes
from tfmq.broker.register import Register
from tfmq.broker.topics import Topics
from tfmq.errors import NotAllowed


class GroupRoll:
    """See the module. A group of which everything is in the catalog is dropped, and made again when it is asked for."""

    def __init__(self, register: Register, topics: Topics, limits: Mapping[str, int]) -> None:
        self._register, self._topics, self._limits = register, topics, limits
        self._groups: dict[str, Group] = {}
        self._written: dict[str, int] = {}
        """How many entries of a group are on their way to the catalog: until then it may not be there yet."""
        self._asked = 0
        self._granting = 0
        self._generation = 0

    def __iter__(self) -> Iterator[Group]:
        yield from self._groups.values()

    def find(self, name: str) -> Group | None:
        """The group, if it is in memory."""
        return self._groups.get(name)

    def group(self, name: str) -> Group:
        """The group, which is in memory from now on."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, self._register, self._topics)
        return group

    def drop_if_empty(self, group: Group) -> None:
        if group.empty and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def next_generation(self) -> int:
        """A number that no group had before."""
        self._generation = max(self._generation, self._register.generation) + 1
        return self._generation

    # What is on its way to the catalog

    def submitted(self, name: str, grants: int = 0) -> None:
        """An entry of the group was handed to the catalog."""
        self._written[name] = self._written.get(name, 0) + 1
        self._granting += grants

    def arrived(self, name: str, grants: int = 0) -> None:
        """It is there, or never will be."""
        self._granting -= grants
        self._written[name] -= 1
        if not self._written[name]:
            del self._written[name]

    @property
    def room(self) -> int:
        """How many partitions more may have an owner."""
        return self._limits["group_owners"] - self._register.owners_count - self._granting

    # Limits

    def refuse_many(self, name: str) -> None:
        """Raises NotAllowed for one group too many."""
        known = self._register.groups
        if name in known:
            return
        coming = {each for each in (*self._written, *self._groups) if each not in known and each != name}
        if len(known) + len(coming) >= self._limits["groups"]:
            raise NotAllowed(f"The broker has {len(known)} groups, its limit (limits.groups).")

    def refuse_member(self, group: Group, instead_of: Member | None) -> None:
        """Raises NotAllowed for one member too many."""
        if instead_of is None and len(group.members) >= self._limits["group_members"]:
            raise NotAllowed(
                f"The group {group.name} has {len(group.members)} members (limits.group_members)."
            )

    def ask(self, member: Member, wishes: Wishes | None, instead_of: Member | None = None) -> None:
        """The member asks for something else from now on, or (None) for nothing. Raises NotAllowed for too many names;
        then nothing has changed.
        """
        before = member if instead_of is None else instead_of
        less = 0 if before.wishes is None else before.wishes.size
        more = 0 if wishes is None else wishes.size
        if more > less and self._asked + more - less > self._limits["group_subscriptions"]:
            raise NotAllowed(
                f"The members of all groups ask for {self._asked} topics and partitions already"
                " (limits.group_subscriptions)."
            )
        self._asked += more - less
        before.wishes = None
        member.wishes = wishes
