"""Bugs to plant in members of a group: what is handed out, revoked, released and lost."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

HANDOVER: Final = "tests/client/consumer/test_rebalance.py"
MEMBERSHIP: Final = "tests/client/consumer/test_membership.py"
CONSUMING: Final = "tests/client/consumer/test_core.py"
PROCESSED: Final = "tests/client/test_processed.py"
SCENARIOS: Final = "tests/client/test_group_scenarios.py"

_HANDOVER = "tfmq/client/consumer/rebalance.py"
_MEMBERSHIP = "tfmq/client/consumer/membership.py"
_ASSIGNMENT = "tfmq/client/consumer/assignment.py"

HANDING_OVER: Final = (
    Mutant(
        "released-while-it-is-in-work",
        "a partition goes when nothing of it is in work",
        _HANDOVER,
        "        if positions.is_in_progress(name) or self.busy(name) or name in self._revoked_pending:\n",
        "        if self.busy(name) or name in self._revoked_pending:\n",
        [HANDOVER, SCENARIOS],
    ),
    Mutant(
        "released-before-on-revoked-ended",
        "on_revoked may commit, and only then the partition goes",
        _HANDOVER,
        "        if positions.is_in_progress(name) or self.busy(name) or name in self._revoked_pending:\n",
        "        if positions.is_in_progress(name) or self.busy(name):\n",
        [HANDOVER],
    ),
    Mutant(
        "released-without-a-save",
        "what is processed is saved before the partition goes",
        _HANDOVER,
        (
            '            if self._options.commits != "manual":\n'
            "                yield from self._saving.commit_positions(\n"
        ),
        ("            if not names:\n                yield from self._saving.commit_positions(\n"),
        [PROCESSED, HANDOVER, SCENARIOS],
    ),
    Mutant(
        "released-although-the-save-failed",
        "a storage that does not answer is waited for before the partition goes",
        _HANDOVER,
        "                yield Wait((), RETRY_SECONDS)\n                return\n            failure = error\n",
        "                yield Wait((), RETRY_SECONDS)\n",
        [HANDOVER],
    ),
    Mutant(
        "uncommitted-goes-at-once",
        "with manual commits what was handed out is committed before its partition goes",
        _HANDOVER,
        "        return not positions.has_uncommitted(name) or waited >= self._options.session_timeout\n",
        "        return True\n",
        [HANDOVER],
    ),
    Mutant(
        "uncommitted-never-goes",
        "who never commits gives its partition up a session later",
        _HANDOVER,
        "        return not positions.has_uncommitted(name) or waited >= self._options.session_timeout\n",
        "        return not positions.has_uncommitted(name)\n",
        [HANDOVER],
    ),
    Mutant(
        "revoked-partition-begins-more",
        "from the moment of a revocation nothing more of it begins",
        _HANDOVER,
        (
            "        self._revoked[name] = self._link.now()\n"
            "        self._positions.ack_trackers.revoke(name)\n"
        ),
        "        self._revoked[name] = self._link.now()\n",
        ["tests/client/worker/test_running.py::test_nothing_more_of_a_partition_that_is_to_go_begins"],
    ),
    Mutant(
        "loss-not-told-to-on-revoked",
        "on_revoked is told of what was lost",
        _HANDOVER,
        ("        if self._revoked.pop(name, None) is None:\n            self._queue_revoked(name)\n"),
        "        self._revoked.pop(name, None)\n",
        [HANDOVER],
    ),
    Mutant(
        "end-not-told-to-on-revoked",
        "on_revoked is told at the end",
        "tfmq/client/consumer/core.py",
        "                yield from self.rebalance.run_final_callbacks()\n",
        "",
        [HANDOVER],
    ),
    Mutant(
        "on-assigned-told-too-late",
        "on_assigned is told before anything of the partition is handed out",
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
        "                self._task = self._start_await(found, self._awaited_done)\n",
        ("                found.close()\n                self._done.complete()\n"),
        [HANDOVER],
    ),
    Mutant(
        "callback-s-error-swallowed",
        "what on_assigned and on_revoked raise is raised to who asked",
        _HANDOVER,
        "        if self._error is not None:\n            raise self._error\n",
        "",
        [HANDOVER],
    ),
    Mutant(
        "revoked-partition-is-read-on",
        "what is not in the share any more is not read on",
        _ASSIGNMENT,
        "                    self._stop_reading(name)\n                    handover.revoke(name)\n",
        "                    handover.revoke(name)\n",
        [HANDOVER, SCENARIOS, "tests/client/worker/test_running.py"],
    ),
    Mutant(
        "lost-partition-is-read-on",
        "a member that lost a partition drops what it has of it",
        _ASSIGNMENT,
        ("                self._stop_reading(name)\n                handover.partition_lost(name)\n"),
        "                handover.partition_lost(name)\n",
        [CONSUMING, HANDOVER, SCENARIOS],
    ),
    Mutant(
        "another-grant-is-the-same",
        "a partition that was away and came back is begun anew",
        _ASSIGNMENT,
        "            if held is None or held.grant != grant:\n",
        "            if held is None:\n",
        [CONSUMING],
    ),
    Mutant(
        "what-never-began-is-not-released",
        "what is to go before it was begun with is released at once",
        _ASSIGNMENT,
        "        membership.release([name for name in leaving if name not in self._positions])\n",
        "        membership.release([])\n",
        [CONSUMING],
    ),
    Mutant(
        "kept-after-all-and-not-read",
        "what was to go and stays after all is read on",
        _ASSIGNMENT,
        "                self._add_partition(name, held.incarnation, self._positions.delivered_position(name))\n",
        "                pass\n",
        [SCENARIOS, HANDOVER],
        scale=0.1,
    ),
    Mutant(
        "loop-goes-on-over-a-lost-batch",
        "a loop ends its batch behind the current message where the partition is to go",
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
        "a forked child of a member takes nothing from it",
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
        "who did not hear of the broker for a session hands out nothing",
        _MEMBERSHIP,
        "        return self._link.now() < self._last_heartbeat_at + seconds\n",
        "        return seconds > 0\n",
        [MEMBERSHIP, SCENARIOS],
    ),
    Mutant(
        "heard-of-when-the-answer-came",
        "the broker was heard of when it was asked, not when its answer was read",
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
        "without its connection a member is silent sooner",
        _MEMBERSHIP,
        "            seconds /= DISCONNECTED_SESSION_FRACTION\n",
        "            pass\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "revoked-not-said-to-be-leaving",
        "a heartbeat says what is to go and is held yet",
        _MEMBERSHIP,
        "            HeldPartition(each.topic, each.incarnation, each.partition, name not in self.assigned)\n",
        "            HeldPartition(each.topic, each.incarnation, each.partition, False)\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "revoked-given-up-by-the-next-heartbeat",
        "what is revoked is held until it is released",
        _MEMBERSHIP,
        "        self.owned = {**self.owned, **share}\n",
        "        self.owned = dict(share)\n",
        [MEMBERSHIP, HANDOVER],
    ),
    Mutant(
        "fenced-member-stays-away",
        "a member that was taken for dead joins again by itself",
        _MEMBERSHIP,
        ("        elif isinstance(call.error, Fenced):\n            self._rejoin_after_expiry(call.error)\n"),
        ("        elif isinstance(call.error, Fenced):\n            raise call.error\n"),
        [MEMBERSHIP, CONSUMING],
    ),
    Mutant(
        "fenced-member-keeps-its-share",
        "a member that was taken for dead has nothing",
        _MEMBERSHIP,
        ("        self._drop_membership()\n        self.member_id = token_hex(8)\n"),
        (
            "        self.joined, self._subscription_unsent = False, True\n"
            "        self.member_id = token_hex(8)\n"
        ),
        [MEMBERSHIP, CONSUMING],
    ),
    Mutant(
        "broker-that-forgot-is-not-told-again",
        "a broker that was started anew is told what its members want",
        _MEMBERSHIP,
        "        self._subscription_unsent = self._subscription_unsent or reply.forgotten\n",
        "",
        [MEMBERSHIP],
    ),
    Mutant(
        "other-wishes-wait-for-the-next-beat",
        "other wishes are told at once",
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
        "a heartbeat that fails in passing is sent again",
        _MEMBERSHIP,
        "            if not call.error.retriable:\n                raise call.error\n",
        "            if call.error:\n                raise call.error\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "leaves-in-silence",
        "who closes gives its place up at once",
        _MEMBERSHIP,
        (
            "        yield from request_with_retries(\n"
            "            self._link, LeaveGroup(self.group, self.member_id, self.generation), until\n"
            "        )\n"
        ),
        "        yield from ()\n",
        [MEMBERSHIP],
    ),
    Mutant(
        "idle-in-silence",
        "an idle member says why",
        _MEMBERSHIP,
        '                log.warning("This member of group %s reads nothing: %s", self.group, note)\n',
        '                log.debug("This member of group %s reads nothing: %s", self.group, note)\n',
        [MEMBERSHIP],
    ),
    Mutant(
        "each-handover-is-logged",
        "a handover that takes no time is not logged",
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
        "two of one name do not drive each other out for ever",
        _MEMBERSHIP,
        ("        self.member_id = token_hex(8)\n        self._changed()\n"),
        "        self._changed()\n",
        [HANDOVER, MEMBERSHIP],
    ),
    Mutant(
        "latest-is-not-saved-first",
        "who dies at once takes no message with him",
        _ASSIGNMENT,
        "        if self._options.start_latest:\n            stored |= ",
        "        if self._options.start_latest and False:\n            stored |= ",
        ["tests/client/consumer/test_assignment.py"],
    ),
    Mutant(
        "latest-is-when-a-partition-comes",
        "latest is one moment for all partitions",
        _ASSIGNMENT,
        "            elif name in self._latest_positions and not self._is_new_partition(name, incarnation):\n",
        "            elif name not in self._latest_positions and not self._is_new_partition(name, incarnation):\n",
        ["tests/client/consumer/test_assignment.py"],
    ),
    Mutant(
        "growth-is-not-told",
        "a partition that appears is read at once",
        "tfmq/client/consumer/assignment.py",
        "        self.count_changed = not self._notified_by_group and self._counts.get(topic, count) != count\n",
        "",
        ["tests/client/consumer/test_assignment.py"],
    ),
)

GROUP_CLIENTS: Final = HANDING_OVER + MEMBERS
