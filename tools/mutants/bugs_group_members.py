"""Planted bugs: groups at the broker: live members, commits, assignments."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

GROUPS: Final = "tests/broker/groups/test_assignment.py"
OFFSETS: Final = "tests/broker/groups/test_offset_commands.py"
ROLL: Final = "tests/broker/groups/test_coordinator.py"
WAITS: Final = "tests/broker/groups/test_heartbeats.py"
WATCH: Final = "tests/broker/groups/test_session_timeout.py"
MEMBER: Final = "tests/broker/groups/test_members.py"
STRATEGIES: Final = "tests/broker/groups/test_assignors.py"
DESCRIPTIONS: Final = "tests/broker/groups/test_group.py"

_GROUPS = "tfmq/broker/groups/coordinator.py"
_OFFSETS = "tfmq/broker/groups/offset_commands.py"
_ROLL = "tfmq/broker/groups/coordinator.py"
_WAITS = "tfmq/broker/groups/coordinator.py"
_WATCH = "tfmq/broker/groups/coordinator.py"
_MEMBER = "tfmq/broker/groups/members.py"
_STRATEGIES = "tfmq/broker/groups/assignors.py"

ALIVE: Final = (
    Mutant(
        "session-without-an-end",
        "a silent member is dead after its session time-out",
        _MEMBER,
        ("        if self.disconnected_at is None:\n            return self.seen_at + seconds\n"),
        ("        if self.disconnected_at is None:\n            return self.seen_at + seconds * 10\n"),
        [MEMBER, WATCH],
    ),
    Mutant(
        "dead-with-its-connection",
        "a member whose connection is lost has a tenth of its session time to return",
        _MEMBER,
        "        return min(self.seen_at + seconds, self.disconnected_at + seconds / RECONNECT_FRACTION)\n",
        "        return min(self.seen_at + seconds, self.disconnected_at)\n",
        [MEMBER, WATCH],
    ),
    Mutant(
        "heartbeats-do-not-count",
        "a handler that runs for minutes keeps its partition as long as heartbeats arrive",
        _WATCH,
        (
            "        if member.session is session:\n"
            "            member.seen_at = self._timers.now()\n"
            "            return\n"
        ),
        ("        if member.session is session:\n            return\n"),
        [WATCH, GROUPS],
    ),
    Mutant(
        "broker-that-stood-still-takes-all-for-dead",
        "a broker that was suspended declares no member dead",
        _WATCH,
        "            member.restart_timeout(now)\n",
        "            pass\n",
        [WATCH],
    ),
    Mutant(
        "commit-of-an-earlier-connection-takes-offsets-back",
        "requests from an earlier connection of a member change nothing",
        _GROUPS,
        "session.number < member.latest_connection:",
        "session.number < 0:",
        [OFFSETS],
    ),
    Mutant(
        "join-of-an-earlier-connection-begins-anew",
        "requests from an earlier connection of a member change nothing",
        _GROUPS,
        "            _reject_old_connection(group, before, session)\n",
        "",
        [OFFSETS],
    ),
    Mutant(
        "first-connection-s-end-kills-the-second",
        "a second connection of a member replaces the first",
        _WATCH,
        ("        self._disconnect(member)\n        member.connected(session, self._timers.now())\n"),
        "        member.connected(session, self._timers.now())\n",
        [WATCH],
    ),
    Mutant(
        "lost-connection-is-not-noticed",
        "partitions of a member without a connection are released sooner",
        _WATCH,
        ("            member.disconnected(self._timers.now())\n            self._set_timer(group, member)\n"),
        "            member.disconnected(self._timers.now())\n",
        [WATCH],
    ),
    Mutant(
        "transactions-do-not-keep-a-member-alive",
        "transactions with offsets of a member count as heartbeats",
        _WATCH,
        "        if session is None:\n            member.seen_at = self._timers.now()\n",
        "        if session is None:\n            pass\n",
        [OFFSETS],
    ),
    Mutant(
        "heartbeat-waits-beyond-the-session",
        "a heartbeat waits for no longer than a third of its session",
        _WAITS,
        "        seconds = min(request.wait_ms, member.session_ms / HEARTBEATS_PER_TIMEOUT) / 1000\n",
        "        seconds = request.wait_ms / 1000\n",
        [WAITS],
    ),
    Mutant(
        "older-heartbeat-never-ends",
        "of two heartbeats of a member the older one ends",
        _WAITS,
        "        self._answer_heartbeat(group, member)\n        waiting = member.parked = ",
        "        waiting = member.parked = ",
        [WAITS],
    ),
    Mutant(
        "heartbeats-wait-over-the-stop",
        "waiting heartbeats end when the broker stops",
        _GROUPS,
        "                self._answer_heartbeat(group, member, Busy(STOPPING))\n",
        "                pass\n",
        [WAITS],
    ),
    Mutant(
        "heartbeat-answered-before-the-plan-of-its-turn",
        "the changes of a turn are one plan, and heartbeats are answered after it",
        _GROUPS,
        ("        if group.name in self._due:\n            self._mark_due(group, *member_ids)\n            return\n"),
        "",
        [GROUPS, WAITS, WATCH],
    ),
)

SAVED: Final = (
    Mutant(
        "any-member-commits",
        "offsets are committed only for the owner",
        _OFFSETS,
        "            if group.owns(request.member, request.generation, place[:2]):\n",
        "            if place:\n",
        [OFFSETS],
    ),
    Mutant(
        "one-lost-partition-fences-the-others",
        "a zombie loses only the partitions that others own",
        _OFFSETS,
        "        if others and not places:\n",
        "        if others:\n",
        [OFFSETS],
    ),
    Mutant(
        "lost-partitions-not-named",
        "a zombie is notified which partitions it lost",
        _OFFSETS,
        "places, reply, fenced=others)",
        "places, reply, fenced=[])",
        [OFFSETS],
    ),
    Mutant(
        "transaction-commits-another-s-offsets",
        "a transaction with an offset of a partition of another owner is refused as a whole",
        _OFFSETS,
        (
            "        if others:\n"
            "            raise _not_owned_error(group, member_id, others)\n"
            "        places = [place for _, place in known.values()]\n"
        ),
        (
            "        if others and len(others) == len(known):\n"
            "            raise _not_owned_error(group, member_id, others)\n"
            "        places = [place for _, place in known.values()]\n"
        ),
        [OFFSETS],
    ),
    Mutant(
        "offsets-in-doubt-overwritten-by-a-transaction",
        "offsets in doubt block other commits until their transaction has ended",
        _OFFSETS,
        "        places = [place for _, place in known.values()]\n        self._offsets.require_free(name, places)\n",
        "        places = [place for _, place in known.values()]\n",
        [OFFSETS, "tests/broker/groups/test_offset_effects.py"],
    ),
    Mutant(
        "reset-under-live-members",
        "a reset requires a group without live members",
        _OFFSETS,
        ("        self._check_no_live_member(request.group)\n        if not request.offsets:\n"),
        "        if not request.offsets:\n",
        [OFFSETS],
    ),
    Mutant(
        "reset-leaves-the-owners",
        "a reset revokes all partitions of the group",
        _GROUPS,
        ("        group.release_all()\n        self._entry_submitted(name)\n"),
        "        self._entry_submitted(name)\n",
        [OFFSETS, GROUPS],
    ),
)

BOUNDS: Final = (
    Mutant(
        "groups-unbounded",
        "the number of groups is bounded",
        _ROLL,
        '        if len(known) + len(coming) >= self._limits["groups"]:\n',
        "        if len(known) + len(coming) < 0:\n",
        [ROLL],
    ),
    Mutant(
        "groups-on-their-way-not-counted",
        "groups that are not in the catalog yet count against the limit",
        _ROLL,
        (
            "        coming = {each for each in (*self._pending_entries, *self._groups) if each not in known "
            "and each != name}\n"
        ),
        "        coming: set[str] = set()\n",
        [ROLL],
    ),
    Mutant(
        "members-unbounded",
        "the number of members of a group is bounded",
        _ROLL,
        '            if before is None and len(group.members) >= self._limits["group_members"]:\n',
        "            if before is None and len(group.members) < 0:\n",
        [ROLL],
    ),
    Mutant(
        "wishes-unbounded",
        "the number of topics that a member requests is bounded",
        _ROLL,
        "        self._subscribed_names += more - less\n",
        "",
        [ROLL],
    ),
    Mutant(
        "empty-groups-kept",
        "a group without members uses no memory",
        _ROLL,
        "        if group.is_empty and not in_work and self._groups.get(group.name) is group:\n",
        "        if not group.name:\n",
        [ROLL],
    ),
)

SHARES: Final = (
    Mutant(
        "ranges-of-unsorted-members",
        "ranges are assigned to the members sorted by name, whatever their order of joining",
        _STRATEGIES,
        "        for number, member in enumerate(sorted(members)):\n",
        "        for number, member in enumerate(members):\n",
        [STRATEGIES],
    ),
    Mutant(
        "last-members-get-the-remainder",
        "the first members get one partition more where the partitions cannot be divided evenly",
        _STRATEGIES,
        "            end = start + size + (number < longer)\n",
        "            end = start + size + (len(members) - 1 - number < longer)\n",
        [STRATEGIES],
    ),
    Mutant(
        "ring-by-the-process-s-own-hash",
        "the ring is the same in every process and every release",
        _STRATEGIES,
        '    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")\n',
        "    return hash(text) % (1 << 64)\n",
        [STRATEGIES],
    ),
    Mutant(
        "ring-gives-to-who-does-not-take",
        "each partition is assigned to a member that reads its topic",
        _STRATEGIES,
        "        if member in members:\n            return member\n",
        "        if members:\n            return member\n",
        [STRATEGIES],
    ),
    Mutant(
        "ring-with-one-point-a-member",
        "the ring is roughly fair",
        _STRATEGIES,
        "POINTS_PER_MEMBER: Final = 64\n",
        "POINTS_PER_MEMBER: Final = 1\n",
        [STRATEGIES],
    ),
    Mutant(
        "sticky-forgets-who-has-what",
        "a new member takes as few partitions as it needs",
        _STRATEGIES,
        (
            "    kept = {partition: owners[partition] for partition, members in takers.items() if owners.get("
            "partition) in members}\n"
        ),
        (
            "    kept = {\n"
            "        partition: owners[partition]\n"
            "        for partition, members in takers.items()\n"
            "        if owners.get(partition) in members and not owners\n"
            "    }\n"
        ),
        [STRATEGIES],
    ),
    Mutant(
        "sticky-never-evens-out",
        "assignments are as even as possible",
        _STRATEGIES,
        ("    while shares.improve():\n        pass\n"),
        "",
        [STRATEGIES],
    ),
    Mutant(
        "sticky-moves-for-nothing",
        "the member with the most partitions keeps the surplus one",
        _STRATEGIES,
        "    most_first = sorted(has, key=lambda member: -len(has[member]))\n",
        "    most_first = sorted(has, key=lambda member: len(has[member]))\n",
        [STRATEGIES],
    ),
    Mutant(
        "only-is-ignored",
        "members that request some partitions get no others",
        _STRATEGIES,
        "        return partition[0] in self.topics and (self.only is None or partition in self.only)\n",
        "        return partition[0] in self.topics\n",
        [STRATEGIES],
    ),
    Mutant(
        "shares-depend-on-the-order-of-partitions",
        "the order of members and partitions does not change the assignment",
        _STRATEGIES,
        (
            "    return strategy_of(strategy)(_accepting_members(list(members), sorted(partitions, key=_numbe"
            "r_first)), owners)\n"
        ),
        "    return strategy_of(strategy)(_accepting_members(list(members), list(partitions)), owners)\n",
        [STRATEGIES],
    ),
)

TOLD: Final = (
    Mutant(
        "idle-member-gets-no-reason",
        "a member without a partition gets the reason and an advice",
        "tfmq/broker/groups/group.py",
        ": tfmq topic grow {there[0].name}",
        "",
        [DESCRIPTIONS],
    ),
    Mutant(
        "partitions-advised-where-there-are-enough",
        "more partitions are advised only where members are more than partitions",
        "tfmq/broker/groups/group.py",
        "    if count <= partitions:\n",
        "    if count < partitions // 2:\n",
        [DESCRIPTIONS],
    ),
    Mutant(
        "partitions-advised-during-a-handover",
        "a member gets no advice while partitions change owners",
        "tfmq/broker/groups/group.py",
        '        return ""  # an assignment is in progress',
        "        pass  # an assignment is in progress",
        [DESCRIPTIONS],
    ),
    Mutant(
        "waiting-member-gets-no-owner",
        "a waiting member is notified which member it waits for, and why",
        "tfmq/broker/groups/group.py",
        ("    if awaited:\n        return _waiting_note(group, awaited, topics, now)\n"),
        "",
        [DESCRIPTIONS],
    ),
)

GROUP_MEMBERS: Final = ALIVE + SAVED + BOUNDS + SHARES + TOLD
