"""`@pytest.mark.tfmq_faults` in test runs of its own, in this process: who is found out, and by which fault."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import tfmq
import tfmq.aio
import tfmq.testing.broker
from tests import paths
from tfmq.errors import Fenced
from tfmq.testing import fault_runs
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.fault_runs import (
    FOREIGN_MEMBER,
    KINDS,
    FaultRun,
    InjectedFault,
    Step,
    expire_members,
    live_groups,
    remove_foreign_member,
    sample_faults,
)

pytest_plugins = ["pytester"]

PROGRAM = """
import pytest

def program(broker, handle, count=3, **options):
    broker.admin().create_topic("orders")
    producer = broker.producer()
    for number in range(count):
        producer.send("orders", "x", key=str(number)).result()
    with broker.consumer("orders", group="billing", **options) as consumer:
        broker.drain(consumer, handle)

"""
RunInside = Callable[..., Any]


@pytest.fixture
def run_inside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunInside:
    """A run of pytest that has our plug-in and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(test: str, *arguments: str) -> Any:
        pytester.makepyfile(PROGRAM + test)
        return pytester.runpytest_inprocess("-q", "-p", "tfmq.testing.plugin", "-p", "no:cacheprovider", *arguments)

    return run


NOT_IDEMPOTENT = """
@pytest.mark.tfmq_faults
def test_it(tfmq_broker):
    booked = []
    program(tfmq_broker, lambda message: booked.append(message.key))
    assert sorted(booked) == ["0", "1", "2"]
"""


@pytest.mark.long
def test_a_handler_that_is_not_idempotent_is_found_out_with_the_fault_and_its_step(run_inside: Any) -> None:
    done = run_inside(NOT_IDEMPOTENT)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "*without a fault the test passes; here what was handed out and not saved came again at call *,"
            " after request * (*).",
            "Without a fault the test passes. With one it failed in * of * runs, when",
        ]
    )
    assert "the broker crashed when" not in done.stdout.str(), "what the client mends by itself breaks nothing"


@pytest.mark.long
def test_the_same_run_breaks_at_the_same_steps_each_time(run_inside: Any) -> None:
    def said() -> list[str]:
        lines: list[str] = run_inside(NOT_IDEMPOTENT).stdout.str().splitlines()
        return [line for line in lines if line.startswith("  ") or line.startswith("Without a fault")]

    first = said()
    assert first and first == said()


@pytest.mark.long
def test_a_handler_that_is_idempotent_passes_every_run(run_inside: Any) -> None:
    done = run_inside(
        """
runs = []

@pytest.mark.tfmq_faults
def test_it(tfmq_broker, tmp_path):
    booked = {}
    program(tfmq_broker, lambda message: booked.setdefault(message.key, message))
    assert sorted(booked) == ["0", "1", "2"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "seen").touch()
    runs.append(tfmq_broker)

def test_it_was_run_once_for_each_step_with_a_broker_of_its_own():
    assert len(runs) == len(set(map(id, runs))) > 30
"""
    )
    done.assert_outcomes(passed=2)


@pytest.mark.long
def test_only_the_faults_that_were_asked_for_happen(run_inside: Any) -> None:
    crashes = NOT_IDEMPOTENT.replace("tfmq_faults", 'tfmq_faults(faults=("crash", "lost_reply"))')
    run_inside(crashes).assert_outcomes(passed=1)


@pytest.mark.long
def test_a_fault_while_a_consumer_holds_messages_shows_what_it_commits_too_late(run_inside: Any) -> None:
    done = run_inside(
        """
@pytest.mark.tfmq_faults(faults="duplicate")
def test_it(tfmq_broker):
    program(tfmq_broker, lambda message: None)
    with tfmq_broker.consumer("orders", group="mails", commits="manual") as consumer:
        for message in tfmq_broker.drain(consumer):
            consumer.commit(message)
"""
    )
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*Fenced*", "*came again at call*"])


