"""Access control: checks each request against the rights and quotas of its user before the broker executes it.

`AccessControl.handle` has the arguments of `RequestHandler.handle`, which it wraps. A server without `server.users` has
no access control: then everybody who can connect may do everything.
"""

from __future__ import annotations

import hmac
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from journal.clock import Clock
from tfmq.access.quotas import Usage
from tfmq.access.rights import ADMIN, MONITOR, RULES, SEE, SEE_GROUP, TRANSACTIONS, WRITE, Need, Right
from tfmq.access.scram import Keys, Login, decoys, is_password
from tfmq.access.users import User, check_user_name, load_users
from tfmq.broker.reply import Body, Buffers, Randomness, Reply
from tfmq.errors import BadRequest, Busy, Forbidden, LoginFailed, TfmqError
from tfmq.protocol import commands
from tfmq.protocol.delayed_handle import parse_handle
from tfmq.server.log_lines import BY_PEER

if TYPE_CHECKING:
    from tfmq.broker.broker import Broker

audit = logging.getLogger("tfmq.audit")

Handle = Callable[[Any, Body, Reply, Any], None]
"""The last argument is a session, of `tfmq.broker.reply`, and where there are users also of this module."""

OWNER_COMMANDS: Final = frozenset(
    (
        commands.PrepareTransaction,
        commands.CommitTransaction,
        commands.RollbackTransaction,
        commands.ForgetTransaction,
        commands.DescribeTransaction,
    )
)
"""Commands that name one transaction by `xid` and `epoch`."""
HANDLE_COMMANDS: Final = {
    commands.CancelDelayed: (WRITE,),
    commands.RescheduleDelayed: (WRITE,),
    commands.DescribeDelayed: SEE,
}
"""Commands that name a delayed message by its handle, with the rights for its topic, one of which they need."""

PRODUCER_COMMANDS: Final = frozenset(
    (commands.Produce, commands.SucceedProducer, commands.BeginTransaction, commands.Transact)
)
"""Commands that name a producer id."""
GIVEN_RANGES_MAX: Final = 10_000
"""How many ranges of producer ids are remembered of each user, the newest ones."""

HELD_BYTES_MAX: Final = 64 << 20
"""Memory for sends without acknowledgements that wait because a quota is used up, of all users together."""
PASSWORDS_PER_SECOND: Final = 20
"""How many passwords are checked in a second (HTTP). Each check takes about 5 ms of the broker's thread."""


class Session(Protocol):
    """A client's connection, or a request over HTTP: what access control needs of it."""

    @property
    def account(self) -> Account | None: ...

    @property
    def identity(self) -> str: ...

    def on_close(self, callback: Callable[[], None]) -> None: ...

    def pause_for(self, seconds: float, then: Callable[[bool], None]) -> None: ...

    def end(self) -> None: ...


class Account:
    """A user as the running server knows it: the user's row of the file, and what the user uses, in all sessions."""

    def __init__(self, user: User, clock: Callable[[], float]) -> None:
        self.user = user
        self.usage = Usage(user.quotas, clock)
        self.sessions: set[Session] = set()

    @property
    def name(self) -> str:
        return self.user.name

    def allow(self, need: Need) -> bool:
        return self.user.rights.allow(need)


