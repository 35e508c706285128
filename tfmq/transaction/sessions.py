"""Which session began which transaction: so many each at most, and the local ones end with their session.

A session is here only as long as it has transactions.
"""

from tfmq.transaction.requests import Caller


class Sessions:
    """Open transactions by the session that began them."""

    def __init__(self) -> None:
        self._epochs: dict[Caller, dict[int, bool]] = {}
        self._owner: dict[int, Caller] = {}

    def opened(self, session: Caller, epoch: int, *, local: bool) -> None:
        """`local`: the transaction ends when the session does."""
        self._epochs.setdefault(session, {})[epoch] = local
        self._owner[epoch] = session

    def closed(self, epoch: int) -> None:
        """The transaction is open no more: prepared, decided or over. Harmless if it is not known."""
        session = self._owner.pop(epoch, None)
        if session is None:
            return
        epochs = self._epochs[session]
        del epochs[epoch]
        if not epochs:
            del self._epochs[session]

    def count(self, session: Caller) -> int:
        """How many transactions of this session are open."""
        return len(self._epochs.get(session, ()))

    def lost(self, session: Caller) -> list[int]:
        """Forgets the session; the epochs of its local transactions, in the order in which they began."""
        epochs = self._epochs.pop(session, {})
        for epoch in epochs:
            del self._owner[epoch]
        return [epoch for epoch, local in epochs.items() if local]