def test_a_test_that_fails_by_itself_says_nothing_of_faults(run_inside: Any) -> None:
    done = run_inside(NOT_IDEMPOTENT.replace('["0", "1", "2"]', '["none"]'))
    done.assert_outcomes(failed=1)
    assert "Without a fault" not in done.stdout.str() and "here the broker" not in done.stdout.str()


def test_a_test_that_is_skipped_is_skipped(run_inside: Any) -> None:
    run_inside("@pytest.mark.tfmq_faults\ndef test_it(tfmq_broker):\n    pytest.skip('today')\n").assert_outcomes(
        skipped=1
    )


def test_more_faults_than_runs_are_spread_and_that_is_said(run_inside: Any) -> None:
    done = run_inside(
        """
runs = []

@pytest.mark.tfmq_faults(runs=5)
def test_it(tfmq_broker):
    runs.append(program(tfmq_broker, lambda message: None))

def test_the_runs():
    assert len(runs) == 1 + 5
"""
    )
    done.assert_outcomes(passed=2, warnings=1)
    done.stdout.fnmatch_lines(["*5 of * faults were tried, evenly spread; runs=* tries all*"])


def test_a_test_without_a_request_is_reported(run_inside: Any) -> None:
    done = run_inside("@pytest.mark.tfmq_faults\ndef test_it(tfmq_broker):\n    pass\n")
    done.assert_outcomes(passed=1, warnings=1)
    done.stdout.fnmatch_lines(["*no fault was possible*"])


def test_a_program_that_does_something_else_in_each_run_is_reported(run_inside: Any) -> None:
    done = run_inside(
        """
runs = []

@pytest.mark.tfmq_faults
def test_it(tfmq_broker):
    runs.append(1)
    if len(runs) == 1:
        program(tfmq_broker, lambda message: None)
"""
    )
    done.assert_outcomes(passed=1, warnings=1)
    done.stdout.fnmatch_lines(["*had no chance: the test did not do the same in every run*"])


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        ("tfmq_faults('crahs')\ndef test_it(tfmq_broker): pass", "*'crahs' is no fault kind of*crash, lost_reply*"),
        ("tfmq_faults(runs=0)\ndef test_it(tfmq_broker): pass", "*runs=0 tries nothing*"),
        ("tfmq_faults(kinds=1)\ndef test_it(tfmq_broker): pass", "*takes faults= (of crash,*"),
        ("tfmq_faults\ndef test_it(): pass", "*takes the fixture tfmq_broker*"),
    ],
)
def test_a_wrong_marker_is_an_error_of_its_test(run_inside: Any, test: str, sentence: str) -> None:
    done = run_inside(f"@pytest.mark.{test}\n")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines([sentence])


def test_fixtures_of_wider_scope_live_over_all_runs_and_end_with_them(run_inside: Any) -> None:
    done = run_inside(
        """
made = []

@pytest.fixture(scope="module")
def wide():
    made.append("begun")
    yield
    made.append("ended")

@pytest.fixture
def narrow():
    made.append("narrow")

@pytest.mark.tfmq_faults(runs=3)
def test_it(tfmq_broker, wide, narrow):
    program(tfmq_broker, lambda message: None)

def test_the_next_one():
    assert made == ["begun", *["narrow"] * 4]
""",
        "-W",
        "ignore",
    )
    done.assert_outcomes(passed=2)


def test_a_fixture_that_fails_after_a_fault_fails_the_test(run_inside: Any) -> None:
    done = run_inside(
        """
@pytest.fixture
def account():
    booked = []
    yield booked
    assert len(booked) == 3

@pytest.mark.tfmq_faults(faults="duplicate")
def test_it(tfmq_broker, account):
    program(tfmq_broker, account.append)
"""
    )
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*came again at call*"])


