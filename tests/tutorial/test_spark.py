"""The tutorial's counts in Spark: its page can be followed, through the kill that it does."""

from pathlib import Path

import matplotlib
import pytest

from tests.scale import FRACTION, SCALE
from tests.tutorial.pages import Page
from tools.rigs import spark_session

SECONDS = 400.0
QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    if reason := spark_session.missing():
        pytest.skip(reason)
    page = Page("spark.md", tmp_path, SECONDS)
    page.environment |= spark_session.environment(tmp_path)
    page.environment |= {"JDK_JAVA_OPTIONS": QUICK, "MPLCONFIGDIR": matplotlib.get_configdir()}
    page.follow()
    if SCALE > FRACTION:  # the two pipelines at the end start a Spark each
        picture = (tmp_path / "report" / "orders.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
