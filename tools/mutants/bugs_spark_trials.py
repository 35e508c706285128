"""Planted bugs: Spark's queries under kills at any moment."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

DRIVERS: Final = "tests/spark/test_drivers.py"
IMPORTS: Final = "tests/test_import.py"
KILLS: Final = "tests/spark/test_kills.py"
SESSION: Final = "tests/spark/test_session.py"
TAP: Final = "tests/spark/test_wiretap.py"
TRIALS: Final = "tests/spark/test_trials.py"

ONCE: Final = "the output of a query equals its input, whatever is killed"
SEEN: Final = "the test rig finds each lost or duplicate row"
READY: Final = "the set-up finds what Spark requires"

SPARK_TRIALS: Final = (
    Mutant(
        "each-attempt-is-another-group",
        ONCE,
        "tfmq/spark/sinks.py",
        '        member = CommitMember(commit_group_name("stream", query, self.settings.topic), batch, self.run_id)\n',
        (
            '        member = CommitMember(commit_group_name("stream", query + self.run_id,'
            " self.settings.topic), batch, self.run_id)\n"
        ),
        [f"{TRIALS}::test_a_driver_that_is_killed_around_its_commit_goes_on_from_its_checkpoint"],
    ),
    Mutant(
        "commit-names-half-of-the-members",
        ONCE,
        "tfmq/spark/sink_task.py",
        "    names = [name for each in found for name in each.transactions]\n",
        "    names = [name for each in found[:2] for name in each.transactions]\n",
        [f"{TRIALS}::test_a_task_that_fails_once_is_done_again"],
    ),
    Mutant(
        "rig-counts-to-two",
        SEEN,
        "tools/rigs/spark.py",
        "enumerate(times) if count > 1]",
        "enumerate(times) if count > 2]",
        [f"{KILLS}::test_the_rig_sees_a_sink_that_lies"],
    ),
    Mutant(
        "rig-misses-what-is-lost",
        SEEN,
        "tools/rigs/spark.py",
        "        if lost:\n",
        "        if len(lost) > 1:\n",
        [f"{KILLS}::test_the_rig_sees_a_sink_that_lies"],
    ),
    Mutant(
        "killed-drivers-leave-their-workers",
        SEEN,
        "tools/rigs/live_driver.py",
        "        while left := processes_of(process.pid, zombies=False):\n",
        "        while left := []:\n",
        [f"{TRIALS}::test_a_driver_that_is_killed_around_its_commit_goes_on_from_its_checkpoint"],
    ),
    Mutant(
        "rows-are-compared-as-sets",
        SEEN,
        "tests/spark/drivers.py",
        "    lost, more = wanted - found, found - wanted\n",
        "    lost, more = Counter(set(wanted) - set(found)), Counter(set(found) - set(wanted))\n",
        [f"{DRIVERS}::test_rows_are_compared_one_by_one"],
    ),
    Mutant(
        "swallowed-frames-go-on",
        SEEN,
        "tests/spark/wiretap.py",
        '        return "cut" not in verdicts\n',
        "        return True\n",
        [TAP],
    ),
    Mutant(
        "any-java-will-do",
        READY,
        "tools/rigs/java.py",
        "        if java.exists() and release(java) >= RELEASE_MIN:\n",
        "        if java.exists():\n",
        [f"{SESSION}::test_an_older_java_is_no_java"],
    ),
    Mutant(
        "command-line-loads-numpy",
        "an installation without Spark lacks nothing else",
        "tfmq/cli/output.py",
        "import base64\n",
        "import base64\nimport numpy  # noqa: F401\n",
        [f"{IMPORTS}::test_nothing_but_the_pipeline_loads_what_the_pipeline_needs"],
    ),
)
