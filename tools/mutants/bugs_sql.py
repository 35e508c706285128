"""Planted bugs: transactions of a database and the broker: the row that decides, and the order of steps."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

ASKING: Final = "tests/sql/test_check_back.py"
BROKER: Final = "tests/sql/test_session.py"
LOST: Final = "tests/sql/test_lost_replies.py"
COURSE: Final = "tests/sql/test_commit_protocol.py"
DATABASE: Final = "tests/sql/test_database.py"
DECISION: Final = "tests/sql/test_in_doubt.py"
JOINING: Final = "tests/sql/test_session.py"
PRUNING: Final = "tests/sql/test_in_doubt.py"
TABLE: Final = "tests/sql/test_database.py"

SQL: Final = (
    Mutant(
        "pruned-with-any-admin",
        "wrong arguments of prune are refused with a message",
        "tfmq/sql/pruning.py",
        "        if not isinstance(admin, kinds):\n",
        "        if not kinds:\n",
        ["tests/sql/test_in_doubt.py::test_wrong_objects_are_refused_in_a_sentence"],
    ),
    Mutant(
        "database-decides-before-the-broker-is-prepared",
        "the broker is prepared before the database decides",
        "tfmq/sql/commit_protocol.py",
        (
            "            is_decided = yield from self._prepare_broker()\n"
            "            if not is_decided:\n"
            "                yield from self._commit_database()\n"
            "            yield from self._commit_broker()\n"
        ),
        (
            "            yield from self._commit_database()\n"
            "            yield from self._prepare_broker()\n"
            "            yield from self._commit_broker()\n"
        ),
        [COURSE + "::test_a_step_that_fails_leaves_both_or_neither"],
    ),
    Mutant(
        "broker-commits-before-the-database-decides",
        "messages are visible only after the database's commit",
        "tfmq/sql/commit_protocol.py",
        ("                yield from self._commit_database()\n            yield from self._commit_broker()\n"),
        ("                yield from self._commit_broker()\n            yield from self._commit_database()\n"),
        [COURSE + "::test_a_step_that_fails_leaves_both_or_neither"],
    ),
    Mutant(
        "failed-commit-taken-for-a-rollback",
        "a failure at the decision is resolved by reading the row",
        "tfmq/sql/commit_protocol.py",
        '            decision = yield from self._read_decision("commit", error)\n',
        '            decision = "rollback"\n',
        [COURSE + "::test_a_step_that_fails_leaves_both_or_neither"],
    ),
    Mutant(
        "silent-database-taken-for-a-rollback",
        "while the database does not reply, nothing is decided",
        "tfmq/sql/commit_protocol.py",
        '            error.add_note(f"Besides: {failure}")\n            return None\n',
        '            error.add_note(f"Besides: {failure}")\n            return "rollback"\n',
        [
            LOST + "::test_while_the_database_says_nothing_nothing_is_decided",
            COURSE + "::test_a_step_that_fails_leaves_both_or_neither",
        ],
    ),
    Mutant(
        "broker-s-contradiction-swallowed",
        "a broker decision that contradicts the database is reported",
        "tfmq/sql/commit_protocol.py",
        "CONTRADICTIONS = (TransactionRolledBack, UnknownTransaction, StaleEpoch, HeuristicOutcome, Damaged)\n",
        "CONTRADICTIONS = (HeuristicOutcome,)\n",
        [COURSE + "::test_a_broker_that_contradicts_is_reported"],
    ),
    Mutant(
        "broker-that-is-away-undoes-the-commit",
        "after the decision nothing fails: the broker checks back later",
        "tfmq/sql/commit_protocol.py",
        '        except TfmqError as error:\n            log.warning(\n                "The transaction',
        '        except OSError as error:\n            log.warning(\n                "The transaction',
        [COURSE + "::test_a_broker_that_takes_no_commit_now_asks_later"],
    ),
    Mutant(
        "exception-leaves-the-broker-s-part",
        "an exception of the block rolls both back",
        "tfmq/sql/commit_protocol.py",
        "        yield from self._rollback_session(error)\n        yield from self._rollback_broker(error)\n\n",
        "        yield from self._rollback_session(error)\n\n",
        [COURSE + "::test_an_exception_of_the_block_rolls_both_back_and_goes_on"],
    ),
    Mutant(
        "exception-leaves-the-session-s-part",
        "an exception of the block rolls both back",
        "tfmq/sql/commit_protocol.py",
        "        yield from self._rollback_session(error)\n        yield from self._rollback_broker(error)\n\n",
        "        yield from self._rollback_broker(error)\n\n",
        ["tests/sql/test_transaction.py::test_after_an_exception_the_session_has_nothing_left_to_commit"],
    ),
    Mutant(
        "transaction-with-messages-called-empty",
        "messages of the block are prepared with the database's part",
        "tfmq/sql/transaction.py",
        "        self._shared.is_empty = False\n",
        "        self._shared.is_empty = bool(transaction)\n",
        ["tests/sql/test_transaction.py::test_order_and_message_come_together"],
    ),
    Mutant(
        "row-of-an-abort-not-written",
        "a reported rollback makes the owner's commit impossible",
        "tfmq/sql/in_doubt.py",
        "                written = rows.insert_row(connection, table, identity, xid, rows.ABORTED, rows.utc_now())\n",
        "                written = True\n",
        [DECISION],
    ),
    Mutant(
        "answer-before-the-abort-is-committed",
        "a reported rollback makes the owner's commit impossible",
        "tfmq/sql/in_doubt.py",
        "table, identity, xid, rows.ABORTED, rows.utc_now())\n",
        "table, identity, xid, rows.ABORTED, rows.utc_now())\n                connection.rollback()\n",
        [DECISION],
    ),
    Mutant(
        "aborted-row-commits",
        "the row is the decision",
        "tfmq/sql/in_doubt.py",
        'rows.COMMITTED: "commit", rows.ABORTED: "rollback"}',
        'rows.COMMITTED: "commit", rows.ABORTED: "commit"}',
        [DECISION],
    ),
    Mutant(
        "owner-that-is-committing-called-aborted",
        "while the owner's transaction is open there is no decision",
        "tfmq/sql/in_doubt.py",
        "        except OperationalError:\n            return None\n",
        '        except OperationalError:\n            return "rollback"\n',
        [DECISION],
    ),
    Mutant(
        "abort-that-lost-the-race-wins",
        "of owner and checker one wins, and both agree which",
        "tfmq/sql/in_doubt.py",
        "        except IntegrityError:\n            continue\n",
        '        except IntegrityError:\n            return "rollback"\n',
        [DECISION],
    ),
    Mutant(
        "table-decides-for-another",
        "a table decides only its own transactions",
        "tfmq/sql/in_doubt.py",
        "    if identity is None or not xid.startswith(xid_prefix(connection.engine.url, identity)):\n",
        "    if identity is None:\n",
        [DECISION],
    ),
    Mutant(
        "row-written-into-any-table",
        "no row is written into a table of another identity",
        "tfmq/sql/database.py",
        "    here = values.where(table.c.xid == IDENTITY_XID, table.c.state == identity)\n",
        "    here = values.where(table.c.xid == IDENTITY_XID)\n",
        [TABLE, DECISION],
    ),
    Mutant(
        "identity-pruned",
        "the identity of a table is kept",
        "tfmq/sql/database.py",
        "table.c.time < before, table.c.xid != IDENTITY_XID)\n",
        "table.c.time < before)\n",
        [TABLE, PRUNING],
    ),
    Mutant(
        "rows-in-doubt-pruned",
        "a row is kept while the broker may check back",
        "tfmq/sql/database.py",
        "        xids = [xid for xid in page if xid not in keep]\n",
        "        xids = list(page)\n",
        [TABLE, PRUNING],
    ),
    Mutant(
        "prepared-ones-not-asked-about",
        "a row is kept while the broker may check back",
        "tfmq/sql/pruning.py",
        "states.ENDED_STATES | states.HEURISTIC_STATES",
        "states.ENDED_STATES | states.HEURISTIC_STATES | {states.PREPARED}",
        [PRUNING],
    ),
    Mutant(
        "young-rows-pruned",
        "rows are kept for a minimum time",
        "tfmq/sql/pruning.py",
        "    before = clock() - older_than\n",
        "    before = clock() + older_than\n",
        [PRUNING],
    ),
    Mutant(
        "second-identity-fails-its-maker",
        "of several concurrent creators of the table one succeeds, and none fails",
        "tfmq/sql/database.py",
        "    except IntegrityError:\n        return\n",
        "    except ZeroDivisionError:\n        return\n",
        [TABLE],
    ),
    Mutant(
        "given-up-transaction-commits",
        "a transaction whose rollback the broker was asked for is not committed by its owner",
        "tfmq/sql/session.py",
        "        except IntegrityError as error:\n            raise TransactionRolledBack(",
        "        except IntegrityError as error:\n            session.rollback()\n            return\n"
        "            raise TransactionRolledBack(",
        [JOINING + "::test_a_name_that_was_given_up_cannot_be_committed"],
    ),
    Mutant(
        "row-left-unwritten",
        "without the row there is no commit",
        "tfmq/sql/session.py",
        ("        if not written:\n            discard_capabilities(self.engine)\n"),
        ("        if written is None:\n            discard_capabilities(self.engine)\n"),
        [JOINING],
    ),
    Mutant(
        "session-that-ended-inside-goes-on",
        "changes that were committed inside the block are not reported as part of it",
        "tfmq/sql/session.py",
        "        if session.get_transaction() is not self._begun:\n",
        "        if session.get_transaction() is None and self._begun is None:\n",
        [JOINING],
    ),
    Mutant(
        "open-savepoint-committed",
        "a savepoint must end inside the block",
        "tfmq/sql/session.py",
        '        if session.in_nested_transaction():\n            raise NotAllowed("A savepoint of the session is',
        '        if not session:\n            raise NotAllowed("A savepoint of the session is',
        [JOINING],
    ),
    Mutant(
        "foreign-connection-joined",
        "a session whose commit commits nothing is refused",
        "tfmq/sql/session.py",
        "    if isinstance(bind, Connection) and (used or bind.in_transaction()):\n",
        "    if isinstance(bind, Connection) and used and not used:\n",
        [JOINING],
    ),
    Mutant(
        "autocommit-joined",
        "without a transaction of the database a row decides nothing",
        "tfmq/sql/session.py",
        "            require_no_autocommit(connection)\n",
        "",
        [JOINING],
    ),
    Mutant(
        "refused-session-keeps-what-was-begun",
        "a refused session is left unchanged",
        "tfmq/sql/session.py",
        ("        except BaseException:\n            self.restore_session()\n            raise\n"),
        ("        except ZeroDivisionError:\n            self.restore_session()\n            raise\n"),
        [JOINING, "tests/sql/test_transaction.py::test_what_a_session_had_begun_survives_a_refusal"],
    ),
    Mutant(
        "session-s-own-work-rolled-back-by-a-refusal",
        "work that a session had begun survives a refusal",
        "tfmq/sql/session.py",
        ("        if self._began_here:\n            self.session.rollback()\n"),
        "        self.session.rollback()\n",
        [JOINING],
    ),
    Mutant(
        "password-in-the-group-s-name",
        "nothing that is shown contains a password, or depends on one",
        "tfmq/sql/database.py",
        "    return f\"{url.get_backend_name()}:{url.host or ''}:",
        "    return f\"{url.password}:{url.get_backend_name()}:{url.host or ''}:",
        [DATABASE],
    ),
    Mutant(
        "databases-of-one-server-are-one",
        "another database has another name",
        "tfmq/sql/database.py",
        "{url.port or ''}:{name}:{':'.join(options)}\"",
        "{url.port or ''}:{':'.join(options)}\"",
        [DATABASE],
    ),
    Mutant(
        "database-in-memory-asked",
        "an in-memory database is not read from another thread",
        "tfmq/sql/recovery.py",
        "    if is_in_memory(engine.url):\n        return\n",
        "",
        [ASKING + "::test_a_database_in_memory_is_used_and_not_asked"],
    ),
    Mutant(
        "database-that-is-down-says-rollback",
        "a database that is down gives no decision",
        "tfmq/sql/recovery.py",
        (
            '            log.warning("The outcome of %s cannot be read from the database, check-back is repea'
            'ted: %s", xid, error)\n'
            "            return None\n"
        ),
        (
            '            log.warning("The outcome of %s cannot be read from the database, check-back is repea'
            'ted: %s", xid, error)\n'
            '            return "rollback"\n'
        ),
        [ASKING + "::test_a_database_that_is_down_does_not_answer"],
    ),
    Mutant(
        "second-database-of-a-producer-without-a-group",
        "the broker asks no client that cannot read the right database",
        "tfmq/sql/session.py",
        "    elif _default_groups.get(producer, name) != name:\n",
        "    elif _default_groups.get(producer, name) == core:\n",
        [BROKER],
    ),
    Mutant(
        "looking-takes-a-transaction-up",
        "reading a transaction does not join it",
        "tfmq/sql/session.py",
        "    return producer._driver.run(AdminCore(core.link, core.options.timeout).transaction(xid, 0))\n",
        ("    core.checked = AdminCore\n    return producer.resume(xid)\n"),
        [BROKER],
    ),
)
