"""Running a test again, whatever else pytest is asked to do with it: what this pytest has for that is all there."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.testing.test_fault_marker import NOT_IDEMPOTENT
from tests.testing.test_fault_marker import run_inside as run_inside
from tfmq.testing import fault_runs

pytest_plugins = ["pytester"]

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


def test_a_marked_test_of_such_a_pytest_fails_and_says_so(
    run_inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_what_is_expected_to_fail_and_passes_every_run_is_told_as_ever(run_inside: Any) -> None:
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
