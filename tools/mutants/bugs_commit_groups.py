"""Planted bugs: commit groups: sequences that never go back, fenced runs, all or nothing."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

GROUP_COMMITS: Final = "tests/transaction/test_commit_group_commands.py"
GROUPS: Final = "tests/transaction/test_commit_groups.py"

COMMIT_GROUPS: Final = (
    Mutant(
        "older-sequence-begins",
        "sequences of a commit group never go back",
        "tfmq/transaction/commit_groups.py",
        (
            "            if member.sequence < group.last_commit.sequence:\n"
            "                raise GroupStale(_too_old(member.group, group.last_commit, member.sequence))\n"
        ),
        (
            "            if member.sequence < group.last_commit.sequence - 1:\n"
            "                raise GroupStale(_too_old(member.group, group.last_commit, member.sequence))\n"
        ),
        [GROUPS],
    ),
    Mutant(
        "older-sequence-commits",
        "sequences of a commit group never go back",
        "tfmq/transaction/commit_groups.py",
        "        if last is not None and sequence < last.sequence:\n",
        "        if last is not None and sequence < last.sequence - 1:\n",
        [GROUPS],
    ),
    Mutant(
        "other-rows-accepted",
        "a repeat with another total is refused",
        "tfmq/transaction/commit_groups.py",
        "            if rows != last.rows and not other_total:\n",
        "            if rows < last.rows and not other_total:\n",
        [GROUPS],
    ),
    Mutant(
        "aborted-run-goes-on",
        "an aborted run writes nothing more",
        "tfmq/transaction/commit_groups.py",
        "        if member.run in group.fenced:\n            raise GroupFenced()\n        return True\n",
        "        return True\n",
        [GROUPS],
    ),
    Mutant(
        "aborted-run-commits",
        "an aborted run writes nothing more",
        "tfmq/transaction/commit_groups.py",
        "        if run in known.fenced:\n            raise GroupFenced()\n        return None\n",
        "        return None\n",
        [GROUPS],
    ),
    Mutant(
        "fences-dropped-by-an-earlier-commit",
        "a fenced run stays fenced until a later sequence is committed",
        "tfmq/transaction/commit_groups.py",
        "group.fenced.items() if at > sequence}",
        "group.fenced.items() if at > sequence + 1}",
        [GROUPS],
    ),
    Mutant(
        "member-of-another-sequence-committed",
        "a group commits members of its own sequence only",
        "tfmq/transaction/commit_groups.py",
        "if epoch not in members or members[epoch].sequence != sequence]",
        "if epoch not in members]",
        [GROUPS],
    ),
    Mutant(
        "leftovers-of-later-sequences-dropped",
        "members of a later sequence are left unchanged",
        "tfmq/transaction/commit_groups.py",
        (
            "        return [\n"
            "            epoch for epoch, member in self._members(group).items() if member.sequence <= sequen"
            "ce and epoch not in kept\n"
            "        ]\n"
        ),
        "        return [epoch for epoch, member in self._members(group).items() if epoch not in kept]\n",
        [GROUPS],
    ),
    Mutant(
        "fences-left-out-of-the-snapshot",
        "a fenced run stays fenced after a restart",
        "tfmq/transaction/commit_groups.py",
        "            group.fenced = dict(fenced)\n",
        "            group.fenced = {}\n",
        [GROUPS],
    ),
    Mutant(
        "aborted-groups-never-deleted",
        "a group that was aborted and committed nothing is forgotten after a day",
        "tfmq/transaction/transaction_table.py",
        "            self.commit_groups.expire(time_ms)\n",
        "",
        [GROUP_COMMITS],
    ),
    Mutant(
        "aborted-groups-forgotten-by-their-first-abort",
        "a group that was aborted and committed nothing is forgotten after a day",
        "tfmq/transaction/commit_groups.py",
        ("            self._abort_times.pop(name, None)\n            self._abort_times[name] = time_ms\n"),
        "            self._abort_times.setdefault(name, time_ms)\n",
        [GROUPS],
    ),
    Mutant(
        "group-commits-what-is-there",
        "a group commits all named members or none",
        "tfmq/transaction/commit_group_commands.py",
        "            raise GroupIncomplete(sentence, missing=missing[:MISSING_NAMED_MAX])\n",
        "            del sentence\n",
        [GROUP_COMMITS],
    ),
    Mutant(
        "open-member-committed",
        "only prepared members are committed",
        "tfmq/transaction/commit_group_commands.py",
        ("found.xid == xid\n                and self._active.is_certainly(found, states.PREPARED)\n"),
        "found.xid == xid\n",
        [GROUP_COMMITS],
    ),
    Mutant(
        "leftovers-of-a-group-stay",
        "members of other attempts of a sequence end with its commit",
        "tfmq/transaction/commit_group_commands.py",
        (
            "        leftovers = self._store.commit_groups.find_leftovers("
            "group, sequence, [each.epoch for each in members])\n"
        ),
        "        leftovers: list[int] = []\n",
        [GROUP_COMMITS],
    ),
    Mutant(
        "abort-acked-before-the-fsync",
        "an abort is durable when it is acknowledged",
        "tfmq/transaction/commit_group_commands.py",
        "            self._store.when_durable(lsn, partial(reply_when_durable, done, GroupAbortResult(ABORTED)))\n",
        "            done(GroupAbortResult(ABORTED), None)\n",
        [GROUP_COMMITS],
    ),
    Mutant(
        "group-commands-overtake",
        "commands of a group are executed one after the other",
        "tfmq/transaction/commit_group_commands.py",
        "        if group in self._waiting_commands:\n            raise Wait(",
        "        if not group:\n            raise Wait(",
        [GROUP_COMMITS],
    ),
    Mutant(
        "refused-group-command-keeps-the-group-waiting",
        "a command that raises does not block later commands",
        "tfmq/transaction/commit_group_commands.py",
        ("        except Exception:\n            self._retry_waiting(group)\n            raise\n"),
        ("        except Exception:\n            raise\n"),
        [GROUP_COMMITS],
    ),
)
