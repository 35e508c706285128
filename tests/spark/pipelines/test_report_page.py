"""The page: whole in itself, and nothing that users named becomes markup."""

from html.parser import HTMLParser

from tests.spark.pipelines.test_report_plot import EMPTY, FULL
from tfmq.spark.pipelines.report_render import Distribution, GroupLag, draw_topic, render_page


class Reader(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


def test_everything_is_in_the_page_itself() -> None:
    found = read(render_page([FULL, EMPTY], {"orders": b"one", "empty": b"two"}, "png", "127.0.0.1:8367", 0))
    sources = [attributes["src"] for tag, attributes in found.tags if tag == "img"]
    assert sources == ["data:image/png;base64,b25l", "data:image/png;base64,dHdv"]
    assert not [tag for tag, attributes in found.tags if tag in ("script", "link") or "href" in attributes]
    assert {"orders", "empty", "billing", "6 min 40 s", "waiting", "p99.9"} <= set(found.text)


def test_names_of_users_stay_text() -> None:
    group = GroupLag("<script>x", 1, 1.0)
    found = read(
        render_page([FULL._replace(groups=(group,), unborn=7, early=2)], {"orders": b"1"}, "svg", "<b>", 0)
    )
    assert "script" not in [tag for tag, _ in found.tags] and "b" not in [tag for tag, _ in found.tags]
    assert "<script>x" in found.text
    assert (
        "7 messages have no birth time; 2 were appended before their birth time: a clock is wrong."
        in found.text
    )


def test_a_topic_without_births_has_no_latency_instead_of_a_perfect_one() -> None:
    figures = FULL._replace(latencies=Distribution(), unborn=FULL.messages)
    found = read(render_page([figures], {"orders": b"1"}, "png", "127.0.0.1:8367", 0))
    cells = [text for text in found.text if text.strip()]
    first = cells.index("latency, ms") + 1
    assert cells[first : first + 7] == ["-"] * 7
    assert "0 ms" not in cells and cells.count("-") == 7 + 2


def test_a_lag_that_nobody_can_tell_is_told_as_such() -> None:
    figures = EMPTY._replace(groups=(GroupLag("lost", -1, 0.0),))
    found = read(render_page([figures], {"empty": draw_topic(figures, "svg")}, "svg", "127.0.0.1:8367", 0))
    assert "unknown" in found.text and "-1" not in found.text
