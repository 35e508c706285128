"""Planted bugs: groups at the broker: the owners of partitions."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

GROUP: Final = "tests/broker/groups/test_group.py"
GROUPS: Final = "tests/broker/groups/test_assignment.py"
OFFSETS: Final = "tests/broker/groups/test_offset_commands.py"
ROLL: Final = "tests/broker/groups/test_coordinator.py"
WATCH: Final = "tests/broker/groups/test_session_timeout.py"

_GROUP = "tfmq/broker/groups/group.py"
_GROUPS = "tfmq/broker/groups/coordinator.py"
_ROLL = "tfmq/broker/groups/coordinator.py"
_REGISTER = "tfmq/broker/catalog_state.py"

GROUP_OWNERS: Final = (
    Mutant(
        "grant-that-was-refused-is-reported",
        "an assignment that is not in the catalog is not given to any member",
        _GROUP,
        "            if in_catalog and member is not None and self._released.get(key) != owner.generation:\n",
        "            if member is not None and self._released.get(key) != owner.generation:\n",
        [GROUP, GROUPS],
    ),
    Mutant(
        "grant-that-may-be-on-the-disk-is-given-again",
        "an assignment that may be durable is not reported, and not given to another member",
        _GROUP,
        "            if not forced and in_catalog:\n                continue",
        "            if not forced and not in_catalog:\n                continue",
        [GROUP],
    ),
    Mutant(
        "planned-for-a-dead-member-is-kept-for-it",
        "the planned assignment of a dead member is given to the next one",
        _GROUP,
        (
            "            if key not in self._living_owners or self.target.get(key) != owner.member:\n"
            "                self.target_outdated = True\n"
        ),
        "",
        [GROUP, GROUPS],
    ),
    Mutant(
        "grant-of-an-earlier-life-is-kept",
        "a member that joins again has no partitions of its earlier membership",
        _GROUP,
        (
            '        """Add a member that joined. Partitions of an earlier member with the same id are released."""\n'
            "        self._release_all_of(member.id)\n"
        ),
        '        """Add a member that joined. Partitions of an earlier member with the same id are released."""\n',
        [GROUP, GROUPS],
    ),
    Mutant(
        "who-leaves-keeps-its-partitions",
        "a leaving member releases its partitions at once, in the catalog too",
        _GROUP,
        (
            '        """Remove a member for good and release its partitions."""\n'
            "        self._release_all_of(member_id)\n"
        ),
        '        """Remove a member for good and release its partitions."""\n',
        [f"{GROUPS}::test_the_last_member_that_leaves_releases_its_partitions_in_the_catalog_too"],
    ),
    Mutant(
        "gives-up-what-it-has-not-heard-of",
        "a heartbeat that was sent before an assignment does not release it",
        _GROUP,
        "if grant <= generation and key not in kept]",
        "if key not in kept]",
        [GROUP],
    ),
    Mutant(
        "revoked-partition-stays-in-the-assignment",
        "a revoked partition is no longer in its member's assignment",
        _GROUP,
        "return {key: grant for key, grant in member.owned.items() if self.target.get(key) == member.id}",
        "return dict(member.owned)",
        [GROUP, GROUPS],
    ),
    Mutant(
        "owner-on-its-way-to-the-disk-does-not-fence",
        "a takeover fences from the moment it is planned",
        _GROUP,
        "        owner = self._pending.get(key) or self.row.owners.get(key)\n        return None",
        "        owner = self.row.owners.get(key)\n        return None",
        [GROUP, OFFSETS],
    ),
    Mutant(
        "commit-of-what-was-given-up",
        "a member that released a partition commits nothing of it",
        _GROUP,
        "        return None if owner is None or self._released.get(key) == owner.generation else owner\n",
        "        return owner\n",
        [GROUP, GROUPS, OFFSETS],
    ),
    Mutant(
        "owners-unbounded",
        "the number of partitions with an owner is bounded",
        _GROUP,
        "                if known or room > 0:\n",
        "                if known or room >= 0:\n",
        [GROUP, ROLL],
    ),
    Mutant(
        "released-partition-keeps-its-owner-in-the-catalog",
        "a partition that was released before a restart is free after it",
        _GROUP,
        '        rows: dict[tuple[str, int], list[Key]] = {("", 0): self.released} if self.released else {}\n',
        "        rows: dict[tuple[str, int], list[Key]] = {}\n",
        [GROUP, GROUPS],
    ),
    Mutant(
        "owners-from-before-the-start-are-dealt-out",
        "owners keep their partitions after a restart, until they send a heartbeat",
        _GROUP,
        (
            "        pinned = {key: each.id for each in self.members.values() if each.subscription is None fo"
            "r key in each.owned}\n"
        ),
        "        pinned = {key: each.id for each in () for key in each.owned}\n",
        [GROUP, GROUPS],
    ),
    Mutant(
        "strategy-of-the-youngest",
        "the strategy is that of the oldest member",
        _GROUP,
        (
            "        return next((each.subscription.strategy for each in self.members.values() if each.subscr"
            'iption is not None), "")\n'
        ),
        (
            "        return next(\n"
            "            (each.subscription.strategy for each in reversed(self.members.values()) if each.subs"
            "cription is not None),\n"
            '            "",\n'
            "        )\n"
        ),
        [GROUPS],
    ),
    Mutant(
        "member-without-wishes-is-not-asked",
        "a member that was declared dead is asked for its topics",
        _GROUP,
        ("        if member.subscription is None:\n            return True\n"),
        "",
        [GROUP, WATCH],
    ),
    Mutant(
        "revocation-not-reported",
        "a member is notified at once which partitions it must release",
        _GROUP,
        "        if any(not leaving and key not in share for key, leaving in held.items()):\n            return True\n",
        "",
        [GROUP, GROUPS],
    ),
    Mutant(
        "owners-forgotten-at-a-restart",
        "owners keep their partitions after a restart of the broker",
        _GROUPS,
        ("            if row.owners:\n                group = self._find_or_create(name)\n"),
        ("            if row.owners and not name:\n                group = self._find_or_create(name)\n"),
        [GROUPS],
    ),
    Mutant(
        "owners-not-in-a-snapshot",
        "owners are in the catalog's snapshot",
        _REGISTER,
        "(name, row.generation, _rows_by_key(row.owners), _rows_by_key(row.offsets))",
        "(name, row.generation, _rows_by_key({}), _rows_by_key(row.offsets))",
        ["tests/broker/test_catalog_state.py"],
    ),
    Mutant(
        "topic-that-went-keeps-its-owners",
        "deleted partitions have no owner",
        _REGISTER,
        "            group.owners = {key: owner for key, owner in group.owners.items() if key[0] != incarnation}\n",
        "",
        ["tests/broker/test_catalog_state.py", GROUPS],
    ),
    Mutant(
        "generation-given-twice",
        "a generation is assigned once, also over a restart",
        _ROLL,
        "        self._generation = max(self._generation, self.catalog.state.generation) + 1\n",
        "        self._generation = self._generation + 1\n",
        [GROUPS],
    ),
    Mutant(
        "join-acked-before-it-is-written",
        "a member that could not be stored in the catalog is not a member",
        _GROUPS,
        "        if error is not None:\n            if there:\n",
        "        if error is not None and not there:\n            if there:\n",
        [GROUPS],
    ),
    Mutant(
        "refused-plan-is-not-tried-again",
        "an assignment that a full disk refused is tried again",
        _GROUPS,
        "            self._timers.after(RETRY_SECONDS, retry)\n",
        "",
        [GROUPS],
    ),
    Mutant(
        "end-of-the-last-member-is-not-tried-again",
        "no start waits for a member that left or expired while the disk was full",
        _GROUPS,
        "        elif error is not None and (group.members or group.row.owners):\n",
        "        elif error is not None and group.members:\n",
        [f"{GROUPS}::test_the_end_of_the_last_member_on_a_full_disk_is_in_the_catalog_once_there_is_space"],
    ),
    Mutant(
        "end-by-a-reset-or-deletion-is-not-tried-again",
        "no start waits for a member whose group was reset or deleted while the disk was full",
        _GROUPS,
        "        if error is not None and group.row.owners:\n            self._retry_later(group)",
        "        if False:\n            self._retry_later(group)",
        [f"{GROUPS}::test_the_end_of_the_last_member_on_a_full_disk_is_in_the_catalog_once_there_is_space"],
    ),
    Mutant(
        "a-group-that-waits-for-space-is-dropped",
        "the partitions of a member that left while the disk was full are released later",
        _GROUPS,
        "(self._due, self._pending_entries, self._retries))\n",
        "(self._due, self._pending_entries))\n",
        [f"{GROUPS}::test_the_end_of_the_last_member_on_a_full_disk_is_in_the_catalog_once_there_is_space"],
    ),
    Mutant(
        "new-partitions-not-assigned",
        "new partitions are assigned to a member",
        _GROUPS,
        ("            if group.subscribes_to_any(changed):\n                group.target_outdated = True\n"),
        "            if group.subscribes_to_any(changed):\n",
        [GROUPS],
    ),
    Mutant(
        "other-wishes-are-not-looked-at",
        "a member that requests other topics releases the partitions of the former ones",
        _GROUPS,
        ("                self._set_subscription(member, wishes)\n                group.target_outdated = True\n"),
        "                self._set_subscription(member, wishes)\n",
        [GROUPS],
    ),
    Mutant(
        "join-of-an-earlier-life-goes-on",
        "a member that joined again counts once",
        _GROUPS,
        "        if member is None or generation < member.joined:\n",
        "        if member is None:\n",
        [GROUPS],
    ),
    Mutant(
        "dead-member-keeps-what-it-had",
        "the partitions of a dead member are free",
        _GROUPS,
        (
            '        self._remove_member(group, member, fenced_error(group, member.id, "sent nothing for its '
            'session timeout"))\n'
            "        group.expire_member(member.id)\n"
        ),
        (
            '        self._remove_member(group, member, fenced_error(group, member.id, "sent nothing for its '
            'session timeout"))\n'
        ),
        [WATCH],
    ),
    Mutant(
        "expired-members-come-back-at-a-start",
        "a member that expired before a restart is not waited for",
        "tfmq/broker/groups/group.py",
        "            if not owner.expired:\n                found.setdefault",
        "            if True:\n                found.setdefault",
        [GROUPS],
    ),
    Mutant(
        "end-of-a-session-is-not-written",
        "a member that expired before a restart is not waited for",
        _GROUPS,
        "        if changes.marks:\n",
        "        if changes.marks and entries:\n",
        [GROUPS],
    ),
)
