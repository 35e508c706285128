"""Planted bugs: how a run, or a handled loop, ends, and the hooks around each call."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

RUNNING: Final = "tests/client/worker/test_runner.py"
PROCESSED: Final = "tests/client/test_acked_run.py"
TASKS: Final = "tests/client/worker/test_asyncio_runner.py"
DEFERREDS: Final = "tests/client/worker/test_twisted_runner.py"
SIGNALS: Final = "tests/client/worker/test_run_end.py"
HANDLING: Final = "tests/client/worker/test_message_context.py"
LISTENERS: Final = "tests/client/worker/test_listeners.py"
STEERING: Final = "tests/client/worker/test_listeners.py"

_RUNNING = "tfmq/client/worker/runner.py"
_HANDLING = "tfmq/client/worker/message_context.py"
_LISTENERS = "tfmq/client/worker/listeners.py"

ENDS: Final = (
    Mutant(
        "stop-begins-another-message",
        "stop finishes the message in work and begins no other",
        _RUNNING,
        (
            "        while not self.is_stopping:\n"
            "            if core.membership is not None and core.rebalance.has_pending_callbacks:\n"
        ),
        (
            "        while not self.is_stopping or self._queues.has_ready:\n"
            "            if core.membership is not None and core.rebalance.has_pending_callbacks:\n"
        ),
        [f"{PROCESSED}::test_auto_stop_finishes_the_message_in_work_and_begins_no_other"],
    ),
    Mutant(
        "closing-counts-everything-as-processed",
        "at the end only finished messages are committed",
        _RUNNING,
        "        yield from core.close(ack_delivered=False)\n",
        (
            "        core.positions.ack_all()\n"
            "        for ledger in list(core.positions.ack_trackers.values()):\n"
            "            core.positions._advance_acked(ledger.name, ledger.end_position)\n"
            "        yield from core.close(ack_delivered=True)\n"
        ),
        [PROCESSED],
    ),
    Mutant(
        "signal-ignored",
        "a signal ends the run in an orderly way",
        "tfmq/client/worker/runner.py",
        ("        signalled = True\n        log_first_signal(number)\n        stop()\n"),
        ("        signalled = True\n        log_first_signal(number)\n"),
        [SIGNALS],
    ),
    Mutant(
        "second-signal-ignored",
        "a second signal ends at once",
        "tfmq/client/worker/runner.py",
        ("            restore_signal_handlers(former)\n            raise immediate_exit(number)\n"),
        "            return\n",
        [SIGNALS],
    ),
    Mutant(
        "signal-handlers-stay",
        "a run that ended leaves signals as they were",
        "tfmq/client/worker/runner.py",
        "        restore_signal_handlers(former)\n\n",
        "        former.clear()\n\n",
        [SIGNALS],
    ),
    Mutant(
        "asyncio-s-second-signal-ignored",
        "with asyncio, too, a second signal ends at once",
        "tfmq/client/worker/asyncio_runner.py",
        "            self._signal = number\n            for task in self._tasks:\n                task.cancel()\n",
        "            self._signal = number\n",
        [TASKS],
    ),
    Mutant(
        "plain-function-blocks-the-loop",
        "with asyncio plain functions are called in a thread",
        "tfmq/client/worker/asyncio_runner.py",
        "                found = await self._threads.call(partial(self._call_plain_listener, listener, message))\n",
        "                found = self._call_plain_listener(listener, message)\n",
        [TASKS],
    ),
    Mutant(
        "reactor-does-not-wait",
        "a reactor that stops waits until messages in work are finished and committed",
        "tfmq/client/worker/twisted_runner.py",
        '    trigger = reactor.addSystemEventTrigger("before", "shutdown", on_shutdown)\n',
        '    trigger = reactor.addSystemEventTrigger("after", "shutdown", on_shutdown)\n',
        [DEFERREDS],
    ),
    Mutant(
        "workers-in-turn",
        "workers run at the same time",
        "tfmq/client/worker/asyncio_runner.py",
        "                self._tasks = [asyncio.create_task(self._run_worker()) for _ in range(workers)]\n",
        "                self._tasks = [asyncio.create_task(self._run_worker()) for _ in range(1)]\n",
        [TASKS],
    ),
)


LOOPS: Final = (
    Mutant(
        "failing-body-goes-on",
        "in a loop a message whose body raised is returned again before the next one",
        _HANDLING,
        "        core.redeliver_from(message)\n",
        "",
        [HANDLING],
    ),
    Mutant(
        "failing-body-without-end",
        "in a loop a message is called `retries` more times, too",
        _HANDLING,
        "            if final or not redeliverable or calls > options.retries:\n",
        "            if final or not redeliverable or calls > options.retries + 1:\n",
        [HANDLING],
    ),
    Mutant(
        "ctrl-c-is-swallowed-by-handling",
        "an exception that ends the program is not swallowed",
        _HANDLING,
        "        if isinstance(error, Fenced | RetryLater) or not isinstance(error, Exception):\n",
        "        if isinstance(error, Fenced | RetryLater):\n",
        [HANDLING],
    ),
    Mutant(
        "polled-message-that-fails-comes-again",
        "a polled message that fails is a dead letter at once",
        _HANDLING,
        "        redeliverable = core.positions.current is message or core.will_redeliver(message)\n",
        "        redeliverable = True\n",
        [HANDLING],
    ),
    Mutant(
        "before-handle-does-not-count",
        "an exception of before_handle counts as the handler's failure",
        _LISTENERS,
        "            hook.before_handle(message)\n            entered.append(hook)\n",
        "            try:\n                hook.before_handle(message)\n            except Exception:\n"
        "                continue\n            entered.append(hook)\n",
        [RUNNING, LISTENERS],
    ),
    Mutant(
        "after-handle-fails-the-message",
        "an exception of after_handle does not fail the message",
        _LISTENERS,
        '                log.exception("after_handle of %s raised.", type(hook).__name__)\n',
        "                raise\n",
        [RUNNING, LISTENERS],
    ),
    Mutant(
        "hooks-end-in-the-order-in-which-they-began",
        "hooks nest",
        _LISTENERS,
        "        for hook in reversed(entered):\n",
        "        for hook in entered:\n",
        [LISTENERS],
    ),
    Mutant(
        "after-handle-hears-of-no-error",
        "after_handle is given what the handler raised",
        _LISTENERS,
        "                hook.after_handle(message, failure)\n",
        "                hook.after_handle(message, None)\n",
        [LISTENERS],
    ),
    Mutant(
        "second-listener-of-a-topic-wins",
        "a topic has one listener",
        _LISTENERS,
        "        if topic in self._by_topic:\n",
        "        if topic not in self._by_topic and not topic:\n",
        [LISTENERS],
    ),
    Mutant(
        "negative-time-is-put-off",
        "RetryLater takes a time relative to now",
        "tfmq/client/worker/listeners.py",
        'not 0 <= found < float("inf")',
        'not found < float("inf")',
        [STEERING],
    ),
)

RUN_ENDS: Final = ENDS + LOOPS
