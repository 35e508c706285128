"""`@pytest.mark.tfmq_faults` in test runs of its own, in this process: who is found out, and by which fault."""

import re
from collections.abc import Callable
from typing import Any

import pytest

import tfmq.testing.broker  # noqa: F401 - before a run inside, which forgets what it has loaded
from tests import paths
from tfmq.testing.fault_runs import InjectedFault, Step, sample_faults

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
        return pytester.runpytest_inprocess(
            "-q", "-p", "tfmq.testing.plugin", "-p", "no:cacheprovider", *arguments
        )

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
            " behind request * (*).",
            "Without a fault the test passes. With one it failed in * of * runs, when",
        ]
    )
    assert "the broker crashed when" not in done.stdout.str(), (
        "what the client mends by itself breaks nothing"
    )


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
    run_inside(
        "@pytest.mark.tfmq_faults\ndef test_it(tfmq_broker):\n    pytest.skip('today')\n"
    ).assert_outcomes(skipped=1)


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


def test_a_test_without_a_request_is_told_so(run_inside: Any) -> None:
    done = run_inside("@pytest.mark.tfmq_faults\ndef test_it(tfmq_broker):\n    pass\n")
    done.assert_outcomes(passed=1, warnings=1)
    done.stdout.fnmatch_lines(["*no fault was possible*"])


def test_a_program_that_does_something_else_in_each_run_is_told_so(run_inside: Any) -> None:
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
        (
            "tfmq_faults('crahs')\ndef test_it(tfmq_broker): pass",
            "*'crahs' is no fault kind of*crash, lost_reply*",
        ),
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


def test_a_fixture_that_fails_behind_a_fault_fails_the_test(run_inside: Any) -> None:
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
    "crash": (
        "transact(tfmq_broker, 'order-1', again={good})",
        r"the broker crashed when request \d+ \(\w+\) came",
    ),
    "lost_reply": (
        "transact(tfmq_broker, None, again={good})",
        r"the reply to request \d+ \(\w+\) was lost, with the connection",
    ),
    "duplicate": (
        "booked = []; program(tfmq_broker, lambda message: {good} and message.key in booked or"
        " booked.append(message.key)); assert len(booked) == 3",
        r"what was handed out and not saved came again at call \d+, behind request \d+ \(FETCH\)",
    ),
    "rebalance": (
        "keep(tfmq_broker, lambda message, consumer: commit(consumer, message, {good}), commits='manual')",
        r"another member took all partitions for a moment behind request \d+ \(FETCH\)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", BY_ITS_FAULT)
def test_each_fault_finds_the_program_that_it_breaks_and_names_the_step(run_inside: Any, fault: str) -> None:
    test, sentence = BY_ITS_FAULT[fault]
    bad, good = (
        FIND.replace("{fault}", fault).replace("{test}", test.replace("{good}", str(each)))
        for each in (False, True)
    )
    done = run_inside(bad)
    done.assert_outcomes(failed=1)
    assert re.search(f"tfmq_faults: without a fault the test passes; here {sentence}", done.stdout.str())
    run_inside(good).assert_outcomes(passed=1)


def test_what_is_tried_is_spread_evenly_and_the_same_each_time() -> None:
    accidents = [InjectedFault("crash", Step(number, "FETCH", False)) for number in range(10)]
    assert sample_faults(accidents, 10) == accidents
    assert [each.step.request for each in sample_faults(accidents, 4)] == [0, 2, 5, 7]
