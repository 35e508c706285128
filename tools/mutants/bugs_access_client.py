"""Planted bugs: logins of clients, passwords that are shown, the file of users, waits that a busy broker asks for."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

LOGIN: Final = "tests/client/connection/test_login.py"
ADDRESSES: Final = "tests/client/connection/test_addresses.py"
CONNECTION: Final = "tfmq/client/connection/connection.py"
ADDRESS: Final = "tfmq/client/connection/addresses.py"

ACCESS_CLIENT: Final = (
    Mutant(
        "broker-proof-unchecked",
        "a client sends no request to a broker that does not prove that it knows the user",
        CONNECTION,
        "            login.check(reply.data)\n",
        "",
        [LOGIN],
    ),
    Mutant(
        "login-ends-when-the-broker-says-so",
        "a broker cannot end the login before the client has proved anything",
        CONNECTION,
        "                if reply.done:\n",
        "                if reply.done:\n                    self._set_ready()\n                    return\n"
        "                if reply.done:\n",
        [LOGIN],
    ),
    Mutant(
        "feature-stripped-on-the-way",
        "a client with a user never goes on without a login",
        CONNECTION,
        "        if not wants_login:\n",
        "        if not wants_login:\n            self._set_ready()\n            return\n        if not wants_login:\n",
        [LOGIN],
    ),
    Mutant(
        "weak-iterations-accepted",
        "a client refuses fewer iterations than RFC 7677 asks for, and too much work",
        "tfmq/access/scram.py",
        "        if not iterations.isdecimal() or not ITERATIONS_MIN <= int(iterations) <= ITERATIONS_MAX:\n",
        "        if not iterations.isdecimal():\n",
        [LOGIN],
    ),
    Mutant(
        "failed-login-waits-like-a-lost-connection",
        "a failed login is reported at once, also if another address does not answer",
        CONNECTION,
        "        failed = self.last_error = refusal or failed\n",
        "        refusal = None\n",
        [LOGIN],
    ),
    Mutant(
        "failed-login-in-a-hot-loop",
        "each failed login is followed by a growing pause",
        CONNECTION,
        "            and not isinstance(self.last_error, LoginFailed)\n",
        "",
        [LOGIN],
    ),
    Mutant(
        "login-without-a-deadline",
        "the login has a deadline",
        CONNECTION,
        "        self._reply_deadline = self.now() + HELLO_TIMEOUT_SECONDS\n",
        "        self._reply_deadline = NEVER\n",
        [LOGIN],
    ),
    Mutant(
        "password-in-the-repr",
        "the repr of an address has no password",
        ADDRESS,
        "    password: str = field(repr=False)\n",
        "    password: str = field()\n",
        [ADDRESSES],
    ),
    Mutant(
        "wrong-address-quoted-with-its-password",
        "a wrong address that may have a password is not quoted",
        ADDRESS,
        "            if may_have_password:\n",
        '            if "@" in part:\n',
        [ADDRESSES],
    ),
    Mutant(
        "question-mark-in-a-password-quoted",
        "what follows the ? of an address is not quoted if it may be part of a password",
        ADDRESS,
        '            if "@" in query:',
        '            if query.startswith("@"):',
        [ADDRESSES],
    ),
    Mutant(
        "user-not-inherited",
        "in a list the user of an address holds until the next one",
        ADDRESS,
        "            if at:\n                credentials = _parse_credentials(user, scheme)\n",
        "            credentials = _parse_credentials(user, scheme) if at else None\n",
        [ADDRESSES],
    ),
    Mutant(
        "spark-shows-the-password",
        "Spark gets no password in an option that it shows",
        "tfmq/spark/settings.py",
        "    if without_password(servers) != servers:\n",
        "    if False:\n",
        ["tests/spark/test_settings.py"],
    ),
    Mutant(
        "users-changed-without-the-lock",
        "of two changes of the file of users at the same time none is lost",
        "tfmq/access/users.py",
        "        fcntl.flock(folder, fcntl.LOCK_EX)\n",
        "",
        ["tests/cli/test_user.py"],
    ),
    Mutant(
        "link-replaced-by-the-file-of-users",
        "a symbolic link to the file of users stays one",
        "tfmq/access/users.py",
        "    path = os.path.realpath(path)",
        "    path = os.path.abspath(path)",
        ["tests/cli/test_user.py"],
    ),
    Mutant(
        "password-echoed",
        "a password is asked for without an echo",
        "tfmq/cli/user.py",
        'getpass.getpass("Password: ")',
        'input("Password: ")',
        ["tests/cli/test_user.py"],
    ),
    Mutant(
        "wait-of-a-busy-broker-ignored",
        "after Busy with wait_ms a client waits so long",
        "tfmq/backoff.py",
        "    return max(seconds, min(error.wait_ms / 1000, BUSY_WAIT_SECONDS_MAX))\n",
        "    return seconds\n",
        ["tests/test_backoff.py"],
    ),
    Mutant(
        "send-waits-beyond-its-timeout",
        "a send that cannot wait so long fails in its time",
        "tfmq/client/send/partition_sender.py",
        "min(asked, self.in_flight[0].deadline - self._accumulator.now())",
        "asked",
        ["tests/client/send/test_partition_sender.py"],
    ),
    Mutant(
        "fetch-ignores-the-wait",
        "a consumer whose fetch is refused as busy waits so long, and goes on",
        "tfmq/client/consumer/fetcher.py",
        "now + pause_seconds(error, pause)",
        "now + pause",
        ["tests/client/consumer/test_fetcher.py"],
    ),
)