class GivenIds:
    """The producer ids that were given out since the start, and the user of each. No other user may send with them:
    the broker would take what the other sends for a repetition, or what the owner sends then.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._rows: list[tuple[int, str]] = []
        """For each range its end and its user, in the order of `_starts`."""
        self._counts: dict[str, int] = {}

    def add(self, first: int, count: int, user: str) -> None:
        index = bisect_right(self._starts, first)
        if index and self._rows[index - 1] == (first, user):
            self._rows[index - 1] = (first + count, user)
            return
        self._starts.insert(index, first)
        self._rows.insert(index, (first + count, user))
        self._counts[user] = self._counts.get(user, 0) + 1
        if self._counts[user] > GIVEN_RANGES_MAX:
            self._forget_oldest(user, GIVEN_RANGES_MAX // 10)

    def _forget_oldest(self, user: str, count: int) -> None:
        own = [index for index, (_, name) in enumerate(self._rows) if name == user]
        dropped = set(own[:count])
        kept = [index for index in range(len(self._rows)) if index not in dropped]
        self._starts, self._rows = [self._starts[each] for each in kept], [self._rows[each] for each in kept]
        self._counts[user] -= count

    def user_of(self, producer_id: int) -> str | None:
        """Return the user; None for an id that was given out before the start, or is not remembered any more."""
        index = bisect_right(self._starts, producer_id)
        if not index or producer_id >= self._rows[index - 1][0]:
            return None
        return self._rows[index - 1][1]


class AccessControl:
    """The users of a server, and the checks of their requests.

    `handle`: `RequestHandler.handle`. `broker()` returns the broker, which is asked for topics and transactions.
    """

    def __init__(
        self, path: str, handle: Handle, broker: Callable[[], Broker], clock: Clock, randomness: Randomness
    ) -> None:
        self._path, self._handle, self._broker, self._clock = path, handle, broker, clock
        self._decoy = decoys(randomness(32))
        self._accounts: dict[str, Account] = {}
        self._passwords_second, self._passwords = 0, 0
        self._secret = randomness(32)
        self._given_ids = GivenIds()
        self._held_bytes = 0
        self._checked: dict[str, tuple[Keys, bytes]] = {}
        """User -> the keys and a digest of the last password that was right for them."""

    def load(self) -> None:
        """Read the file of users again, and apply it to open sessions.

        Sessions of users that are gone, or have another password, are closed. Fetches that wait get an empty reply if
        the rights of their user have changed: the client's next one is checked by the new rights. Raises `ConfigError`,
        and changes nothing, if the file cannot be used.
        """
        users = load_users(self._path)
        if os.stat(self._path).st_mode & 0o004:
            audit.warning("%s can be read by every user of this machine: chmod 600 it", self._path)
        for name, account in list(self._accounts.items()):
            user = users.pop(name, None)
            if user is None:
                self._close(account, "the user was removed")
                del self._accounts[name]
                continue
            if user.keys != account.user.keys:
                self._close(account, "the user has another password")
            if user.quotas != account.user.quotas:
                account.usage.set(user.quotas)
            if user.rights.all != account.user.rights.all:
                self._broker().end_parked_fetches(name)
            account.user = user
        self._accounts.update((name, Account(user, self._clock.monotonic)) for name, user in users.items())

    def _close(self, account: Account, why: str) -> None:
        for session in list(account.sessions):
            audit.info("%s: connection closed, because %s", session.identity, why)
            session.end()

    # Logins

    def new_login(self) -> Login:
        return Login(self._find_keys, self._decoy)

    def _find_keys(self, name: str) -> Keys | None:
        account = self._accounts.get(name)
        return None if account is None else account.user.keys

    def admit(self, session: Session, name: str, keys: Keys | None) -> Account:
        """Return the account of a user who has proved the password of `keys`. Raises Busy above the quota of
        connections, LoginFailed if the file of users has other keys since the login began.
        """
        account = self._accounts.get(name)
        if account is None or account.user.keys != keys:
            raise LoginFailed()
        most = account.user.quotas.connections
        if most and len(account.sessions) >= most:
            raise Busy(
                f"The user {name} has as many connections as its quota allows, {most}: close some, or raise the quota:"
                f" `tfmq user quota {name} --connections N`."
            )
        account.sessions.add(session)
        session.on_close(lambda: account.sessions.discard(session))
        return account

    def check_password(self, name: str, password: str) -> Account:
        """Return the account of a user who sent the password itself (HTTP, with TLS or on this machine).

        A password that was right before is compared with its digest. Raises LoginFailed, and Busy with `wait_ms` if too
        many others were checked in this second.
        """
        account = self._accounts.get(name)
        digest = hmac.digest(self._secret, password.encode("utf-8", "replace"), "sha256")
        known = self._checked.get(name)
        if account is not None and known is not None:
            keys, right_digest = known
            if keys == account.user.keys and hmac.compare_digest(right_digest, digest):
                return account
        second = int(self._clock.monotonic())
        if second != self._passwords_second:
            self._passwords_second, self._passwords = second, 0
        self._passwords += 1
        if self._passwords > PASSWORDS_PER_SECOND:
            raise Busy("Too many logins: wait a second.", wait_ms=1000)
        keys = self._decoy(name) if account is None else account.user.keys
        if not is_password(keys, password) or account is None:
            raise LoginFailed()
        self._checked[name] = (keys, digest)
        return account

    def log_failed_login(self, name: str, peer: str) -> None:
        """Write a line to the audit log. A name that is no user name is not shown: it may be a password."""
        try:
            shown = f"the user {check_user_name(name)}"
        except BadRequest:
            shown = "a name that no user can have"
        audit.warning("login of %s from %s failed", shown, peer, extra=BY_PEER)

    # Requests

    def handle(self, request: Any, body: Body, reply: Reply, session: Any) -> None:
        """Execute a request if its user may, with the arguments of `RequestHandler.handle`.

        Replies with Forbidden if a right is missing, with Busy and `wait_ms` if a quota is used up.
        """
        account = session.account
        if not self.check(request, reply, session) or account is None:
            return
        kind = type(request)
        if kind is commands.Metadata and request.topics is None:
            reply = _FilteredReply(reply, partial(_visible_topics, account))
        elif kind is commands.ListGroups:
            reply = _FilteredReply(reply, partial(_visible_groups, account))
        if account.usage.is_limited and kind in CHARGED:
            wait_seconds = account.usage.wait_seconds()
            if wait_seconds > 0 and not (kind is commands.Produce and request.acks == commands.ACKS_NONE):
                reply.error(_quota_error(account, wait_seconds))
                return
            if kind is commands.Fetch:
                reply = _ObservedReply(reply, lambda fields, size: account.usage.take(size, 0))
            else:
                if wait_seconds > 0:
                    self._hold(request, body, reply, session, wait_seconds)
                    return
                account.usage.take(len(body), CHARGED[kind](request))
        if kind is commands.LeaseProducerIds:
            reply = _ObservedReply(reply, lambda fields, size: self._given_ids.add(fields[0], fields[1], account.name))
        elif kind is commands.SucceedProducer:
            reply = _ObservedReply(reply, lambda fields, size: self._given_ids.add(fields[0], 1, account.name))
        self._handle(request, body, reply, session)

    def _hold(self, request: Any, body: Body, reply: Reply, session: Session, seconds: float) -> None:
        """Execute a send without an acknowledgement after this time, and read nothing from the client until then.

        The client expects no reply that could tell it to wait. So that new connections in place of the paused ones do
        not escape the quota, nothing is executed earlier; above HELD_BYTES_MAX in all, such sends are dropped.
        """
        account, size = session.account, len(body)
        dropped = self._held_bytes + size > HELD_BYTES_MAX
        own = b"" if dropped else bytes(body)
        reply.body_done()
        if account is not None and not dropped:
            account.usage.take(size, CHARGED[type(request)](request))
        self._held_bytes += len(own)

        def then(is_open: bool) -> None:
            self._held_bytes -= len(own)
            if is_open and not dropped and self.allows(request, session.account):
                self._handle(request, own, reply, session)
            else:
                reply.ok()  # it is silent

        session.pause_for(seconds, then)

    def check(self, request: Any, reply: Reply, session: Session) -> bool:
        """Return whether the session's user has all rights that the request needs; if not, reply with the error."""
        refusal = self.refusal(request, session)
        if refusal is not None:
            reply.error(refusal)
        return refusal is None

    def refusal(self, request: Any, session: Session) -> TfmqError | None:
        """Return the error with which the request is refused to the session's user, and log it; None if it is not."""
        try:
            missing = self._missing_right(request, session.account)
        except TfmqError as error:
            return error
        return (
            None if missing is None else self.forbid(type(request).__name__, session.account, session.identity, missing)
        )

    def forbid(self, what: str, account: Account | None, identity: str, missing: Need) -> Forbidden:
        """Return the error for a missing right, and log that `what` is refused."""
        audit.warning("%s refused to %s: it needs %s", what, identity, missing, extra=BY_PEER)
        first = str(Right(missing.actions[0], missing.name))
        return Forbidden(f"The user {account.name if account else ''} needs the right {missing}.", right=first)

    def allows(self, request: Any, account: Account | None) -> bool:
        """Return whether the user has all rights that the request needs. Nothing is logged."""
        try:
            return self._missing_right(request, account) is None
        except TfmqError:
            return False

    def _missing_right(self, request: Any, account: Account | None) -> Need | None:
        rule = RULES.get(type(request))
        if rule is None or account is None:
            return Need(("admin",)) if account is None or not account.user.rights.is_admin else None
        for need in rule(request):
            if not account.allow(need):
                return need
        kind = type(request)
        if kind in PRODUCER_COMMANDS:
            owner = self._given_ids.user_of(request.producer_id)
            if owner not in (None, account.name) and owner in self._accounts and not account.user.rights.is_admin:
                return Need((ADMIN,))
        if kind is commands.Produce:
            return None if request.transaction is None else self._not_owned(account, [("", request.transaction)])
        if kind in OWNER_COMMANDS:
            return self._not_owned(account, [(request.xid, request.epoch)])
        if kind is commands.CommitGroup:
            return self._not_owned(account, request.transactions)
        actions = HANDLE_COMMANDS.get(kind)
        if actions is not None:
            # A handle without a topic is one of a deleted topic, or of another broker: the broker does not know it.
            topic = self._broker().topics.by_incarnation(parse_handle(request.handle).log_id >> 24)
            need = Need(actions, topic or "")
            return need if topic is not None and not account.allow(need) else None
        return None

    def _not_owned(self, account: Account, names: Iterable[tuple[str, int]]) -> Need | None:
        """Return the right that is needed, because one of the unfinished transactions belongs to another user."""
        find_user = self._broker().transaction_commands.find_user
        need = Need((TRANSACTIONS,))
        for xid, epoch in names:
            user = find_user(xid, epoch)
            if user is not None and user != account.name and not account.allow(need):
                return need
        return None


