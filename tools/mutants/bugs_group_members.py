"""Bugs to plant in groups at the broker: who is alive, whose offsets are saved, how partitions are shared."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

GROUPS: Final = "tests/broker/groups/test_groups.py"
OFFSETS: Final = "tests/broker/groups/test_offset_commands.py"
ROLL: Final = "tests/broker/groups/test_coordinator.py"
WAITS: Final = "tests/broker/groups/test_group_waits.py"
WATCH: Final = "tests/broker/groups/test_group_watch.py"
MEMBER: Final = "tests/broker/groups/test_group.py"
STRATEGIES: Final = "tests/broker/groups/test_assignors.py"
DESCRIPTIONS: Final = "tests/broker/groups/test_group.py"

_GROUPS = "tfmq/broker/groups/coordinator.py"
_OFFSETS = "tfmq/broker/groups/offset_commands.py"
_ROLL = "tfmq/broker/groups/coordinator.py"
_WAITS = "tfmq/broker/groups/coordinator.py"
_WATCH = "tfmq/broker/groups/coordinator.py"
_MEMBER = "tfmq/broker/groups/group.py"
_STRATEGIES = "tfmq/broker/groups/assignors.py"

ALIVE: Final = (
    Mutant(
        "session-without-an-end",
        "a silent member is dead after its session time",
        _MEMBER,
        ("        if self.disconnected_at is None:\n            return self.seen_at + seconds\n"),
        ("        if self.disconnected_at is None:\n            return self.seen_at + seconds * 10\n"),
        [MEMBER, WATCH],
    ),
    Mutant(
        "dead-with-its-connection",
        "a member whose connection is gone has a tenth of its session time to come back",
        _MEMBER,
        "        return min(self.seen_at + seconds, self.disconnected_at + seconds / RECONNECT_FRACTION)\n",
        "        return min(self.seen_at + seconds, self.disconnected_at)\n",
        [MEMBER, WATCH],
    ),
    Mutant(
        "heartbeats-do-not-count",
        "a handler of minutes keeps its partition as long as its heartbeats come",
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
        "a broker that stood still takes nobody for dead",
        _WATCH,
        "            member.restart_timeout(now)\n",
        "            pass\n",
        [WATCH],
    ),
    Mutant(
        "commit-of-an-earlier-connection-takes-offsets-back",
        "what is read from a connection that the member has left takes nothing back",
        _MEMBER,
        "        return session.number < self.latest_connection\n",
        "        return False\n",
        [OFFSETS],
    ),
    Mutant(
        "join-of-an-earlier-connection-begins-anew",
        "what is read from a connection that the member has left takes nothing back",
        _GROUPS,
        "            _reject_old_connection(group, before, session)\n",
        "",
        [OFFSETS],
    ),
    Mutant(
        "first-connection-s-end-kills-the-second",
        "a second connection of a member is its connection from then on",
        _WATCH,
        ("        self._disconnect(member)\n        member.connected(session, self._timers.now())\n"),
        "        member.connected(session, self._timers.now())\n",
        [WATCH],
    ),
    Mutant(
        "lost-connection-is-not-noticed",
        "what a member had whose connection is gone is free sooner",
        _WATCH,
        ("            member.disconnected(self._timers.now())\n            self._set_timer(group, member)\n"),
        "            member.disconnected(self._timers.now())\n",
        [WATCH],
    ),
    Mutant(
        "transactions-do-not-keep-a-member-alive",
        "a member is heard of in the transactions with its offsets, too",
        _WATCH,
        (
            '        """Record a request for the member on another connection."""\n'
            "        member.seen_at = self._timers.now()\n"
        ),
        '        """Record a request for the member on another connection."""\n',
        [OFFSETS],
    ),
    Mutant(
        "heartbeat-parked-beyond-the-session",
        "a heartbeat waits for no longer than a third of its session",
        _WAITS,
        "        seconds = min(wait_ms, member.session_ms / HEARTBEATS_PER_TIMEOUT) / 1000\n",
        "        seconds = wait_ms / 1000\n",
        [WAITS],
    ),
    Mutant(
        "older-heartbeat-never-answered",
        "of two heartbeats of a member the older one ends",
        _WAITS,
        ("        self.answer(group, member)\n        member.parked = waiting\n"),
        "        member.parked = waiting\n",
        [WAITS],
    ),
    Mutant(
        "heartbeats-wait-over-the-stop",
        "waiting heartbeats end when the broker stops",
        _GROUPS,
        "                self._parked.answer(group, member, Busy(STOPPING))\n",
        "                pass\n",
        [WAITS],
    ),
    Mutant(
        "heartbeat-told-before-the-plan-of-its-turn",
        "what happens in a turn is one plan, and heartbeats are told behind it",
        _GROUPS,
        (
            "        if group.name in self._due:\n"
            "            self._mark_due(group, *member_ids)\n"
            "            return\n"
        ),
        "",
        [GROUPS, WAITS, WATCH],
    ),
)

SAVED: Final = (
    Mutant(
        "anybody-saves",
        "offsets are saved for the owner alone",
        _OFFSETS,
        "            if group.owns(request.member, request.generation, place[:2]):\n",
        "            if place:\n",
        [OFFSETS],
    ),
    Mutant(
        "one-lost-partition-fences-the-others",
        "a zombie loses only what others got",
        _OFFSETS,
        "        if others and not places:\n",
        "        if others:\n",
        [OFFSETS],
    ),
    Mutant(
        "lost-partitions-not-named",
        "a zombie is told what it lost",
        _OFFSETS,
        "places, reply, fenced=others)",
        "places, reply, fenced=[])",
        [OFFSETS],
    ),
    Mutant(
        "transaction-commits-another-s-offsets",
        "a transaction with an offset of a partition that is another's is refused, whole",
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
        "offsets in doubt hold others back until their transaction has ended",
        _OFFSETS,
        "        places = [place for _, place in known.values()]\n        self._offsets.require_free(name, places)\n",
        "        places = [place for _, place in known.values()]\n",
        [OFFSETS, "tests/broker/groups/test_offset_effects.py"],
    ),
    Mutant(
        "reset-under-live-members",
        "a reset needs a group without a live member",
        _OFFSETS,
        ("        self._check_no_live_member(request.group)\n        if not request.offsets:\n"),
        "        if not request.offsets:\n",
        [OFFSETS],
    ),
    Mutant(
        "reset-leaves-the-owners",
        "a reset takes everything from who had something",
        _GROUPS,
        ("        group.release_all()\n        self._registry.entry_submitted(name)\n"),
        "        self._registry.entry_submitted(name)\n",
        [OFFSETS, GROUPS],
    ),
)

BOUNDS: Final = (
    Mutant(
        "groups-unbounded",
        "groups are bounded",
        _ROLL,
        '        if len(known) + len(coming) >= self._limits["groups"]:\n',
        "        if len(known) + len(coming) < 0:\n",
        [ROLL],
    ),
    Mutant(
        "groups-on-their-way-not-counted",
        "groups that are not in the catalog yet count",
        _ROLL,
        (
            "        coming = {\n"
            "            each for each in (*self._pending_entries, *self._groups) if each not in known"
            " and each != name\n"
            "        }\n"
        ),
        "        coming: set[str] = set()\n",
        [ROLL],
    ),
    Mutant(
        "members-unbounded",
        "members of a group are bounded",
        _ROLL,
        '        if instead_of is None and len(group.members) >= self._limits["group_members"]:\n',
        "        if instead_of is None and len(group.members) < 0:\n",
        [ROLL],
    ),
    Mutant(
        "wishes-unbounded",
        "what members ask for is bounded",
        _ROLL,
        "        self._subscribed_names += more - less\n",
        "",
        [ROLL],
    ),
    Mutant(
        "empty-groups-kept",
        "nothing is kept in memory of groups without members",
        _ROLL,
        "        if group.is_empty and self._groups.get(group.name) is group:\n",
        "        if not group.name:\n",
        [ROLL],
    ),
)

SHARES: Final = (
    Mutant(
        "ranges-of-unsorted-members",
        "ranges go to the members sorted by name, whatever the order in which they came",
        _STRATEGIES,
        "        for number, member in enumerate(sorted(members)):\n",
        "        for number, member in enumerate(members):\n",
        [STRATEGIES],
    ),
    Mutant(
        "last-members-get-the-remainder",
        "the first members get one partition more where the numbers do not divide",
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
        "each partition goes to a member that takes it",
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
        "        if owners.get(partition) in members\n",
        "        if owners.get(partition) in members and not owners\n",
        [STRATEGIES],
    ),
    Mutant(
        "sticky-never-evens-out",
        "shares are as even as can be",
        _STRATEGIES,
        ("    while shares.improve():\n        pass\n"),
        "",
        [STRATEGIES],
    ),
    Mutant(
        "sticky-moves-for-nothing",
        "who has most keeps the partition more that somebody has to have",
        _STRATEGIES,
        "    most_first = sorted(has, key=lambda member: -len(has[member]))\n",
        "    most_first = sorted(has, key=lambda member: len(has[member]))\n",
        [STRATEGIES],
    ),
    Mutant(
        "only-is-ignored",
        "members that ask for some partitions get no others",
        _STRATEGIES,
        "        return partition[0] in self.topics and (self.only is None or partition in self.only)\n",
        "        return partition[0] in self.topics\n",
        [STRATEGIES],
    ),
    Mutant(
        "shares-depend-on-the-order-of-partitions",
        "the same members and partitions in another order are dealt the same way",
        _STRATEGIES,
        "_accepting_members(list(members), sorted(partitions, key=_number_first)), owners\n",
        "_accepting_members(list(members), list(partitions)), owners\n",
        [STRATEGIES],
    ),
)

TOLD: Final = (
    Mutant(
        "idle-member-not-told-why",
        "a member without a partition is told why, and what to do",
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
        "a member is not advised anything while partitions change owners",
        "tfmq/broker/groups/group.py",
        '        return ""  # an assignment is in progress',
        "        pass  # an assignment is in progress",
        [DESCRIPTIONS],
    ),
    Mutant(
        "waiting-member-not-told-for-whom",
        "a member that waits is told for whom, and why",
        "tfmq/broker/groups/group.py",
        ("    if awaited:\n        return _waiting_note(group, awaited, topics, now)\n"),
        "",
        [DESCRIPTIONS],
    ),
)

GROUP_MEMBERS: Final = ALIVE + SAVED + BOUNDS + SHARES + TOLD
