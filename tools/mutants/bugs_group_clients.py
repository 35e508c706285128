"""Planted bugs: members of a group: what is handed out, revoked, released and lost."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

HANDOVER: Final = "tests/client/consumer/test_rebalance.py"
MEMBERSHIP: Final = "tests/client/consumer/test_membership.py"
CONSUMING: Final = "tests/client/consumer/test_core.py"
PROCESSED: Final = "tests/client/test_acked.py"
SCENARIOS: Final = "tests/client/test_group_scenarios.py"

_HANDOVER = "tfmq/client/consumer/rebalance.py"
_MEMBERSHIP = "tfmq/client/consumer/membership.py"
_ASSIGNMENT = "tfmq/client/consumer/assignment.py"
_START_POSITION = "tfmq/client/consumer/start_position.py"

HANDING_OVER: Final = (
    Mutant(
        "released-while-it-is-in-work",
        "a partition is released when no message of it is in work",
        _HANDOVER,
        "        if positions.is_in_progress(name) or self.busy(name) or name in self._revoked_pending:\n",
        "        if self.busy(name) or name in self._revoked_pending:\n",
        [HANDOVER, SCENARIOS],
    ),
    Mutant(
        "released-before-on-revoked-ended",
        "on_revoked may commit, and the partition is released after it",
        _HANDOVER,
        "        if positions.is_in_progress(name) or self.busy(name) or name in self._revoked_pending:\n",
        "        if positions.is_in_progress(name) or self.busy(name):\n",
        [HANDOVER],
    ),
    Mutant(
        "released-without-a-save",
        "processed offsets are committed before the partition is released",
        _HANDOVER,
        (
            '            if self._options.commits != "manual":\n'
            "                yield from self.offsets.commit_positions(\n"
        ),
        ("            if not names:\n                yield from self.offsets.commit_positions(\n"),
        [PROCESSED, HANDOVER, SCENARIOS],
    ),
    Mutant(
        "released-although-the-save-failed",
        "a partition is released only after its offset storage replied",
        _HANDOVER,
        "                yield Wait((), RETRY_SECONDS)\n                return\n            failure = error\n",
        "                yield Wait((), RETRY_SECONDS)\n",
        [HANDOVER],
    ),
    Mutant(
        "uncommitted-goes-at-once",
        "with manual commits messages that were handed out are committed before their partition is released",
        _HANDOVER,
        "        return name not in positions.uncommitted or waited >= self._options.session_timeout\n",
        "        return True\n",
        [HANDOVER],
    ),
    Mutant(
        "uncommitted-never-goes",
        "a member that never commits releases its partition after a session time",
        _HANDOVER,
        "        return name not in positions.uncommitted or waited >= self._options.session_timeout\n",
        "        return name not in positions.uncommitted\n",
        [HANDOVER],
    ),
    Mutant(
        "revoked-partition-begins-more",
        "from a revocation on, no more messages of the partition begin",
        _HANDOVER,
        ("        self._revoked[name] = self._link.now()\n        self._positions.ack_trackers.revoke(name)\n"),
        "        self._revoked[name] = self._link.now()\n",
        ["tests/client/worker/test_runner.py::test_nothing_more_of_a_partition_that_is_to_go_begins"],
    ),
    Mutant(
        "loss-not-passed-to-on-revoked",
        "on_revoked gets the lost partitions",
        _HANDOVER,
        ("        if self._revoked.pop(name, None) is None:\n            self._queue_revoked(name)\n"),
        "        self._revoked.pop(name, None)\n",
        [HANDOVER],
    ),
    Mutant(
        "on-revoked-not-called-at-the-end",
        "on_revoked is called at the end",
        "tfmq/client/consumer/core.py",
        "                yield from self.rebalance.run_final_callbacks()\n",
        "",
        [HANDOVER],
    ),
    Mutant(
        "on-assigned-called-too-late",
        "on_assigned is called before any message of the partition is handed out",
        "tfmq/client/consumer/core.py",
        (
            "            if self.membership is not None and self.rebalance.has_pending_callbacks:\n"
            "                yield from self.rebalance.run_callbacks()\n"
            "                continue\n"
        ),
        "",
        [HANDOVER],
    ),
    Mutant(
        "coroutine-of-a-callback-dropped",
        "what on_assigned and on_revoked return is awaited",
        _HANDOVER,
        "                task = start_await(found, partial(done.set_outcome, None))\n",
        ("                found.close()\n                done.complete()\n"),
        [HANDOVER],
    ),
    Mutant(
        "callback-s-error-swallowed",
        "exceptions of on_assigned and on_revoked are raised to the caller",
        _HANDOVER,
        "    if done.error is not None:\n        raise done.error\n",
        "",
        [HANDOVER],
    ),
    Mutant(
        "revoked-partition-is-read-on",
        "a partition that is no longer assigned is not read further",
        _ASSIGNMENT,
        "                    self._stop_reading(name)\n                    group.revoke(name)\n",
        "                    group.revoke(name)\n",
        [HANDOVER, SCENARIOS, "tests/client/worker/test_runner.py"],
    ),
    Mutant(
        "lost-partition-is-read-on",
        "a member that lost a partition drops its messages",
        _ASSIGNMENT,
        ("                self._stop_reading(name)\n                group.partition_lost(name)\n"),
        "                group.partition_lost(name)\n",
        [CONSUMING, HANDOVER, SCENARIOS],
    ),
    Mutant(
        "another-grant-is-the-same",
        "a partition that was revoked and assigned again is read from its committed offset",
        _ASSIGNMENT,
        "            if owned is None or owned.grant != generation:\n",
        "            if owned is None:\n",
        [CONSUMING],
    ),
    Mutant(
        "what-never-began-is-not-released",
        "a partition that is revoked before it was begun is released at once",
        _ASSIGNMENT,
        "        membership.release([name for name in revoked if name not in self._positions])\n",
        "        membership.release([])\n",
        [CONSUMING],
    ),
    Mutant(
        "kept-after-all-and-not-read",
        "a partition whose revocation is withdrawn is read further",
        _ASSIGNMENT,
        "                self._add_partition(name, owned.incarnation, self._positions.delivered_position(name))\n",
        "                pass\n",
        [SCENARIOS, HANDOVER],
        scale=0.1,
    ),
    Mutant(
        "loop-goes-on-over-a-lost-batch",
        "a loop ends its batch after the current message where the partition is revoked",
        _ASSIGNMENT,
        (
            "        if self._positions.ready is not None and self._positions.ready.name == name:\n"
            "            self._positions.drop_ready_batch()\n"
        ),
        "",
        [HANDOVER],
    ),
    Mutant(
        "child-reads-its-parent-s-partitions",
        "a forked child of a member takes none of its partitions",
        _ASSIGNMENT,
        (
            "            self._stop_reading(name)\n"
            "            self._positions.remove_lost(name)\n"
            "        self._generations.clear()\n"
        ),
        ("            self._positions.names()\n        self._generations.clear()\n"),
        [CONSUMING],
    ),
)


MEMBERS: Final = (
    Mutant(
        "frozen-member-hands-out",
        "a member without a reply of the broker for a session time hands out nothing",
        _MEMBERSHIP,
        "        return self._link.now() < self._last_heartbeat_at + seconds\n",
        "        return seconds > 0\n",
        [MEMBERSHIP, SCENARIOS],
    ),
    Mutant(
        "heard-of-when-the-answer-came",
        "the session time counts from the request, not from when its reply was read",
        _MEMBERSHIP,
        (
            "        waits, lapsed = self._link.now() - began, not self.may_deliver()\n"
            "        self._last_heartbeat_at, self._last_heartbeat_connection = began, self._link.connection_count\n"
        ),
        (
            "        waits, lapsed = self._link.now() - began, not self.may_deliver()\n"
            "        self._last_heartbeat_at, self._last_heartbeat_connection = self._link.now(),"
            " self._link.connection_count\n"
        ),
        [MEMBERSHIP],
    ),
    Mutant(
        "lost-connection-counts-as-silence-never",
        "without its connection a member's session ends sooner",
        _MEMBERSHIP,
        "            seconds /= DISCONNECTED_SESSION_FRACTION\n",
        "            pass\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "revoked-not-said-to-be-leaving",
        "a heartbeat names revoked partitions that are still in use",
        _MEMBERSHIP,
        "            HeldPartition(each.topic, each.incarnation, each.partition, name not in self.assigned)\n",
        "            HeldPartition(each.topic, each.incarnation, each.partition, False)\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "revoked-given-up-by-the-next-heartbeat",
        "a revoked partition is kept until it is released",
        _MEMBERSHIP,
        "        self.owned = {**self.owned, **assigned}\n",
        "        self.owned = dict(assigned)\n",
        [MEMBERSHIP, HANDOVER],
    ),
    Mutant(
        "fenced-member-stays-away",
        "a member that was declared dead joins again by itself",
        _MEMBERSHIP,
        ("        elif isinstance(pending.error, Fenced):\n            self._rejoin_after_expiry(pending.error)\n"),
        ("        elif isinstance(pending.error, Fenced):\n            raise pending.error\n"),
        [MEMBERSHIP, CONSUMING],
    ),
    Mutant(
        "fenced-member-keeps-its-share",
        "a member that was declared dead has no partitions",
        _MEMBERSHIP,
        ("        self._drop_membership()\n        self.member_id = token_hex(8)\n"),
        ("        self.joined, self._subscription_unsent = False, True\n        self.member_id = token_hex(8)\n"),
        [MEMBERSHIP, CONSUMING],
    ),
    Mutant(
        "restarted-broker-gets-no-topics",
        "a restarted broker gets the topics of its members again",
        _MEMBERSHIP,
        "        self._subscription_unsent = self._subscription_unsent or reply.forgotten\n",
        "",
        [MEMBERSHIP],
    ),
    Mutant(
        "other-wishes-wait-for-the-next-beat",
        "changed topics are sent to the broker at once",
        _MEMBERSHIP,
        (
            "            self._subscription, self._subscription_unsent = subscription, True\n"
            "            self._wake_event.complete()\n"
        ),
        "            self._subscription, self._subscription_unsent = subscription, True\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "passing-failure-of-a-heartbeat-raised",
        "a heartbeat with a temporary failure is sent again",
        _MEMBERSHIP,
        "            if not pending.error.retriable:\n                raise pending.error\n",
        "            if pending.error:\n                raise pending.error\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "leaves-in-silence",
        "a member that closes leaves its group at once",
        _MEMBERSHIP,
        "        yield from request_with_retries(self._link, request, until)\n",
        "        yield from ()\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "idle-in-silence",
        "an idle member logs why",
        _MEMBERSHIP,
        '                log.warning("This member of group %s reads nothing: %s", self.group, note)\n',
        '                log.debug("This member of group %s reads nothing: %s", self.group, note)\n',
        [MEMBERSHIP],
    ),
    Mutant(
        "each-handover-is-logged",
        "a reassignment without delay is not logged",
        _MEMBERSHIP,
        (
            "        elif note and not self._note_logged and now >= self._note_reason_since +"
            " self.heartbeat_seconds / 2:\n"
        ),
        "        elif note and not self._note_logged:\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "fork-keeps-its-parent-s-partitions",
        "a forked child of a member has nothing until it has joined",
        "tfmq/client/consumer/core.py",
        "            self.assignment.reset_after_fork()\n",
        "",
        [CONSUMING],
    ),
    Mutant(
        "fenced-member-comes-back-under-its-name",
        "two members with the same name do not fence each other without end",
        _MEMBERSHIP,
        ("        self.member_id = token_hex(8)\n        self._changed()\n"),
        "        self._changed()\n",
        [HANDOVER, MEMBERSHIP],
    ),
    Mutant(
        "latest-is-not-saved-first",
        "a member that dies immediately loses no message",
        _START_POSITION,
        "        if self._options.start_latest:\n            stored |= ",
        "        if self._options.start_latest and False:\n            stored |= ",
        ["tests/client/consumer/test_assignment.py"],
    ),
    Mutant(
        "latest-is-when-a-partition-comes",
        'start="latest" is the same moment for all partitions',
        _START_POSITION,
        "            elif name in self._latest_positions and not self._is_new_partition(name, incarnation):\n",
        "            elif name not in self._latest_positions and not self._is_new_partition(name, incarnation):\n",
        ["tests/client/consumer/test_assignment.py"],
    ),
    Mutant(
        "new-partition-is-not-reported",
        "a new partition is read at once",
        "tfmq/client/consumer/assignment.py",
        "        self._count_changed = not self._notified_by_group and self._counts.get(topic, count) != count\n",
        "",
        ["tests/client/consumer/test_assignment.py"],
    ),
)

GROUP_CLIENTS: Final = HANDING_OVER + MEMBERS
