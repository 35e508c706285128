"""Planted bugs: logins on the server, rights, owners of transactions, quotas, connections without a login."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

RIGHTS: Final = "tests/access/test_rights.py"
SCRAM: Final = "tests/access/test_scram.py"
SESSION: Final = "tests/server/test_session.py"
CONTROL_TESTS: Final = "tests/server/test_access_control.py"
HTTP_TESTS: Final = "tests/server/test_http_users.py"
CONTROL: Final = "tfmq/server/access_control.py"
SESSIONS: Final = "tfmq/server/session.py"

ACCESS: Final = (
    Mutant(
        "command-without-a-rule-allowed",
        "a command without a rule is refused",
        CONTROL,
        '            return Need(("admin",)) if account is None or not account.user.rights.is_admin else None\n',
        "            return None\n",
        [RIGHTS],
    ),
    Mutant(
        "only-the-first-right-is-checked",
        "a request needs all of its rights",
        CONTROL,
        "        for need in rule(request):\n",
        "        for need in rule(request)[:1]:\n",
        [RIGHTS],
    ),
    Mutant(
        "pattern-matches-a-part",
        "a pattern matches the whole name",
        "tfmq/access/rights.py",
        'pattern.fullmatch(need.name if ACTIONS[action].of else "")',
        'pattern.match(need.name if ACTIONS[action].of else "")',
        [RIGHTS],
    ),
    Mutant(
        "dot-in-a-pattern",
        "only * stands for other characters",
        "tfmq/access/rights.py",
        '".*".join(map(re.escape, right.pattern.split("*")))',
        'right.pattern.replace("*", ".*")',
        [RIGHTS],
    ),
    Mutant(
        "handle-of-another-topic",
        "a user reaches no delayed message with a handle that names another topic",
        "tfmq/broker/delay_commands.py",
        "        if not session.user:\n            then()\n            return\n",
        "        then()\n        return\n",
        [CONTROL_TESTS],
    ),
    Mutant(
        "producer-id-of-another-user",
        "a producer id belongs to the user who leased it",
        CONTROL,
        "            owner = self._given_ids.user_of(request.producer_id)\n",
        "            owner = None\n",
        [RIGHTS, CONTROL_TESTS],
    ),
    Mutant(
        "all-groups-listed",
        "a list of all groups has only those that the user may see",
        CONTROL,
        "        elif kind is commands.ListGroups:\n",
        "        elif False:\n",
        [RIGHTS],
    ),
    Mutant(
        "all-topics-listed",
        "a list of all topics has only those that the user may see",
        CONTROL,
        "        if kind is commands.Metadata and request.topics is None:\n",
        "        if False:\n",
        [RIGHTS],
    ),
    Mutant(
        "foreign-transaction-ended",
        "a transaction belongs to the user who began it",
        CONTROL,
        "            if user is not None and user != account.name and not account.allow(need):\n",
        "            if False:\n",
        [RIGHTS],
    ),
    Mutant(
        "owner-lost-with-a-restart",
        "a prepared transaction belongs to the user who began it, also after a restart",
        "tfmq/transaction/journal_records.py",
        "    return origin if user is None else origin._replace(user=_checked_fields((user,), str)[0])\n",
        "    return origin\n",
        [CONTROL_TESTS],
    ),
    Mutant(
        "status-for-everybody",
        "the state of the broker needs a right",
        SESSIONS,
        "        if self._context.access is not None and not self._context.access.check(request, reply, self):\n",
        "        if False:\n",
        [SESSION],
    ),
    Mutant(
        "commands-before-the-login",
        "before the login no other command is accepted",
        SESSIONS,
        "            self._login = context.access.new_login()\n",
        "            self._login = context.access.new_login()\n            self._greeted()\n",
        [SESSION],
    ),
    Mutant(
        "failed-login-answered-at-once",
        "a failed login is answered a second later",
        SESSIONS,
        "LOGIN_FAILED_SECONDS = 1.0\n",
        "LOGIN_FAILED_SECONDS = 0.0\n",
        [SESSION],
    ),
    Mutant(
        "unknown-user-has-another-refusal",
        "an unknown user gets a salt like one who exists",
        "tfmq/access/scram.py",
        "        self.keys = keys = self._find(name) or self._decoy(name)\n",
        "        keys = self._find(name)\n        if keys is None:\n            raise KeyError(name)\n",
        [SCRAM],
    ),
    Mutant(
        "removed-user-stays-connected",
        "the connections of a user that is gone are closed",
        CONTROL,
        '                self._close(account, "the user was removed")\n',
        "",
        [CONTROL_TESTS],
    ),
    Mutant(
        "old-password-stays-connected",
        "the connections of a user with another password are closed",
        CONTROL,
        '                self._close(account, "the user has another password")\n',
        "                pass\n",
        [CONTROL_TESTS],
    ),
    Mutant(
        "quota-not-charged-for-reads",
        "what a user reads counts",
        CONTROL,
        "lambda fields, size: account.usage.take(size, 0)",
        "lambda fields, size: None",
        [RIGHTS],
    ),
    Mutant(
        "quota-drops-sends-without-an-answer",
        "a send that gets no answer is kept when the quota is used up",
        CONTROL,
        "            if wait_seconds > 0 and not (kind is commands.Produce and request.acks == commands.ACKS_NONE):\n",
        "            if wait_seconds > 0:\n",
        [RIGHTS],
    ),
    Mutant(
        "connections-without-a-login-stay",
        "connections without a login do not keep others away",
        "tfmq/server/server.py",
        "            self._close_oldest_before_login()\n",
        "            pass\n",
        [CONTROL_TESTS],
    ),
    Mutant(
        "route-without-a-login",
        "each route over HTTP but the public ones needs a login",
        "tfmq/server/http.py",
        "    if access is None or (right == PUBLIC and given is None):\n",
        "    if access is None or given is None:\n",
        [HTTP_TESTS],
    ),
    Mutant(
        "metrics-for-every-user",
        "metrics need the right to monitor",
        "tfmq/server/http.py",
        "    if right not in (PUBLIC, LOGIN) and not account.allow(need):\n",
        "    if False:\n",
        [HTTP_TESTS],
    ),
    Mutant(
        "page-shows-all-names",
        "the page shows only topics and groups that the user may see",
        "tfmq/server/page/call.py",
        "        return (name for name in names if self.link.may(describe(name)))\n",
        "        return iter(names)\n",
        [HTTP_TESTS],
    ),
    Mutant(
        "page-shows-the-status-to-everybody",
        "the state of the broker needs a right over HTTP too",
        "tfmq/server/local_connection.py",
        "                self.check(request)\n",
        "",
        [HTTP_TESTS],
    ),
    Mutant(
        "passwords-tried-without-end",
        "passwords over HTTP are limited in a second",
        CONTROL,
        "        if self._passwords > PASSWORDS_PER_SECOND:\n",
        "        if False:\n",
        [CONTROL_TESTS],
    ),
)
