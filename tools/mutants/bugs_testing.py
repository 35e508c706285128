"""Planted bugs: the broker for tests: a test must not pass there although the program is wrong."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

WORLD: Final = "tests/testing/test_simulation.py"
BROKER: Final = "tests/testing/test_broker.py"
DRAINING: Final = "tests/testing/test_drain.py"
LOOPS: Final = "tests/testing/test_asyncio_driver.py"
PLUGIN: Final = "tests/testing/test_plugin.py"
WIRE: Final = "tests/testing/test_wire.py"

TESTING: Final[tuple[Mutant, ...]] = (
    Mutant(
        "time-jumps-to-its-end",
        "timers on the way fire at their time, in order",
        "tfmq/testing/simulation.py",
        "            if due > until:\n",
        "            if True:\n",
        [WORLD],
    ),
    Mutant(
        "a-wait-passes-its-end",
        "simulated time advances to the end of a wait and no further",
        "tfmq/testing/simulation.py",
        "        return now + max(0.0, seconds)\n",
        "        return now + max(0.0, seconds) + 1.0\n",
        [WORLD, BROKER],
    ),
    Mutant(
        "a-wait-without-an-end-moves-time",
        "a wait that nothing can end does not advance time",
        "tfmq/testing/simulation.py",
        "            if not has_own_deadline(client, targets):\n",
        "            if False:\n",
        [WORLD, BROKER],
    ),
    Mutant(
        "an-endless-retry-is-not-ended",
        "a program that retries without end is reported",
        "tfmq/testing/simulation.py",
        (
            "        if self._call_started is not None and now - self._call_started > max(self._longest_wait,"
            " WAIT_SECONDS_MAX):\n"
        ),
        (
            "        if self._call_started is not None and now - self._call_started > 9 * max(self._longest_w"
            "ait, WAIT_SECONDS_MAX):\n"
        ),
        [WORLD],
    ),
    Mutant(
        "other-threads-are-let-in",
        "calls from several threads are refused with a clear error",
        "tfmq/testing/simulation.py",
        "        if threading.get_ident() != self._thread:\n",
        "        if False:\n",
        [WORLD],
    ),
    Mutant(
        "a-power-cut-keeps-everything",
        "a power cut loses what was not durable",
        "tfmq/testing/server.py",
        "self.disk.crash(self._random, keep=keep)",
        'self.disk.crash(self._random, keep="everything")',
        [BROKER],
    ),
    Mutant(
        "a-kill-leaves-the-connections",
        "a power cut breaks every connection",
        "tfmq/testing/server.py",
        ("        self.disconnect()\n        self._discard_state()\n"),
        "        self._discard_state()\n",
        [BROKER, "tests/testing/test_server.py"],
    ),
    Mutant(
        "a-planned-error-is-served-besides",
        "a request with a planned failure is not executed",
        "tfmq/testing/planned_faults.py",
        "        else:\n            reply.error(fault.error)\n",
        ("        else:\n            engine.handle(request, body, ErrorReplacingReply(reply, fault.error), session)\n"),
        [BROKER, "tests/testing/test_planned_faults.py"],
    ),
    Mutant(
        "a-planned-error-stays",
        "as many requests fail as were planned",
        "tfmq/testing/planned_faults.py",
        "        self._planned.remove(fault)\n",
        "",
        [BROKER, "tests/testing/test_planned_faults.py"],
    ),
    Mutant(
        "draining-hides-what-the-handler-raised",
        "exceptions of a handler are raised",
        "tfmq/testing/broker.py",
        "                    handler(message)\n",
        "                    try:\n                        handler(message)\n"
        "                    except Exception:\n                        pass\n",
        [DRAINING],
    ),
    Mutant(
        "draining-stops-before-the-last",
        "a drain handles all messages, and those that the handlers sent",
        "tfmq/testing/broker.py",
        "                continue\n",
        "                return found\n",
        [DRAINING],
    ),
    Mutant(
        "half-a-frame-is-a-frame",
        "only whole frames are handed to a session",
        "tfmq/testing/wire.py",
        "            if len(inbox) < whole:\n",
        "            if len(inbox) < whole - 1:\n",
        [WIRE],
    ),
    Mutant(
        "a-loop-is-idle-at-once",
        "time does not advance while a task has work",
        "tfmq/testing/drivers.py",
        "        if self._turns > IDLE_TURNS:\n",
        "        if True:\n",
        [LOOPS],
    ),
    Mutant(
        "threads-are-not-waited-for",
        "time does not advance while a thread works for a client",
        "tfmq/testing/drivers.py",
        "        if not self._waits or self.thread_count:\n",
        "        if not self._waits:\n",
        [LOOPS],
    ),
    Mutant(
        "the-plugin-loads-the-broker",
        "nothing is imported before a test requests a broker",
        "tfmq/testing/plugin.py",
        "import pytest\n\nif TYPE_CHECKING:\n",
        "import pytest\n\nimport tfmq.testing.broker\n\nif TYPE_CHECKING:\n",
        [PLUGIN],
    ),
    Mutant(
        "the-environment-names-no-broker",
        "every client that a program creates finds the test's broker",
        "tfmq/testing/plugin.py",
        '        monkeypatch.setenv("TFMQ_SERVERS", broker.servers)\n',
        "",
        [PLUGIN],
    ),
    Mutant(
        "a-step-of-the-clock-takes-its-time",
        "setting the clock advances no time",
        "tfmq/testing/clock.py",
        "        self._wall_offset += round(",
        "        self._now += round(",
        ["tests/testing/test_clock.py"],
    ),
    Mutant(
        "only-the-first-partition-is-shown",
        "sent messages of all partitions are returned, in the order of appending",
        "tfmq/testing/broker.py",
        "    streams = [partition_messages(topic, each) for each in partitions]\n",
        "    streams = [partition_messages(topic, each) for each in partitions[:1]]\n",
        ["tests/testing/test_broker.py"],
    ),
    Mutant(
        "an-answer-that-is-lost-was-never-due",
        "a lost reply is the reply to a request that was executed",
        "tfmq/testing/planned_faults.py",
        "            engine.handle(request, body, ErrorReplacingReply(reply, fault.error), session)\n",
        "            reply.error(fault.error)\n",
        ["tests/testing/test_planned_faults.py", BROKER],
    ),
    Mutant(
        "any-word-can-be-made-to-fail",
        "an unknown request name is refused, with a list of the known ones",
        "tfmq/testing/planned_faults.py",
        "        if command.name.lower() == what and command.request.shape is not Hello:\n",
        "        if command.name.lower().startswith(what[:1]):\n",
        ["tests/testing/test_planned_faults.py"],
    ),
)
