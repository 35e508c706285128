"""What every test run has in common.

With CI=true a skipped test is a failure, unless its reason begins with "cannot be had here:": what the set-up
should have brought is never missing silently.
"""

import gc
import os
import signal
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.scale import FRACTION, LONG_ONE_IN, SCALE, SEED, seeded
from tests.sound_folders import watched

TESTS = Path(__file__).parent
JVMS = ("tests/spark/", "tests/zookeeper/")
CANNOT_BE_HAD = "cannot be had here:"

STATE = pytest.StashKey[TemporaryDirectory[str]]()
SECONDS_MAX = 3600.0
"""A test of the full counts is no hanging one before: what setup.cfg allows is for the fractions of them."""

settings.register_profile(
    "tfmq",
    deadline=None,
    max_examples=max(10, int(400 * SCALE)),
    derandomize=SCALE < 1,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("tfmq")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # What programs keep by themselves, dead letters, is not to lie among the user's.
    config.stash[STATE] = TemporaryDirectory(prefix="tfmq-tests-", ignore_cleanup_errors=True)
    os.environ["XDG_STATE_HOME"] = config.stash[STATE].name
    # Servers of tests have no HTTP unless the test asks for it: there is one port for the whole machine.
    os.environ["TFMQ_HTTP_LISTEN"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A run in the background of a shell: every program that a test starts would be deaf to Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if SCALE > FRACTION and config.option.timeout is None:
        config.option.timeout = SECONDS_MAX


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Take what the collection has made out of the garbage collection.

    It is some million objects that stay until the end. Each full collection would visit them all: a test that
    collects would take half a second for it.
    """
    gc.disable()
    try:
        if worker := getattr(session.config, "workerinput", None):
            import_tests(int(worker["workerid"].removeprefix("gw")) / worker["workercount"])
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def import_tests(start: float) -> None:
    """Import all test modules, those behind the fraction `start` of them first.

    Before the first run there is no bytecode of them, and pytest takes half a minute to rewrite their assertions.
    Workers that begin at different places read what the others have written. What cannot be imported is reported by
    the collection.
    """
    paths = sorted(TESTS.rglob("test_*.py"))
    first = int(len(paths) * start)
    for path in paths[first:] + paths[:first]:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most tests that are marked `long` to `make test-long`; a seeded few of them run in `make test`.

    Each is drawn by its own name, so that another test changes nothing for it. The tests with a JVM come first, then
    the files of those that are drawn: at the end of the run no worker waits for a long one. A run of named files or
    tests has all of them.
    """
    if SCALE > FRACTION or any("::" in argument or argument.endswith(".py") for argument in config.args):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    left = {item for item in long if seeded("long", item.nodeid).randrange(LONG_ONE_IN)}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    first = {item.path for item in long if item not in left}
    items[:] = sorted(
        (item for item in items if item not in left),
        key=lambda item: (not item.nodeid.startswith(JVMS), item.path not in first),
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """All tests with Spark in one worker, and all with ZooKeeper: a JVM in each would take longer than it saves."""
    return Files(config, log) if SCALE <= FRACTION and config.getvalue("dist") == "loadfile" else None


class Files(LoadFileScheduling):
    """The tests of a file stay together, and so do those of a folder with a JVM."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in JVMS if file.startswith(folder)), file)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[STATE].cleanup()


def pytest_report_header() -> str:
    return f"scale {SCALE:g} of the full counts (TFMQ_TEST_SCALE), seed {SEED} (TFMQ_TEST_SEED)"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An authority for the tests of TLS, a `tests.certificates.Authority`, which only these tests load."""
    from tests.certificates import Authority

    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def impatient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process report after a tenth of a second, not after two, that no server listens."""
    from tfmq.client.connection.connection import ClientConnection

    monkeypatch.setitem(ClientConnection.__init__.__kwdefaults__, "first_connect_timeout", 0.1)


@pytest.fixture(autouse=True)
def _folders_are_sound() -> Generator[None]:
    with watched():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, "pytest.CallInfo[None]", None]:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if CANNOT_BE_HAD not in reason:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, and the set-up should have brought what it wants: {reason}"
