"""Planted bugs: programs around consumers: `tfmq run` and its processes, `tfmq dlq redrive`, arguments of a run."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

PROCESSES: Final = "tests/cli/test_worker.py"
REDRIVING: Final = "tests/cli/test_dlq.py"
RUNS: Final = "tests/test_consumer_base.py"


_PROCESSES = "tfmq/cli/worker.py"
_REDRIVING = "tfmq/cli/dlq.py"
_RUNS = "tfmq/consumer_base.py"

PROGRAMS: Final = (
    Mutant(
        "dead-process-stays-dead",
        "a dead process of `tfmq run` is started again",
        _PROCESSES,
        "        slot.start_at = self._clock() + pause\n",
        "        slot.has_ended = True\n",
        [PROCESSES],
    ),
    Mutant(
        "exit-code-lost",
        "the exit code is the one of the processes",
        _PROCESSES,
        "            self._code = self._code or max(0, code)\n",
        "            self._code = 0\n",
        [PROCESSES],
    ),
    Mutant(
        "limit-for-each-store",
        "the limit of a redrive counts over all stores",
        _REDRIVING,
        "            if wish.limit is not None and total.selected >= wish.limit:\n",
        "            if False:\n",
        [REDRIVING],
    ),
    Mutant(
        "unknown-fate-is-success",
        "an unknown outcome is reported, and is not a success",
        _REDRIVING,
        "    return NOT_DONE if total.unsure or total.unsendable or total.foreign else 0\n",
        "    return NOT_DONE if total.unsendable or total.foreign else 0\n",
        [REDRIVING],
    ),
    Mutant(
        "half-a-redrive-says-nothing",
        "an interrupted redrive reports how far it came",
        _REDRIVING,
        "                report_redrive(total, wish, output)\n                is_begun",
        "                is_begun",
        [REDRIVING],
    ),
    Mutant(
        "before-in-any-order",
        'commits="before" requires the order of partitions',
        _RUNS,
        '    if options.commits == "before" and order != "partition":\n',
        '    if options.commits == "before" and order == "none":\n',
        [RUNS, "tests/client/test_acked_run.py::test_before_needs_the_order_of_partitions"],
    ),
    Mutant(
        "one-call-too-few-in-the-store",
        "a message is called `retries` more times",
        _RUNS,
        "        calls_max=options.retries + 1,\n",
        "        calls_max=options.retries,\n",
        [
            "tests/client/worker/test_runner.py::"
            "test_a_failing_message_is_called_again_with_growing_pauses_then_it_is_a_dead_letter"
        ],
    ),
    Mutant(
        "store-without-a-group",
        "a store of dead letters requires a group",
        "tfmq/client/consumer/options.py",
        "    if group is None and where not in (None, DEFAULT_STORE):\n",
        "    if group is None and not where:\n",
        [
            "tests/client/consumer/test_options.py",
            "tests/client/worker/test_runner.py::test_without_a_group_there_is_no_store_and_one_that_is_named_is_refused",
        ],
    ),
    Mutant(
        "docs-of-a-checkout-only",
        "an installed wheel names the location of the pages that its errors refer to",
        "tfmq/cli/main.py",
        "    click.echo(found[0])\n",
        "    click.echo(folders[0])\n",
        ["tests/cli/test_main.py::test_an_installed_wheel_knows_where_its_docs_are"],
    ),
    Mutant(
        "arguments-are-not-described-for-asyncio",
        "all API variants have the same docs",
        "tfmq/client/api_variants.py",
        "        variant.__doc__ = f\"{cleandoc(variant.__doc__ or '')}\\n\\n{cleandoc(other.__doc__ or '')}\"\n",
        "        variant.__doc__ = cleandoc(variant.__doc__ or '')\n",
        ["tests/test_api_variants.py::test_every_argument_has_a_line_of_its_own_in_the_docs"],
    ),
    Mutant(
        "keyword-arguments-are-lost-in-coroutines",
        "a derived method passes all its arguments to the operation",
        "tfmq/client/api_variants.py",
        "        result = await self._driver.run(operation(self._core, *arguments, **named))\n",
        "        result = await self._driver.run(operation(self._core, *arguments))\n",
        ["tests/client/test_api_variants.py::test_a_derived_method_passes_its_arguments_on_and_gives_the_result"],
    ),
    Mutant(
        "another-loop-starts-an-operation",
        "a method that another event loop calls is refused before it changes anything",
        "tfmq/client/drivers/event_loop.py",
        (
            "        if self._current() != self._owner:  # As `check_caller`, inline for speed: each send runs this.\n"
            "            self._check_other_caller()\n"
        ),
        "",
        [
            "tests/testing/test_asyncio_driver.py::test_a_method_that_another_loop_calls_is_refused_and_changes_nothing",
            "tests/testing/test_twisted_driver.py::test_what_another_thread_calls_is_refused_and_changes_nothing",
        ],
    ),
    Mutant(
        "another-operation-in-one-api-variant",
        "the methods of all API variants do the same",
        "tfmq/aio.py",
        "    pause_schedule = awaitable(AdminCore.pause_schedule)\n",
        "    pause_schedule = awaitable(AdminCore.resume_schedule)\n",
        ["tests/test_api_variants.py::test_each_derived_method_runs_the_operation_of_its_name"],
    ),
)
