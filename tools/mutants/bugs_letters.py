"""Planted bugs: dead letters: calls and their history, a topic as the store, redrives."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

COURSE: Final = "tests/dead_letters/test_state_machine.py"
SHELF: Final = "tests/dead_letters/test_store.py"
STORE: Final = "tests/dead_letters/test_sql_store.py"
TABLE: Final = "tests/dead_letters/test_sql_store.py"
KEEPING: Final = "tests/dead_letters/test_store.py"
RUNNING: Final = "tests/client/worker/test_runner.py"
RETRYING: Final = "tests/dead_letters/test_retry_loop.py"
REDRIVE: Final = "tests/dead_letters/test_redrive.py"
TOPIC: Final = "tests/dead_letters/test_topic_store.py"
LETTER: Final = "tests/dead_letters/test_model.py"
WAITS: Final = "tests/dead_letters/test_store.py"

_KEEPING = "tfmq/dead_letters/store.py"
_STORE = "tfmq/dead_letters/sql_store.py"
_REDRIVE = "tfmq/dead_letters/redrive.py"
_TOPIC = "tfmq/dead_letters/topic_store.py"
_RETRYING = "tfmq/dead_letters/retry_loop.py"

KEPT: Final = (
    Mutant(
        "offset-passes-before-the-dead-letter-is-kept",
        "the offset of a failed message is committed once the store has it",
        "tfmq/client/worker/runner.py",
        (
            "        message = job.message\n"
            "        failure = Failure.from_exception(error, round(self._wall_clock() * 1000))\n"
        ),
        (
            "        message = job.message\n"
            "        failure = Failure.from_exception(error, round(self._wall_clock() * 1000))\n"
            "        if job.ack_tracker is not None:\n"
            "            job.ack_tracker.ack(message)\n"
        ),
        ["tests/client/worker/test_runner.py::test_a_store_that_fails_holds_the_offset_and_calls_no_handler_again"],
    ),
    Mutant(
        "message-can-be-two-dead-letters",
        "one message has at most one row",
        "tfmq/dead_letters/sql_store.py",
        '    UniqueConstraint(\n        "group_name",\n',
        '    UniqueConstraint(\n        "id",\n        "group_name",\n',
        [TABLE],
    ),
    Mutant(
        "page-of-changes-in-parts",
        "a page of changes is stored completely or not at all",
        _STORE,
        "            _write(connection, [each for each in changed if each.id in before], new=False)\n",
        "            _write(connection, [each for each in changed if each.id in before], new=False)\n"
        "            connection.commit()\n",
        [f"{STORE}::test_a_page_of_changes_is_all_or_nothing"],
    ),
    Mutant(
        "same-dead-letter-in-the-same-moment-fails",
        "concurrent stores of the same message make one dead letter",
        _STORE,
        "                if not isinstance(failed.__cause__, IntegrityError):\n                    raise\n",
        "                if failed:\n                    raise\n",
        [f"{STORE}::test_many_threads_that_keep_the_same_make_one_dead_letter_each"],
    ),
    Mutant(
        "what-ended-is-never-forgotten",
        "old ended entries are deleted",
        _STORE,
        "        old = (COLUMNS.state.in_(EXPIRING_STATES), COLUMNS.changed_ms < now_ms - ENDED_MS_KEPT)\n",
        "        old = (COLUMNS.state.in_(EXPIRING_STATES), COLUMNS.changed_ms < 0)\n",
        [f"{STORE}::test_what_ended_long_ago_is_forgotten_and_nothing_else"],
    ),
    Mutant(
        "dead-letters-forgotten-in-time",
        "a dead letter is kept until an operator has removed it",
        _STORE,
        "EXPIRING_STATES: Final = (*model.FINAL_STATES, model.FAILING)\n",
        'EXPIRING_STATES: Final = (*model.FINAL_STATES, model.FAILING, "dead")\n',
        [f"{STORE}::test_what_ended_long_ago_is_forgotten_and_nothing_else"],
    ),
    Mutant(
        "another-group-s-dead-letters-taken",
        "dead letters of another group are not taken",
        _STORE,
        "        query = select(COLUMNS.id).where(COLUMNS.group_name == group, COLUMNS.broker == broker)\n",
        "        query = select(COLUMNS.id).where(COLUMNS.broker == broker)\n",
        [f"{KEEPING}::test_another_groups_dead_letters_are_not_taken"],
    ),
    Mutant(
        "put-off-dead-letter-comes-at-once",
        "a message that is put off is handled at its time, and not before",
        _STORE,
        "COLUMNS.state == state, due <= now_ms)",
        "COLUMNS.state == state)",
        [f"{SHELF}::test_what_is_due_is_given_in_the_order_of_its_times_and_for_its_group"],
    ),
    Mutant(
        "putting-off-costs-a-call",
        "putting off does not count as a call",
        _KEEPING,
        "max(1, self._calls_max - max(0, count - 1))",
        "max(1, self._calls_max - max(0, count) - 1)",
        [KEEPING],
    ),
    Mutant(
        "lost-lease-not-noticed",
        "a consumer that lost its lease gets an error",
        _KEEPING,
        (
            '            log.warning("%s belongs to another consumer by now: its lease had expired.", due.id)\n'
            '            return ""\n'
        ),
        '            return "handled"\n',
        [f"{KEEPING}::test_what_a_killed_consumer_had_is_anothers_when_the_lease_is_over"],
    ),
    Mutant(
        "error-s-words-in-the-log",
        "the log contains the class of an error, and never its text",
        _KEEPING,
        '            kind = letter.error.partition(":")[0]\n',
        "            kind = letter.error\n",
        [f"{KEEPING}::test_a_dead_letter_is_kept_with_its_history"],
    ),
    Mutant(
        "dead-letters-of-another-broker-are-taken",
        "a consumer handles again only dead letters of its own broker",
        _STORE,
        "        query = select(COLUMNS.id).where(COLUMNS.group_name == group, COLUMNS.broker == broker)\n",
        "        query = select(COLUMNS.id).where(COLUMNS.group_name == group)\n",
        [f"{RUNNING}::test_what_waits_is_handled_by_consumers_of_its_own_broker"],
    ),
    Mutant(
        "dead-letters-without-a-broker-belong-to-any",
        "a dead letter without a broker belongs to the broker that has its message",
        "tfmq/dead_letters/topic_store.py",
        "    return message is not None and message.origin.append_ms == letter.appended_ms\n",
        "    return message is not None\n",
        [f"{RUNNING}::test_what_an_earlier_release_kept_is_handled_where_its_message_is"],
    ),
    Mutant(
        "redrive-to-another-broker",
        "a redrive skips dead letters of another broker, unless --force is given",
        _REDRIVE,
        "        if self._request.force or letter.broker == self.report.broker:\n",
        "        if self._request.force or letter.broker:\n",
        [f"{REDRIVE}::test_dead_letters_of_another_broker_are_left_unless_they_are_forced"],
    ),
    Mutant(
        "brokers-share-the-default-store",
        "the default store belongs to one group at one broker",
        "tfmq/dead_letters/store.py",
        "found, earlier = default_path(group, broker=broker), default_path(group)",
        "found, earlier = default_path(group), default_path(group)",
        ["tests/dead_letters/test_open.py::test_a_consumer_without_a_store_has_the_groups_own"],
    ),
    Mutant(
        "waits-between-calls-do-not-grow",
        "waits between calls grow",
        _KEEPING,
        "        next_ms = 0 if rejected else now_ms + retry_delay_ms(due.calls, self._jitter())\n",
        "        next_ms = 0 if rejected else now_ms + retry_delay_ms(1, self._jitter())\n",
        [f"{KEEPING}::test_waits_grow_between_failures"],
    ),
    Mutant(
        "history-without-a-bound",
        "the history of a dead letter is bounded",
        "tfmq/dead_letters/model.py",
        "    if len(kept) > FAILURES_MAX:\n",
        "    if len(kept) < 0:\n",
        [LETTER],
    ),
)

AGAIN: Final = (
    Mutant(
        "loop-limit-ignored",
        "a message that failed too often is skipped",
        _REDRIVE,
        "        able = [each for each in own if each.redrives < self._request.loop_limit]\n",
        "        able = [each for each in own if each.redrives >= 0]\n",
        [f"{REDRIVE}::test_what_comes_back_again_and_again_is_passed_over"],
    ),
    Mutant(
        "dry-run-sends",
        "a dry run sends and changes nothing",
        _REDRIVE,
        "        self._request = request\n",
        "        self._request = request._replace(dry=False)\n",
        [f"{REDRIVE}::test_a_dry_run_counts_and_changes_nothing"],
    ),
    Mutant(
        "dry-run-reports-all-as-unsendable",
        "a dry run, which reads no bodies, reports no letter as unsendable for want of one",
        _REDRIVE,
        "                self.report.count(target[0], len(meant))\n                continue\n",
        "                self.report.count(target[0], len(meant))\n",
        [f"{REDRIVE}::test_a_dry_run_counts_and_changes_nothing"],
    ),
    Mutant(
        "dry-run-resumes",
        "a dry run leaves interrupted redrives as they are",
        _REDRIVE,
        ("        if not self._request.dry:\n            yield from self._resume()\n"),
        "        yield from self._resume()\n",
        [f"{REDRIVE}::test_a_dry_run_counts_and_changes_nothing"],
    ),
    Mutant(
        "sent-before-its-place-is-written-down",
        "the sequence of a dead letter is recorded before it is sent",
        _REDRIVE,
        ("        placed = yield from self._letters.apply(steps)\n        found = [\n"),
        ("        placed = letters\n        found = [\n"),
        [f"{REDRIVE}::test_killed_at_every_step_and_done_again_nothing_is_doubled_and_nothing_lost"],
    ),
    Mutant(
        "arrival-not-written-down",
        "a dead letter that was stored is not sent by the next redrive",
        _REDRIVE,
        (
            '        """Apply the events of `fate` to the store, and add its counts to the report."""\n'
            "        yield from self._letters.apply(fate.steps)\n"
        ),
        (
            '        """Apply the events of `fate` to the store, and add its counts to the report."""\n'
            "        yield from ()\n"
        ),
        [f"{REDRIVE}::test_dead_letters_go_to_their_topic_again_as_they_were"],
    ),
    Mutant(
        "limit-ignored",
        "no more dead letters than the limit are sent",
        _REDRIVE,
        "            able = able[: self._request.limit - self.report.selected]\n",
        "            able = list(able)\n",
        [f"{REDRIVE}::test_only_what_is_chosen_is_sent"],
    ),
    Mutant(
        "another-topic-gets-them-anywhere",
        "in another topic the key chooses the partition",
        _REDRIVE,
        "        return name, crc32(data) % count\n",
        "        return name, 0\n",
        [f"{REDRIVE}::test_another_topic_gets_them_by_key"],
    ),
    Mutant(
        "too-large-a-dead-letter-stops-the-others",
        "a dead letter that cannot be sent stops no other one",
        _REDRIVE,
        "        if fate.refused and len(won) > 1:",
        "        if fate.refused and len(won) < 0:",
        [f"{REDRIVE}::test_a_message_that_is_too_large_by_now_stops_no_other"],
    ),
)

HANDLED: Final = (
    Mutant(
        "history-begins-with-the-latest",
        "the history of a dead letter keeps its first call",
        "tfmq/dead_letters/model.py",
        "        kept = [kept[0], *kept[1 - FAILURES_MAX :]]\n",
        "        kept = kept[-FAILURES_MAX:]\n",
        [LETTER],
    ),
    Mutant(
        "what-was-not-called-is-counted",
        "a message for which no handler was called is given back without counting a call",
        _RETRYING,
        "            return partial(store.release, due)\n",
        "            return partial(store.mark_failed, due, self._create_failure(HandlerNotCalled()))\n",
        [f"{RETRYING}::test_what_no_handler_was_called_with_is_given_back_uncounted"],
    ),
    Mutant(
        "stop-takes-one-more",
        "stop ends a redrive after the message in work",
        _RETRYING,
        "        while not self.stop_asked.done:\n            try:\n",
        "        while True:\n            try:\n",
        [f"{RETRYING}::test_stop_ends_it_after_the_message_in_work"],
    ),
    Mutant(
        "two-verbs-at-once-on-a-topic",
        "concurrent commands on a store in a topic wait for each other",
        _TOPIC,
        ("        while self._method_ended is not None:\n            yield Wait((self._method_ended,))\n"),
        "        yield from ()\n",
        [f"{TOPIC}::test_several_at_once_in_one_process_wait_for_each_other"],
    ),
    Mutant(
        "looking-makes-the-topic",
        "reading a store creates no topic",
        _TOPIC,
        "[self._topic], create=self._create)",
        "[self._topic], create=True)",
        [f"{TOPIC}::test_who_only_looks_makes_no_topic"],
    ),
    Mutant(
        "deleted-store-stays-deleted",
        "a topic of dead letters that was deleted is created again",
        _TOPIC,
        ("            self._reset()\n        return (yield from self._append_once(steps, until))\n"),
        ("            raise\n        return (yield from self._append_once(steps, until))\n"),
        [f"{TOPIC}::test_a_topic_that_was_deleted_is_begun_anew"],
    ),
    Mutant(
        "idle-store-stuck",
        "a store that was idle continues when the broker has forgotten its producer",
        _TOPIC,
        (
            "            # The broker expired the idle producer id, and did not store this append.\n"
            "            self._drop_producer_id()\n"
        ),
        ("            # The broker expired the idle producer id, and did not store this append.\n            raise\n"),
        [f"{TOPIC}::test_an_idle_store_goes_on_when_the_broker_forgot_it"],
    ),
    Mutant(
        "listener-s-closed-is-not-called",
        "a listener that raises Closed has failed as with any other error",
        _RETRYING,
        "        except HandlerNotCalled:\n",
        "        except (HandlerNotCalled, Closed):\n",
        [f"{RETRYING}::test_a_listener_that_raises_closed_has_failed_as_with_any_other_error"],
    ),
)

LETTERS: Final = KEPT + AGAIN + HANDLED
