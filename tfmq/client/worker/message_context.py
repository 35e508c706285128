"""Context manager `message.handling()`: if the body of the `with` statement fails, the message is handled again.

If the body raises an exception, it is suppressed and recorded. After a pause the loop gets the same message again; all
other messages of the loop wait. After the last permitted failure the message becomes a dead letter, or, without a
dead-letter store, the exception is raised. Exceptions that end the program are always raised. A message that `poll`
returned cannot be delivered again in order, so it becomes a dead letter at its first failure.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.message import ReceivedMessage, partition_of
from tfmq.client.operation import Operation, Wait
from tfmq.client.worker.dead_letter_store import EXPIRY_SECONDS, DeadLetterStore, Failure
from tfmq.client.worker.listeners import Reject, RetryLater, handler_context, log_failure
from tfmq.client.worker.runner import FAILING, handler_pause_seconds
from tfmq.errors import DecodeFailed, Fenced, NotAllowed, TfmqError

log = logging.getLogger("tfmq.consumer")


class MessageContextFactory:
    """Creates the contexts of one consumer. `run`: its driver's function that runs an operation. `open_store`: opens
    and returns its dead-letter store, or returns None if it has no store."""

    def __init__(
        self,
        core: ConsumerCore,
        run: Callable[[Operation[Any]], Any],
        open_store: Callable[[], DeadLetterStore | None],
        *,
        wall_clock: Callable[[], float],
        is_async: bool,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.run = run
        self.is_async = is_async
        self.hooks = core.options.hooks
        self._core = core
        self._open_store = open_store
        self._opened = False
        self._store: DeadLetterStore | None = None
        self._wall_clock = wall_clock
        self._chance = chance
        self._tidy_at = float("-inf")
        self._failing_message: tuple[ReceivedMessage[Any], int] | None = None

    def context(self, message: ReceivedMessage[Any], tracebacks: bool) -> LoopMessageContext:
        return LoopMessageContext(self, message, tracebacks)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._opened, self._store = False, None

    def finish_body(
        self, message: ReceivedMessage[Any], error: BaseException | None, tracebacks: bool = True
    ) -> Operation[bool]:
        """Process the end of a `with` body. Return False if its `error` must be raised.

        Raises NotAllowed for `RetryLater`, which only a handler of `run` may raise.
        """
        if error is None:
            if self._failed_calls(message):
                self._failing_message = None
                if self._store is not None:
                    yield from self._store.record_success(message)
            return True
        if isinstance(error, Fenced | RetryLater) or not isinstance(error, Exception):
            if isinstance(error, RetryLater):
                raise NotAllowed("RetryLater belongs to run(): a loop gets no message at a later time.") from error
            return False
        return (yield from self._process_failure(message, error, tracebacks))

    def _process_failure(self, message: ReceivedMessage[Any], error: Exception, tracebacks: bool) -> Operation[bool]:
        """Record an exception of the body, and let the loop get the message again after a pause. Return False if the
        exception must be raised instead."""
        options, core = self._core.options, self._core
        if not self._opened:
            self._store, self._opened = self._open_store(), True
        calls = self._failed_calls(message) + 1
        redeliverable = core.positions.current is message or core.will_redeliver(message)
        final = isinstance(error, Reject | DecodeFailed) or options.commits == "before"
        if self._store is None:
            if final or not redeliverable or calls > options.retries:
                return False
        else:
            failure = Failure.from_exception(error, round(self._wall_clock() * 1000))
            if final or not redeliverable:
                log_failure(message, error, tracebacks=tracebacks)
                yield from self._store.store_letter(message, [failure])
                yield from self._delete_expired_if_due(self._store)
                return True

            def log_if_final(state: str) -> None:
                if state != FAILING:
                    log_failure(message, error, tracebacks=tracebacks)

            state = yield from self._store.record_failure(message, failure, noted=log_if_final)
            yield from self._delete_expired_if_due(self._store)
            if state != FAILING:
                self._failing_message = None
                return True
        self._failing_message = (message, calls)
        pause = handler_pause_seconds(calls, self._chance())
        log_failure(message, error, f"; it is called again in {pause:.1f} s", tracebacks=tracebacks)
        yield Wait((core.stop_requested,), pause)
        core.redeliver_from(message)
        return True

    def _delete_expired_if_due(self, store: DeadLetterStore) -> Operation[None]:
        """Delete expired dead letters, but not again within `EXPIRY_SECONDS`. An error is only logged."""
        now = self._core.link.now()
        if now < self._tidy_at:
            return
        self._tidy_at = now + EXPIRY_SECONDS
        try:
            yield from store.delete_expired()
        except TfmqError as error:
            log.warning("Dead letters that ended long ago could not be deleted yet: %s", error)

    def _failed_calls(self, message: ReceivedMessage[Any]) -> int:
        known, calls = self._failing_message or (message, 0)
        same = partition_of(known) == partition_of(message) and known.offset == message.offset
        return calls if same else 0


class LoopMessageContext:
    def __init__(self, handler: MessageContextFactory, message: ReceivedMessage[Any], tracebacks: bool = True) -> None:
        self._handler = handler
        self._message = message
        self._tracebacks = tracebacks
        self._handler_context = handler_context(message, handler.hooks)

    def __enter__(self) -> LoopMessageContext:
        if self._handler.is_async:
            raise NotAllowed("With an asyncio consumer it is: async with message.handling().")
        self._handler_context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return bool(self._handler.run(self._exit(kind, error, trace))) and error is not None

    async def __aenter__(self) -> LoopMessageContext:
        if not self._handler.is_async:
            raise NotAllowed("With a blocking consumer it is: with message.handling().")
        self._handler_context.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return bool(await self._handler.run(self._exit(kind, error, trace))) and error is not None

    def _exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Operation[bool]:
        """Exit the context of the hooks. Return the operation that processes the end of the body."""
        try:
            self._handler_context.__exit__(kind, error, trace)
        except BaseException as again:
            if again is not error:
                raise
        return self._handler.finish_body(self._message, error, self._tracebacks)
