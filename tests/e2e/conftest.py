"""A broker of one module's own, and a topic of one test's own."""

from collections.abc import Iterator

import pytest

from tools.rigs.live_server import LiveServer


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A live broker that the tests of a module share; each takes a topic of its own."""
    server = LiveServer(tmp_path_factory.mktemp("broker") / "data")
    server.start()
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """A test that fails before it stops its server leaves none running."""
    before = set(LiveServer.alive)
    yield
    for server in LiveServer.alive - before:
        server.kill()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "").replace(" ", "-")
