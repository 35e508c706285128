"""Planted bugs: prepared transactions of PostgreSQL. They need an installed one, and are planted only there."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant
from tools.rigs.postgresql import programs

COURSE: Final = "tests/sql/test_commit_protocol.py"
LOST: Final = "tests/sql/test_lost_replies.py"
DECISION: Final = "tests/sql/test_in_doubt.py"
JOINING: Final = "tests/sql/test_session.py"
LEFTOVERS: Final = "tests/sql/test_recovery.py"
PREPARED: Final = "tests/sql/test_in_doubt.py"
WATCHING: Final = "tests/sql/test_recovery_scanner.py"

_TWO_PHASES: Final = (
    Mutant(
        "prepared-part-rolled-back-without-a-look",
        "a transaction that both have prepared is committed by any checker, and the owner reports the same",
        "tfmq/sql/commit_protocol.py",
        (
            '                decision = yield from self._read_decision("rollback", error)\n'
            '                if decision == "commit" and isinstance(error, TfmqError):\n'
        ),
        (
            '                decision = "rollback"\n'
            '                if decision == "commit" and isinstance(error, TfmqError):\n'
        ),
        [LOST + "::test_what_was_committed_while_the_answer_of_the_broker_was_lost_stays_committed"],
    ),
    Mutant(
        "unprepared-part-left-in-the-database",
        "a database whose reply to its prepare was lost keeps no locks",
        "tfmq/sql/commit_protocol.py",
        "            if self.participant.may_be_prepared:\n",
        "            if self.participant.may_be_prepared and not self.participant.two_phase:\n",
        [LOST + "::test_a_prepare_whose_answer_is_lost_keeps_no_locks"],
    ),
    Mutant(
        "row-looked-at-before-what-is-prepared",
        "prepared transactions of the database are ended before the row is read",
        "tfmq/sql/in_doubt.py",
        "        found = find_prepared(connection, xid)\n",
        "        found = find_prepared(connection, xid)[:0]\n",
        [DECISION],
    ),
    Mutant(
        "writer-of-an-abort-waits-without-end",
        "the owner of a transaction that takes long is asked again",
        "tfmq/sql/in_doubt.py",
        '                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(LOCK_SECONDS * 1000)}")\n',
        "                    pass\n",
        [DECISION + "::test_an_owner_that_takes_long_is_asked_about_again"],
    ),
    Mutant(
        "question-takes-the-other-decision",
        "a prepared transaction is ended as it was decided",
        "tfmq/sql/in_doubt.py",
        '        if decision == "commit":\n',
        '        if decision == "rollback":\n',
        [PREPARED, DECISION],
    ),
    Mutant(
        "unfinished-called-finished",
        "a prepared transaction that cannot be ended gives no decision",
        "tfmq/sql/in_doubt.py",
        "        if sqlstate(error) not in FINISHED_ELSEWHERE:  # SQLAlchemy does not wrap the driver's error here\n",
        "        if sqlstate(error) is None:  # SQLAlchemy does not wrap the driver's error here\n",
        [PREPARED, DECISION],
    ),
    Mutant(
        "other-database-s-prepared-finished",
        "prepared transactions of other databases are left unchanged",
        "tfmq/sql/in_doubt.py",
        "starts_with(gid, :start) AND database = current_database() ORDER",
        "starts_with(gid, :start) ORDER",
        [PREPARED, DECISION],
    ),
    Mutant(
        "everybody-s-prepared-finished",
        "prepared transactions of others are left unchanged",
        "tfmq/sql/in_doubt.py",
        "WHERE starts_with(gid, :start) AND",
        "WHERE starts_with(gid, :start) IS NOT NULL AND",
        [PREPARED],
    ),
    Mutant(
        "prepared-under-a-random-name",
        "a prepared transaction of the database has a name that identifies its broker transaction",
        "tfmq/sql/session.py",
        "                set_prepared_name(connection, gid)\n",
        "                pass\n",
        [JOINING + "::test_the_database_holds_it_prepared_under_its_own_name"],
    ),
    Mutant(
        "commit-that-answers-early-believed",
        "the decision is durable when it is acknowledged",
        "tfmq/sql/session.py",
        '            connection.exec_driver_sql("SET LOCAL synchronous_commit = on")\n',
        "            pass\n",
        [JOINING + "::test_a_commit_that_answers_early_is_made_to_wait"],
    ),
    Mutant(
        "deferred-constraint-fails-at-the-decision",
        "deferred constraints are checked before the broker is prepared",
        "tfmq/sql/session.py",
        '        self.session.connection().exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")\n',
        "",
        [JOINING + "::test_what_the_database_refuses_at_its_prepare_leaves_nothing"],
    ),
    Mutant(
        "second-database-in-a-session",
        "the row decides for the database that contains it",
        "tfmq/sql/session.py",
        "        if len(pools) > 1:\n",
        "        if len(pools) > 2:\n",
        [JOINING],
    ),
    Mutant(
        "two-phases-of-a-session-that-has-begun-anyway",
        "two phases are refused for a session that has begun already",
        "tfmq/sql/session.py",
        "            if wanted:\n                raise NotAllowed(",
        "            if not used:\n                raise NotAllowed(",
        [JOINING],
    ),
    Mutant(
        "open-transaction-s-leftover-rolled-back",
        "a transaction that its owner may continue is left unchanged",
        "tfmq/sql/recovery.py",
        '            return DECISION_BY_BROKER_STATE.get(found.state, "wait")\n',
        '            return DECISION_BY_BROKER_STATE.get(found.state, "rollback")\n',
        [LEFTOVERS],
    ),
    Mutant(
        "other-broker-s-leftover-rolled-back",
        "a broker decides no transaction of another one",
        "tfmq/sql/recovery.py",
        "        if prepared.node == broker_node(producer):\n",
        "        if prepared.node or broker_node(producer):\n",
        [LEFTOVERS],
    ),
    Mutant(
        "applying-leftover-rolled-back",
        "a transaction that the broker has committed is committed in the database",
        "tfmq/sql/recovery.py",
        '    states.APPLYING: "commit",\n',
        '    states.APPLYING: "rollback",\n',
        [LEFTOVERS],
    ),
    Mutant(
        "watch-ends-with-an-outage",
        "the search for leftover transactions continues after an outage",
        "tfmq/sql/recovery.py",
        ("                    failed = True\n"),
        ("                    failed = True\n                    return\n"),
        [WATCHING],
    ),
    Mutant(
        "forked-child-watches-nothing",
        "a forked child begins a search of its own",
        "tfmq/sql/recovery.py",
        "os.register_at_fork(after_in_child=_reset_after_fork)\n",
        "",
        [WATCHING],
    ),
)

TWO_PHASES: Final = _TWO_PHASES * (programs() is not None)
