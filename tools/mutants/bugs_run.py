"""Planted bugs: `run`: the order of messages, how often a handler is called, what a failure causes."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

RUNNING: Final = "tests/client/worker/test_runner.py"
PROCESSED: Final = "tests/client/test_acked_run.py"
QUEUES: Final = "tests/client/worker/test_ordered_queues.py"
BACKOFF: Final = "tests/test_backoff.py"

_RUNNING = "tfmq/client/worker/runner.py"
_QUEUES = "tfmq/client/worker/ordered_queues.py"
_BACKOFF = "tfmq/backoff.py"

LANES_AND_CALLS: Final = (
    Mutant(
        "ordered-queue-continues-after-a-failure",
        "an ordered queue handles one message after the other, and a failed message blocks it",
        _QUEUES,
        "        heapq.heappush(self._retry_heap, (at, next(self._numbers), job.queue))\n",
        "        self._ready.append(job.queue)\n",
        [QUEUES],
    ),
    Mutant(
        "order-by-key-is-no-order",
        "messages of one key are handled one after the other",
        _QUEUES,
        "        return None if key is None else (*partition, key)\n",
        "        return None\n",
        [QUEUES],
    ),
    Mutant(
        "order-by-key-over-partitions",
        "the same key in two partitions is in two ordered queues",
        _QUEUES,
        "        return None if key is None else (*partition, key)\n",
        "        return None if key is None else (key,)\n",
        [QUEUES],
    ),
    Mutant(
        "no-order-is-one-queue",
        "without an order no message waits for another",
        _QUEUES,
        '        if self._order == "none":\n            return None\n',
        '        if self._order == "none":\n            return ()\n',
        [QUEUES],
    ),
    Mutant(
        "one-queue-takes-all-turns",
        "ordered queues are served in turn",
        _QUEUES,
        "        if job_queue.jobs:\n            self._ready.append(job_queue)\n        else:\n",
        "        if job_queue.jobs:\n            self._ready.appendleft(job_queue)\n        else:\n",
        [QUEUES],
    ),
    Mutant(
        "void-message-begins",
        "a message that is void never begins",
        _QUEUES,
        ("            while job_queue.jobs and job_queue.jobs[0].invalid:\n                job_queue.jobs.popleft()\n"),
        "",
        [QUEUES],
    ),
    Mutant(
        "leaving-message-begins",
        "no more messages of a revoked partition begin",
        _QUEUES,
        ("            elif job_queue.jobs[0].revoked:\n                self._revoked.append(job_queue)\n"),
        "",
        [QUEUES],
    ),
    Mutant(
        "paused-queue-forgotten",
        "a partition whose revocation is withdrawn is handled further",
        _QUEUES,
        "                self._revoked.append(job_queue)\n",
        "                pass\n",
        [QUEUES],
    ),
    Mutant(
        "one-retry-too-few",
        "a failing message is called `retries` more times",
        _RUNNING,
        "        if final or job.failures > self._core.options.retries:\n",
        "        if final or job.failures >= self._core.options.retries:\n",
        [f"{RUNNING}::test_without_a_store_a_message_is_called_again_as_often_and_then_its_error_ends_the_run"],
    ),
    Mutant(
        "failure-not-noted",
        "calls are counted in the store, also when a consumer dies",
        _RUNNING,
        (
            "            state = yield from self._retry_store(\n"
            "                lambda: store.record_failure(message, failure, begun=begun, noted=log_if_final)\n"
            "            )\n"
        ),
        (
            "            state = FAILING if job.failures < 6 else (yield from self._retry_store(\n"
            "                lambda: store.record_failure(message, failure, begun=begun, noted=log_if_final)\n"
            "            ))\n"
        ),
        [f"{RUNNING}::test_calls_far_after_the_start_are_noted_over_a_kill_too"],
    ),
    Mutant(
        "calls-of-the-first-messages-not-counted-before",
        "a message that ends its process each time is called a limited number of times",
        _RUNNING,
        "        if store is not None and job.count_before_call and not job.counted:\n",
        "        if store is None and job.count_before_call and not job.counted:\n",
        [f"{RUNNING}::test_what_ends_its_process_each_time_is_not_called_without_end"],
    ),
    Mutant(
        "failing-messages-of-a-killed-consumer-not-looked-up",
        "a failing message of a killed consumer is handled once the next consumer handles it",
        _RUNNING,
        "            job.count_before_call = message.offset in tracker.failing_offsets\n",
        "            job.count_before_call = False\n",
        [f"{RUNNING}::test_what_failed_far_after_the_start_is_handled_when_the_next_consumer_handles_it"],
    ),
    Mutant(
        "success-after-failures-stays-a-failure",
        "a message that succeeds after failures is not a dead letter",
        _RUNNING,
        "            if store is not None and (job.in_store or job.counted):\n",
        "            if store is not None and job.counted:\n",
        [f"{RUNNING}::test_also_far_after_the_start"],
    ),
    Mutant(
        "dead-message-called-once-more",
        "after its last call a message is not called again",
        _RUNNING,
        ("            if state == FAILING:\n                return self._log_retry(job, error)\n"),
        ("            if state:\n                return self._log_retry(job, error)\n"),
        [f"{RUNNING}::test_there_too_it_is_dead_when_its_calls_are_used_up_and_not_called_again"],
    ),
    Mutant(
        "reject-is-retried",
        "Reject makes it a dead letter at once",
        _RUNNING,
        "        elif isinstance(error, Reject | DecodeFailed) or self._at_most_once:\n",
        "        elif isinstance(error, DecodeFailed) or self._at_most_once:\n",
        [f"{RUNNING}::test_reject_makes_it_a_dead_letter_at_once"],
    ),
    Mutant(
        "what-cannot-be-decoded-is-retried",
        "what cannot be decoded is a dead letter at once",
        _RUNNING,
        "        elif isinstance(error, Reject | DecodeFailed) or self._at_most_once:\n",
        "        elif isinstance(error, Reject) or self._at_most_once:\n",
        [f"{RUNNING}::test_what_cannot_be_decoded_is_a_dead_letter_at_once"],
    ),
    Mutant(
        "retry-later-without-its-time",
        "a message that is put off is handled at its time",
        _RUNNING,
        "            later = error.seconds\n",
        "            later = 0.0\n",
        [f"{RUNNING}::test_retry_later_lets_the_queue_go_on_and_brings_it_again_at_its_time"],
    ),
    Mutant(
        "fenced-is-a-failure",
        "Fenced from a handler is not a failure of its message",
        _RUNNING,
        "        if isinstance(error, Fenced) and job.fenced_count < FENCED_RETRIES_MAX:\n",
        "        if isinstance(error, Fenced) and job.fenced_count < 0:\n",
        [f"{RUNNING}::test_fenced_of_a_handler_is_no_failure_of_its_message"],
    ),
    Mutant(
        "store-that-fails-is-passed-over",
        "a store that fails blocks the offset",
        _RUNNING,
        "                    raise\n                tries += 1\n",
        "                    raise\n                return FAILING\n                tries += 1\n",
        [f"{RUNNING}::test_a_store_that_fails_holds_the_offset_and_calls_no_handler_again"],
    ),
    Mutant(
        "without-a-store-the-offset-passes",
        "without a store the error ends the run before the failed message is acked",
        _RUNNING,
        ("            raise error\n        return self._log_retry(job, error)\n"),
        ("            return None\n        return self._log_retry(job, error)\n"),
        [f"{RUNNING}::test_without_a_store_a_message_is_called_again_as_often_and_then_its_error_ends_the_run"],
    ),
    Mutant(
        "dead-letters-are-read-without-their-topic-s-codec",
        "each topic may have its own codec, also for messages that are handled again",
        "tfmq/dead_letters/store.py",
        "whole.message(select_codec(self._codec, whole.topic))",
        "whole.message(None)",
        [f"{RUNNING}::test_each_topic_may_have_a_codec_of_its_own_also_when_it_is_handled_again"],
    ),
    Mutant(
        "one-codec-for-all-topics",
        "a topic without a configured codec has none",
        "tfmq/codecs.py",
        "    return codec.get(topic) if isinstance(codec, Mapping) else codec\n",
        "    return next(iter(codec.values())) if isinstance(codec, Mapping) else codec\n",
        [f"{RUNNING}::test_each_topic_may_have_a_codec_of_its_own_also_when_it_is_handled_again"],
    ),
    Mutant(
        "traceback-not-logged",
        "a failed call is logged with its traceback",
        "tfmq/client/worker/listeners.py",
        "    exc_info = _exc_info(cause) if tracebacks else None\n",
        "    exc_info = None\n",
        [f"{RUNNING}::test_the_traceback_of_each_failed_call_is_logged_and_begins_at_the_handler"],
    ),
    Mutant(
        "traceback-though-switched-off",
        "with tracebacks=False only the class of an error is logged",
        "tfmq/client/worker/runner.py",
        "        log_failure(job.message, error, then, tracebacks=self._tracebacks)\n",
        "        log_failure(job.message, error, then)\n",
        [f"{RUNNING}::test_without_tracebacks_only_the_class_of_an_error_is_logged"],
    ),
    Mutant(
        "payload-in-the-log",
        "the error text of a codec, which may quote a payload, is not logged",
        "tfmq/client/worker/listeners.py",
        "    if error is None or _quotes_payload(error):\n",
        "    if error is None:\n",
        [f"{RUNNING}::test_the_words_of_a_codec_quote_payloads_and_are_not_logged"],
    ),
    Mutant(
        "pauses-do-not-grow",
        "pauses between calls grow",
        _BACKOFF,
        "first * 2.0 ** min(_DOUBLINGS_MAX, max(0, failures - 1))",
        "first * failures",
        [BACKOFF],
    ),
    Mutant(
        "pauses-without-an-end",
        "an ordered queue waits for half a minute at most",
        _BACKOFF,
        "    return min(maximum, ",
        "    return max(0.0, ",
        [BACKOFF],
    ),
    Mutant(
        "all-come-back-together",
        "messages that failed together are not all repeated at the same moment",
        _BACKOFF,
        " * (1 + spread)\n",
        "\n",
        [BACKOFF],
    ),
)

RUN_CALLS: Final = LANES_AND_CALLS