class _ObservedReply:
    """Wrapper around a `Reply` that calls `observe(fields, bytes of the body)` before a positive reply."""

    def __init__(self, reply: Reply, observe: Callable[[tuple[Any, ...], int], None]) -> None:
        self._reply, self._observe = reply, observe
        self.body_done, self.error, self.appended = reply.body_done, reply.error, reply.appended

    @property
    def correlation(self) -> int:
        return self._reply.correlation

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        size = len(body) if isinstance(body, bytes | memoryview) else sum(map(len, body))
        self._observe(fields, size)
        self._reply.ok(*fields, body=body)


class _FilteredReply:
    """Wrapper around the `Reply` to a command that lists: `visible(rows)` returns the fields that the user may see."""

    def __init__(self, reply: Reply, visible: Callable[[list[Any]], tuple[Any, ...]]) -> None:
        self._reply, self._visible = reply, visible
        self.body_done, self.error, self.appended = reply.body_done, reply.error, reply.appended

    @property
    def correlation(self) -> int:
        return self._reply.correlation

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        self._reply.ok(*self._visible(fields[0]), body=body)


def _visible_topics(account: Account, rows: list[Any]) -> tuple[Any, ...]:
    return ([row for row in rows if account.allow(Need(SEE, row[0]))],)


def _visible_groups(account: Account, rows: list[Any]) -> tuple[Any, ...]:
    """Return the groups that the user may see, and whether some may be left out."""
    visible = [row for row in rows if account.allow(Need(SEE_GROUP, row["group"]))]
    return visible, not account.allow(Need((MONITOR,)))


def _messages_of(request: commands.Transact) -> int:
    return sum(each.count for each in request.batches)


CHARGED: Final[dict[type[Any], Callable[[Any], int]]] = {
    commands.Produce: lambda request: request.count,
    commands.Transact: _messages_of,
    commands.Fetch: lambda request: 0,
}
"""Commands that quotas count, each with a function that returns how many messages the request sends."""


def _quota_error(account: Account, wait_seconds: float) -> Busy:
    wait_ms = int(wait_seconds * 1000) + 1
    return Busy(f"The user {account.name} has used up its quota: wait {wait_ms} ms.", wait_ms=wait_ms)
