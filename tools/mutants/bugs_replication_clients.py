"""Planted bugs: clients of a replicated broker: whom they follow, what they repeat, what a standby answers."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

CONNECTION: Final = "tfmq/client/connection/connection.py"
STANDBY: Final = "tfmq/server/standby_handler.py"
FAILOVER: Final = "tests/client/connection/test_failover.py"
CLIENTS: Final = "tests/client/test_failover.py"
HANDLER: Final = "tests/server/test_standby_handler.py"

REPLICATION_CLIENTS: Final = (
    Mutant(
        "standby-taken-for-the-primary",
        "a client leaves a standby",
        CONNECTION,
        'if properties.get("role") == ROLE_STANDBY and not self.accepts_standby:',
        "if False:",
        [FAILOVER],
    ),
    Mutant(
        "named-primary-is-not-tried-first",
        "a client follows the address that a standby names",
        CONNECTION,
        "        if isinstance(error, NotPrimary):\n            named = ",
        "        if False:\n            named = ",
        [FAILOVER],
    ),
    Mutant(
        "a-loop-of-standbys",
        "standbys that name each other are asked once a round",
        CONNECTION,
        "if named is not None and named not in self._tried and named != self._lost_index:",
        "if named is not None:",
        [FAILOVER],
    ),
    Mutant(
        "lost-primary-tried-first",
        "a server whose connection was lost is tried last, whoever names it",
        CONNECTION,
        "            self._lost_index = self._server_index\n",
        "",
        [FAILOVER],
    ),
    Mutant(
        "any-port-is-the-address",
        "a named address is one of the client's only with its port",
        "tfmq/client/connection/addresses.py",
        "(each.host.casefold(), each.port) == wanted",
        "each.host.casefold() == wanted[0]",
        [FAILOVER],
    ),
    Mutant(
        "address-from-a-server-is-not-checked",
        "what a server sends as an address is shown only if it is one",
        CONNECTION,
        'error.primary if is_address(error.primary) else ""',
        "error.primary",
        [FAILOVER],
    ),
    Mutant(
        "refused-request-counts-as-sent",
        "a request that a standby refused was not executed",
        CONNECTION,
        "        pending.send_count -= 1\n        pending.sent = pending.send_count > 0\n",
        "",
        [FAILOVER],
    ),
    Mutant(
        "earlier-attempt-is-forgotten",
        "a refused repeat does not make the first attempt not done",
        CONNECTION,
        "        pending.sent = pending.send_count > 0\n",
        "        pending.sent = False\n",
        [FAILOVER],
    ),
    Mutant(
        "not-primary-reaches-the-caller",
        "a request that a standby refuses goes to the primary",
        CONNECTION,
        "            if isinstance(error, NotPrimary) and not self.accepts_standby:\n"
        "                self._postpone(pending, error)\n"
        "                return\n",
        "",
        [FAILOVER],
    ),
    Mutant(
        "refusals-count-as-answers",
        "a server that refuses every request is asked with pauses",
        CONNECTION,
        "                self._postpone(pending, error)\n",
        "                self._got_response = True\n                self._postpone(pending, error)\n",
        [FAILOVER],
    ),
    Mutant(
        "no-primary-fails-at-once",
        "the first request waits for a failover",
        CONNECTION,
        "patience = max(NO_PRIMARY_SECONDS, self.first_connect_timeout) if is_expected else self.first_connect_timeout",
        "patience = self.first_connect_timeout",
        [FAILOVER],
    ),
    Mutant(
        "missing-address-is-waited-for",
        "a primary that the client has no address of is reported soon",
        CONNECTION,
        "bool(standbys) and not self._is_elsewhere(standbys)",
        "bool(standbys)",
        [FAILOVER],
    ),
    Mutant(
        "dead-machine-is-waited-for",
        "a server that accepts no connection is left",
        CONNECTION,
        "        self._reply_deadline = self.now() + OTHER_SERVER_SECONDS if len(self.servers) > 1 else NEVER\n",
        "        self._reply_deadline = NEVER\n",
        [FAILOVER],
    ),
    Mutant(
        "silent-primary-is-waited-for",
        "a primary that falls silent is left",
        CONNECTION,
        "if self._has_pinged and not self._has_heard and not is_late:",
        "if False:",
        [FAILOVER],
    ),
    Mutant(
        "slow-primary-is-left",
        "a broker that is slow, and answers PING, is not left",
        CONNECTION,
        "if self._has_pinged and not self._has_heard and not is_late:",
        "if not self._has_heard and self._pending:",
        [FAILOVER],
    ),
    Mutant(
        "stopped-program-blames-the-broker",
        "a client that was stopped itself reads first what waits for it",
        CONNECTION,
        "not self._has_heard and not is_late:",
        "not self._has_heard:",
        [FAILOVER],
    ),
    Mutant(
        "broker-without-replicas-is-watched",
        "without replication nothing changes for a client",
        CONNECTION,
        'is_replicated = "role" in self.hello.properties and len(self.servers) > 1',
        "is_replicated = len(self.servers) > 1",
        [FAILOVER],
    ),
    Mutant(
        "transactions-say-synced",
        "a committed transaction is replicated, too",
        "tfmq/client/transaction/transaction.py",
        "self.producer.link.synced_durability)",
        "2)",
        [CLIENTS],
    ),
    Mutant(
        "written-is-said-to-be-replicated",
        "only what is durable is replicated",
        "tfmq/broker/produce.py",
        "self._session.synced_durability if durable else ACKS_WRITTEN",
        "self._session.synced_durability",
        ["tests/broker/test_produce.py"],
    ),
    Mutant(
        "older-clients-get-an-unknown-durability",
        "only a client that knows the durability of replicas is sent it",
        "tfmq/server/session.py",
        "if isinstance(known, list) and commands.FEATURE_REPLICATED in known:",
        "if True:",
        [HANDLER],
    ),
    Mutant(
        "standby-executes",
        "a standby answers nothing else",
        STANDBY,
        "        elif kind is not commands.PromoteReplica:\n",
        "        elif kind is commands.Metadata:\n            reply.ok([])\n"
        "        elif kind is not commands.PromoteReplica:\n",
        [HANDLER],
    ),
    Mutant(
        "anybody-promotes",
        "a promotion needs a right",
        STANDBY,
        "self._access is None or self._access.check(request, reply, session)",
        "True",
        [HANDLER],
    ),
    Mutant(
        "promotion-is-answered-before-it-is-requested",
        "a promotion is answered when the primary will find it",
        STANDBY,
        "            self._promote(requested)\n",
        "            requested(None)\n            self._promote(requested)\n",
        [HANDLER],
    ),
    Mutant(
        "promotion-is-repeated-elsewhere",
        "only the server that was named is promoted",
        "tfmq/client/admin/admin.py",
        "        if len(self._link.servers) != 1:\n            # After",
        "        if False:\n            # After",
        [CLIENTS],
    ),
)
