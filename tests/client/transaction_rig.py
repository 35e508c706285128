"""A producer's core on the fake broker, with the verbs of transactions; time moves only where something waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.fake_broker import FakeBroker
from tests.client.producer.test_core import DEFAULTS, CoreRig
from tfmq.client.drivers.driver import CallbackQueue
from tfmq.client.operation import Operation
from tfmq.client.send.batch import Delivery
from tfmq.client.transaction.transaction import TransactionCore
from tfmq.errors import TfmqError
from tfmq.protocol.commands import Transact

TIMEOUT = DEFAULTS["timeout"]


class TransactionRig(CoreRig):
    """`begin`, then `send`, `commit` ... as a face would, without its waiting."""

    def __init__(self, broker: FakeBroker | None = None, **settings: Any) -> None:
        super().__init__({**DEFAULTS, **settings}, broker)
        self.callbacks: CallbackQueue = CallbackQueue()  # type: ignore[assignment]
        self.transactions = self.core.transactions

    def poll_nonblocking(self) -> None:
        self.exchange()

    def begin(self, xid: str | None = None, timeout: float | None = None) -> TransactionCore:
        """One that the broker knows only with an xid."""
        made = self.core.transactions.begin(xid, timeout)
        if xid is not None:
            self.run(made.begin())
        return made

    def send(self, transaction: TransactionCore, payload: Any, topic: str = "orders", **fields: Any) -> Delivery:
        message = self.core.make_message(topic, payload, **fields)
        sending = transaction.send(topic, message, self.core.encode_payload(topic, message))
        delivery: Delivery = self.run(sending)
        return delivery

    def send_many(self, transaction: TransactionCore, payloads: Any, topic: str = "orders") -> Any:
        return self.run(transaction.send_many(topic, payloads))

    def prepare(self, transaction: TransactionCore) -> str:
        return str(self.run(transaction.prepare()))

    def commit(self, transaction: TransactionCore) -> str:
        return str(self.run(transaction.commit()))

    def rollback(self, transaction: TransactionCore) -> str:
        return str(self.run(transaction.roll_back()))

    def leave(self, transaction: TransactionCore, error: BaseException | None = None) -> None:
        self.run(transaction.exit(error))

    def leave_failing(self, transaction: TransactionCore) -> TfmqError:
        """Leave `with`; what it raises."""
        with pytest.raises(TfmqError) as caught:
            self.leave(transaction)
        return caught.value

    def resume(self, xid: str) -> TransactionCore:
        found: TransactionCore = self.run(self.core.transactions.resume(xid))
        return found

    def begun(self, operation: Operation[Any], kind: type) -> Operation[Any]:
        """`operation`, so far that its request of this kind is at the broker."""
        before = len(self.requests(kind))
        while len(self.requests(kind)) == before:
            next(operation)
            self.exchange()
        return operation

    def requests(self, kind: type) -> list[Any]:
        return [each for each in self.broker.requests if isinstance(each, kind)]

    def frames(self) -> list[Transact]:
        return self.requests(Transact)


MEGABYTE = 1 << 20


def large(count: int = 3 * MEGABYTE // 1000) -> list[bytes]:
    """Payloads that outgrow one frame."""
    return [b"%06d" % number + b"x" * 1000 for number in range(count)]
