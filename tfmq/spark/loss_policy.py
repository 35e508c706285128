"""The option failOnDataLoss: whether a query stops or continues when messages are lost.

A message is lost to a query if retention, the deletion of the topic or damage removed the message before the query read
it. The planner finds losses before a micro-batch is read; tasks find losses that occur while they read.
"""

from __future__ import annotations

import logging

from tfmq.errors import TfmqError

log = logging.getLogger("tfmq.spark")

LOGGED_LOSSES_MAX = 1000
"""Maximum number of logged losses that are remembered. At this number, all are forgotten, to limit the memory."""


class LossPolicy:
    """Policy for lost messages: if `stops_query`, the query fails; else it continues and logs each loss once."""

    def __init__(self, stops_query: bool) -> None:
        self.stops_query = stops_query
        self._logged: set[str] = set()

    def handle_loss(self, error: TfmqError, continues: str = "") -> None:
        """Raise `error` if the query must stop at losses, else log `error` once.

        The sentence of `error` must say what is lost; this method adds whether the query stops or continues.
        `continues` completes the added sentence "The query continues ..."; by default, "after the lost messages".
        """
        if self.stops_query:
            error.sentence += (
                " The query stops, because failOnDataLoss is true; with false it continues"
                f" {continues or 'after the lost messages'}."
            )
            raise error
        if error.sentence not in self._logged:
            if len(self._logged) >= LOGGED_LOSSES_MAX:
                self._logged.clear()
            self._logged.add(error.sentence)
            log.warning(
                "%s The query continues %s, because failOnDataLoss is false.", error.sentence, continues or "after them"
            )