@pytest.mark.long
def test_the_page_shows_what_is_said_of_its_handler(run_inside: Any) -> None:
    page = (paths.ROOT / "docs" / "testing.md").read_text()
    shown = re.search(r"```py\n(.*?)```.*?```\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    done = run_inside(shown[1])
    done.assert_outcomes(failed=1)
    lines = {unnumbered(line) for line in done.stdout.str().splitlines()}
    assert [line for line in shown[2].splitlines() if unnumbered(line) not in {*lines, "..."}] == []


def unnumbered(line: str) -> str:
    """How many requests a client needs is none of the page's business."""
    return re.sub(r"\b(request|call|in|of) \d+", r"\1 N", line).rstrip()


FIND = """
import tfmq

def keep(broker, handle, **options):
    broker.admin().create_topic("orders")
    broker.producer().send("orders", "x", key="1").result()
    with broker.consumer("orders", group="billing", **options) as consumer:
        for message in broker.drain(consumer):
            handle(message, consumer)

def transact(broker, name, again):
    broker.admin().create_topic("orders")
    producer = broker.producer()
    while True:
        try:
            tx = producer.begin(name)
            tx.send("orders", "x")
            tx.commit()
            break
        except (tfmq.TransactionRolledBack, tfmq.UnknownTransaction):
            if not again:
                raise
    assert len(broker.sent("orders")) == 1

def commit(consumer, message, dropped):
    try:
        consumer.commit(message)
    except tfmq.Fenced:
        if not dropped:
            raise

@pytest.mark.tfmq_faults(faults="{fault}")
def test_it(tfmq_broker):
    {test}
"""
BY_ITS_FAULT = {
    "crash": ("transact(tfmq_broker, 'order-1', again={good})", r"the broker crashed when request \d+ \(\w+\) came"),
    "lost_reply": (
        "transact(tfmq_broker, None, again={good})",
        r"the reply to request \d+ \(\w+\) was lost, with the connection",
    ),
    "duplicate": (
        "booked = []; program(tfmq_broker, lambda message: {good} and message.key in booked or"
        " booked.append(message.key)); assert len(booked) == 3",
        r"what was handed out and not saved came again at call \d+, after request \d+ \(FETCH\)",
    ),
    "rebalance": (
        "keep(tfmq_broker, lambda message, consumer: commit(consumer, message, {good}), commits='manual')",
        r"another member took all partitions for a moment after request \d+ \(FETCH\)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", BY_ITS_FAULT)
def test_each_fault_finds_the_program_that_it_breaks_and_names_the_step(run_inside: Any, fault: str) -> None:
    test, sentence = BY_ITS_FAULT[fault]
    bad, good = (
        FIND.replace("{fault}", fault).replace("{test}", test.replace("{good}", str(each))) for each in (False, True)
    )
    done = run_inside(bad)
    done.assert_outcomes(failed=1)
    assert re.search(f"tfmq_faults: without a fault the test passes; here {sentence}", done.stdout.str())
    run_inside(good).assert_outcomes(passed=1)


def test_what_is_tried_is_spread_evenly_and_the_same_each_time() -> None:
    accidents = [InjectedFault("crash", Step(number, "FETCH", False)) for number in range(10)]
    assert sample_faults(accidents, 10) == accidents
    assert [each.step.request for each in sample_faults(accidents, 4)] == [0, 2, 5, 7]


# Running a test again, whatever else pytest is asked to do with it: what this pytest has for that is all there.

BAD = NOT_IDEMPOTENT.replace("tfmq_faults", "tfmq_faults(faults='duplicate')")
GOOD = """
@pytest.mark.tfmq_faults
def test_good(tfmq_broker):
    booked = set()
    program(tfmq_broker, lambda message: booked.add(message.key), count=1)
    assert booked == {"0"}
"""


def test_this_pytest_has_what_is_needed(request: pytest.FixtureRequest) -> None:
    assert fault_runs.missing_attributes(request.node) == []


def test_a_pytest_that_lacks_something_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "_call_and_report", None)
    item = SimpleNamespace(name="test_it", _initrequest=1, _request=2, funcargs=3)
    with pytest.raises(pytest.fail.Exception) as caught:
        fault_runs.check_rerun(item)
    words = str(caught.value)
    assert f"This pytest ({pytest.__version__}) cannot run test_it again" in words
    assert "it has no _pytest.runner.call_and_report, Function._report_sections." in words


def test_a_marked_test_of_such_a_pytest_fails_and_says_so(run_inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "_call_and_report", None)
    done = run_inside(GOOD)
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*cannot run test_good again: it has no _pytest.runner.call_and_report*"])


@pytest.mark.long
def test_what_is_expected_to_fail_with_a_fault_is_an_expected_failure(run_inside: Any) -> None:
    for strict in (False, True):
        mark = f"@pytest.mark.xfail(strict={strict}, reason='not yet')"
        run_inside(f"{mark}{BAD}").assert_outcomes(xfailed=1)


@pytest.mark.long
def test_what_is_expected_to_fail_and_passes_every_run_is_reported_as_ever(run_inside: Any) -> None:
    run_inside(f"@pytest.mark.xfail{GOOD}").assert_outcomes(xpassed=1)
    strict = run_inside(f"@pytest.mark.xfail(strict=True, reason='not yet'){GOOD}")
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(["*XPASS(strict)*not yet*"])


def test_what_fails_without_a_fault_as_expected_is_not_run_again(run_inside: Any) -> None:
    wrong = GOOD.replace('{"0"}', "None") + "    assert False\n"
    run_inside(f"@pytest.mark.xfail{wrong}").assert_outcomes(xfailed=1)


def test_a_mark_that_skips_it_skips_it(run_inside: Any) -> None:
    run_inside(f"@pytest.mark.skip(reason='today')\n{GOOD.strip()}").assert_outcomes(skipped=1)
    run_inside(f"@pytest.mark.skipif(True, reason='here')\n{GOOD.strip()}").assert_outcomes(skipped=1)


@pytest.mark.long
def test_each_parameter_is_a_test_of_its_own(run_inside: Any) -> None:
    done = run_inside(
        """
@pytest.fixture(scope="module", params=["a", "b"])
def shop(request):
    return request.param

@pytest.mark.parametrize("careful", [True, False], ids=["careful", "careless"])
@pytest.mark.tfmq_faults(faults="duplicate")
def test_it(tfmq_broker, shop, careful):
    booked = set() if careful else []
    add = booked.add if careful else booked.append
    program(tfmq_broker, lambda message: add((shop, message.key)))
    assert len(booked) == 3
""",
        "-v",
    )
    done.assert_outcomes(passed=2, failed=2)
    failed = re.findall(r"^FAILED \S+::test_it\[(\S+)\]", done.stdout.str(), re.MULTILINE)
    assert sorted("-".join(sorted(name.split("-"))) for name in failed) == ["a-careless", "b-careless"]


@pytest.mark.long
def test_in_a_class_with_fixtures_of_the_class(run_inside: Any) -> None:
    run_inside(
        """
made = []

class TestIt:
    @pytest.fixture(scope="class", autouse=True)
    def wide(self):
        made.append("class")

    @pytest.fixture(autouse=True)
    def narrow(self):
        self.booked = set()

    @pytest.mark.tfmq_faults
    def test_good(self, tfmq_broker):
        program(tfmq_broker, lambda message: self.booked.add(message.key), count=1)
        assert self.booked == {"0"}

def test_it_was_made_once():
    assert made == ["class"]
"""
    ).assert_outcomes(passed=2)


def test_the_first_failure_ends_the_run_if_that_is_wanted(run_inside: Any) -> None:
    done = run_inside(BAD + GOOD, "-x")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*stopping after 1 failures*"])


@pytest.mark.long
def test_what_failed_last_can_be_run_alone(run_inside: Any) -> None:
    keep = ("-p", "cacheprovider")
    run_inside(GOOD + BAD, *keep).assert_outcomes(passed=1, failed=1)
    again = run_inside(GOOD + BAD, *keep, "--lf")
    again.assert_outcomes(failed=1)


@pytest.mark.long
@pytest.mark.parametrize(("add", "outcome"), [("append", {"failed": 1}), ("insert_once", {"passed": 1})])
def test_an_asynchronous_one(run_inside: Any, add: str, outcome: dict[str, int]) -> None:
    run_inside(
        f"""
import tfmq.aio

@pytest.fixture
def anyio_backend():
    return "asyncio"

class Books(list):
    def insert_once(self, key):
        if key not in self:
            self.append(key)

@pytest.fixture
async def books():
    return Books()

@pytest.mark.anyio
@pytest.mark.tfmq_faults(faults="duplicate")
async def test_it(tfmq_broker, books):
    async with tfmq.aio.Producer() as producer:
        for number in "012":
            await producer.send("orders", "x", key=number)
    async with tfmq.aio.Consumer(topics="orders", group="billing") as consumer:
        while messages := await consumer.poll(timeout=5):
            for message in messages:
                books.{add}(message.key)
    assert sorted(books) == ["0", "1", "2"]
""",
        "-p",
        "anyio",
    ).assert_outcomes(**outcome)


# Partitions that leave their members, and come back.


def expelled(broker: SimulatedBroker, *, foreign: bool) -> Any:
    """What the broker says of the group while it is so."""
    engine = broker._server.engine
    assert engine is not None
    expire_members(engine, "billing", foreign=foreign)
    broker.settle()
    return engine.broker.group_coordinator.find("billing")


@pytest.mark.parametrize("foreign", [True, False])
def test_what_was_not_saved_comes_again_and_no_member_is_left_over(foreign: bool) -> None:
    with SimulatedBroker({"topics.partitions": 4}) as broker:
        for number in range(8):
            broker.producer().send("orders", "x", key=str(number)).result()
        consumer = broker.consumer("orders", group="billing", commits="manual")
        first = broker.drain(consumer)
        members = expelled(broker, foreign=foreign).members
        assert (FOREIGN_MEMBER in members) is foreign
        if foreign:
            assert len(members[FOREIGN_MEMBER].owned) == 4
        engine = broker._server.engine
        assert engine is not None
        remove_foreign_member(engine, "billing")
        with pytest.raises(Fenced):
            consumer.commit()
        again = broker.drain(consumer)
        assert sorted(message.key or "" for message in again) == sorted(message.key or "" for message in first)
        assert list(engine.broker.group_coordinator.find("billing").members) not in ([], [FOREIGN_MEMBER])  # type: ignore[union-attr]
        consumer.commit()


def test_groups_without_members_have_nothing_to_lose() -> None:
    with SimulatedBroker() as broker:
        engine = broker._server.engine
        assert engine is not None
        broker.producer().send("orders", "x").result()
        with broker.consumer("orders", group="billing") as consumer:
            broker.drain(consumer)
            assert live_groups(engine, ["billing", "mails"]) == ["billing"]
        assert live_groups(engine, ["billing", "mails"]) == []
        expire_members(engine, "mails", foreign=True)
        remove_foreign_member(engine, "mails")
        assert live_groups(engine, ["mails"]) == []


# One run with one accident in it: that it happens at its step, once, and what the program sees of it.


def program(broker: SimulatedBroker) -> list[str]:
    """Sends three, takes them in a group; the texts in the order of handling."""
    producer = broker.producer()
    for number in range(3):
        producer.send("orders", str(number)).result()
    handled: list[str] = []
    with broker.consumer("orders", group="billing") as consumer:
        broker.drain(consumer, lambda message: handled.append(message.text))
    return handled


def undergone(accident: InjectedFault | None = None) -> tuple[FaultRun, list[str], int]:
    """The trial, what was handled, how many messages the topic has in the end."""
    trial = FaultRun(accident)
    with SimulatedBroker() as broker:
        broker.attach_fault_run(trial)
        handled = program(broker)
        return trial, handled, len(broker.sent("orders"))


def test_a_run_without_an_accident_notes_what_could_happen() -> None:
    trial, handled, count = undergone()
    assert (handled, count, trial.happened) == (["0", "1", "2"], 3, False)
    names = [step.name for step in trial.requests]
    assert [step.request for step in trial.requests] == list(range(1, len(names) + 1))
    assert names.count("PRODUCE") == 3 and {"JOIN_GROUP", "FETCH", "COMMIT_OFFSETS"} <= set(names)
    assert not trial.requests[names.index("PRODUCE")].has_members
    assert trial.requests[names.index("FETCH")].has_members
    assert len(trial.possible_faults(["crash"])) == len(names)
    assert 0 < len(trial.possible_faults(["rebalance"])) < len(names)
    assert trial.possible_faults(["duplicate"])


def test_what_a_test_arranges_is_no_step_and_meets_no_accident() -> None:
    trial = FaultRun(InjectedFault("crash", Step(1, "PRODUCE", False)))
    with SimulatedBroker() as broker:
        broker.attach_fault_run(trial)
        with broker.admin() as admin:
            admin.create_topic("orders")
            assert admin.group("billing").generation == 0
        noted = [step.name for step in trial.requests]
        assert not trial.happened and not {"CREATE_TOPIC", "DESCRIBE_GROUP"} & set(noted), noted


def test_two_runs_have_the_same_steps() -> None:
    assert undergone()[0].possible_faults(KINDS) == undergone()[0].possible_faults(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_accident_happens_at_every_step_and_nothing_is_lost(kind: str) -> None:
    doubled = []
    for accident in undergone()[0].possible_faults([kind]):
        trial, handled, count = undergone(accident)
        assert trial.happened and trial.requests[accident.step.request - 1].name == accident.step.name
        assert (set(handled), count) == ({"0", "1", "2"}, 3), str(accident)
        if len(handled) > 3:
            doubled.append(accident)
    assert bool(doubled) is (kind in ("duplicate", "rebalance"))


def test_a_crash_takes_the_request_with_it_and_a_lost_reply_does_not() -> None:
    for kind, goes_on in (("crash", False), ("lost_reply", True)):
        trial = FaultRun(InjectedFault(kind, Step(1, "PRODUCE", False)))
        with SimulatedBroker() as broker:
            broker.producer().send("orders", "x").result()
            broker.attach_fault_run(trial)
            before = broker._server.engine
            delivery = broker._producers[0].send("orders", "y")
            assert trial.happened and trial.requests[0].name == "PRODUCE"
            assert (broker._server.engine is before) is goes_on
            delivery.result()
            assert [message.text for message in broker.sent("orders")] == ["x", "y"]
            served = [step.name for step in trial.requests].count("PRODUCE")
            assert served == 2, "the client sends it again, and the broker knows it where it was done"


def test_asyncio_programs_have_steps_and_accidents_too() -> None:
    async def main() -> list[str]:
        async with tfmq.aio.Producer() as producer, tfmq.aio.Consumer(topics="orders", group="g") as consumer:
            await producer.send("orders", "1")
            found = [message.text for message in await consumer.poll(timeout=60)]
            return found + [message.text for message in await consumer.poll(timeout=60)]

    def handled(accident: InjectedFault | None) -> tuple[FaultRun, list[str]]:
        trial = FaultRun(accident)
        with SimulatedBroker() as broker, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TFMQ_SERVERS", broker.servers)
            broker.attach_fault_run(trial)
            return trial, asyncio.run(main())

    plain, found = handled(None)
    assert found == ["1"]
    accidents = plain.possible_faults(["duplicate"])
    runs = [handled(accident) for accident in accidents]
    assert all(trial.happened for trial, _ in runs)
    assert ["1", "1"] in [texts for _, texts in runs]
