"""Planted bugs: the marker `tfmq_faults`: a fault that is not injected, a failure that is not reported."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

TRIAL: Final = "tests/testing/test_fault_runs.py"
MARKER: Final = "tests/testing/test_fault_runs.py"
PLUGIN: Final = "tests/testing/test_plugin.py"
TAKEOVER: Final = "tests/testing/test_fault_runs.py"

_TRIAL = "tfmq/testing/fault_runs.py"
_MARKER = "tfmq/testing/fault_runs.py"
_TAKEOVER = "tfmq/testing/fault_runs.py"

ACCIDENTS: Final = (
    Mutant(
        "crash-that-does-not-happen",
        "a crash loses the request and everything that was not durable",
        _TRIAL,
        ("        if self._simulation.server.running:\n            self._crash_broker()\n"),
        "",
        [TRIAL],
    ),
    Mutant(
        "reply-that-is-not-lost",
        "a lost reply is the reply to a request that was executed",
        _TRIAL,
        '        self._session.transport.cut_off("a test lost the reply")\n',
        "",
        [TRIAL],
    ),
    Mutant(
        "rebalance-that-does-not-happen",
        "a rebalance revokes all partitions for a moment",
        _TRIAL,
        "            self._simulation.call_soon(partial(self._expire_groups, foreign=True))\n",
        "",
        [TRIAL, MARKER],
    ),
    Mutant(
        "duplicate-that-does-not-happen",
        "messages that were handed out and not committed are delivered again",
        _TRIAL,
        ("            self.happened = True\n            self._expire_groups(foreign=False)\n"),
        "            self.happened = True\n",
        [TRIAL, MARKER],
    ),
    Mutant(
        "first-step-only",
        "a fault is injected at every step",
        _TRIAL,
        "        return [InjectedFault(kind, step) for kind in kinds for step in steps[kind]]\n",
        "        return [InjectedFault(kind, step) for kind in kinds for step in steps[kind][:1]]\n",
        [TRIAL],
    ),
    Mutant(
        "administrators-meet-faults",
        "requests that arrange a test meet no faults",
        _TRIAL,
        ("        if type(request) in EXEMPT_COMMANDS:\n            return reply\n"),
        "",
        [f"{TRIAL}::test_what_a_test_arranges_is_no_step_and_meets_no_accident"],
    ),
    Mutant(
        "stranger-stays",
        "the extra member of a rebalance gives the partitions back at once",
        _TAKEOVER,
        '        engine.handle(LeaveGroup(name, FOREIGN_MEMBER, member.joined), b"", session, session)\n',
        "",
        [TAKEOVER, TRIAL],
    ),
)

TOLD: Final = (
    Mutant(
        "broken-run-passes",
        "a test passes if every run of it does",
        _MARKER,
        ("        if not self._failed_faults:\n            return passed\n"),
        ("        if not self._failed_faults or tried:\n            return passed\n"),
        [f"{MARKER}::test_a_handler_that_is_not_idempotent_is_found_out_with_the_fault_and_its_step"],
    ),
    Mutant(
        "accident-not-named",
        "a failure names the fault that broke the test",
        _MARKER,
        '        report.sections.append((MARKER, "\\n  ".join([head, *lines])))\n',
        "",
        [f"{MARKER}::test_a_handler_that_is_not_idempotent_is_found_out_with_the_fault_and_its_step"],
    ),
    Mutant(
        "one-run-is-enough",
        "the test is run once for each fault",
        _MARKER,
        "        for fault in plan:\n",
        "        for fault in plan[:1]:\n",
        [f"{MARKER}::test_a_handler_that_is_not_idempotent_is_found_out_with_the_fault_and_its_step"],
    ),
    Mutant(
        "faults-that-were-not-requested",
        "only the requested faults are injected",
        _MARKER,
        "            possible = fault_run.possible_faults(self._kinds) if plain.passed else []\n",
        "            possible = fault_run.possible_faults(KINDS) if plain.passed else []\n",
        [f"{MARKER}::test_only_the_faults_that_were_asked_for_happen"],
    ),
    Mutant(
        "more-runs-than-were-asked-for",
        "where there are more faults than runs, the faults are spread",
        _MARKER,
        "            plan = sample_faults(possible, self._runs_max)\n",
        "            plan = list(possible)\n",
        [f"{MARKER}::test_more_faults_than_runs_are_spread_and_that_is_said"],
    ),
    Mutant(
        "first-faults-instead-of-spread-ones",
        "the tried faults are spread evenly",
        _MARKER,
        "    return [faults[index * len(faults) // count] for index in range(count)]\n",
        "    return list(faults[:count])\n",
        [f"{MARKER}::test_what_is_tried_is_spread_evenly_and_the_same_each_time"],
    ),
    Mutant(
        "test-without-a-request-says-nothing",
        "a test that no fault can affect is reported",
        _MARKER,
        ("        if possible == 0:\n            self._log_warning("),
        ("        if possible < 0:\n            self._log_warning("),
        [f"{MARKER}::test_a_test_without_a_request_is_reported"],
    ),
    Mutant(
        "other-course-in-silence",
        "a test that does something else in each run is reported",
        _MARKER,
        "        self._not_injected += not fault_run.happened\n",
        "",
        [f"{MARKER}::test_a_program_that_does_something_else_in_each_run_is_reported"],
    ),
    Mutant(
        "wrong-marker-ignored",
        "a wrong marker is an error of its test",
        _MARKER,
        "        pytest.fail(str(error), pytrace=False)\n",
        "        str(error)\n",
        [f"{MARKER}::test_a_wrong_marker_is_an_error_of_its_test"],
    ),
    Mutant(
        "failing-teardown-after-a-fault-passes",
        "a fixture that fails after a fault fails the test",
        _MARKER,
        "        if (report := run.failure()) is not None:\n",
        '        if (report := run.failure()) is not None and report.when == "call":\n',
        [f"{MARKER}::test_a_fixture_that_fails_after_a_fault_fails_the_test"],
    ),
)

FAULT_RUNS: Final = ACCIDENTS + TOLD
