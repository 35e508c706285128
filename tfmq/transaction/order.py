"""Epochs by rising number, of which any page can be had without looking at those before it.

Epochs come nearly in order and go in any: a list takes them, those that are gone stay in it until they are half of
it. So adding and removing cost next to nothing, and a page a search and what lies in it.
"""

from bisect import bisect_right, insort
from collections.abc import Container, Iterator
from typing import Final

SLACK: Final = 64
"""So many that are gone are not worth a round of clearing."""


class Order:
    """The epochs that `live` holds. The owner adds each once, and says when one is gone."""

    def __init__(self, live: Container[int]) -> None:
        self._live = live
        self._epochs: list[int] = []
        self._gone = 0

    def add(self, epoch: int) -> None:
        epochs = self._epochs
        if not epochs or epoch > epochs[-1]:
            epochs.append(epoch)
        else:
            insort(epochs, epoch)

    def gone(self) -> None:
        """One of them is in `live` no more."""
        self._gone += 1
        if self._gone > SLACK and 2 * self._gone > len(self._epochs):
            live = self._live
            self._epochs = [epoch for epoch in self._epochs if epoch in live]
            self._gone = 0

    def after(self, epoch: int) -> Iterator[int]:
        """Those above `epoch`. What is added or goes meanwhile may or may not be seen."""
        epochs = self._epochs
        for at in range(bisect_right(epochs, epoch), len(epochs)):
            if epochs[at] in self._live:
                yield epochs[at]
