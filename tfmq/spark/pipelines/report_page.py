"""A report as one HTML file with everything in it: tables, and the picture of each topic. It asks for nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from tfmq.cli.output import age_text, size_text
from tfmq.dead_letters.model import moment_text
from tfmq.spark.pipelines.report_figures import TopicFigures, lag_text

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2.2em; border-top: 1px solid #cbd2d9; padding-top: 1em; }
table { border-collapse: collapse; margin: 0.8em 0; } caption { text-align: left; font-weight: 600; }
th, td { padding: 0.25em 0.9em; text-align: right; border-bottom: 1px solid #e4e7eb; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; height: auto; } .soft { color: #7b8794; }
"""


def page(
    figures: Sequence[TopicFigures], pictures: Mapping[str, bytes], kind: str, source: str, made_ms: int
) -> str:
    """The page; `pictures` by topic, `kind` png or svg, `source` says where the topics are."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>tfmq report</title>",
        f"<style>{_STYLE}</style></head><body><h1>Topics at {escape(source)}</h1>",
        f"<p class='soft'>made {escape(moment_text(made_ms))}</p>",
        _overview(figures),
    ]
    for each in figures:
        parts.append(_topic(each, pictures[each.topic], kind))
    return "\n".join([*parts, "</body></html>", ""])


def _overview(figures: Sequence[TopicFigures]) -> str:
    head = (
        "topic",
        "messages",
        "payload",
        "messages/s",
        "peak/s",
        "median size",
        "latency p50",
        "latency p99",
        "dead",
    )
    rows = []
    for each in figures:
        row = each.row()
        known = each.latencies.values > 0
        rows.append(
            (
                each.topic,
                f"{each.messages:,}",
                size_text(each.size_bytes),
                f"{row['messages_per_second']:,.1f}",
                f"{row['peak_per_second']:,.1f}",
                size_text(each.sizes.quantile(0.5)),
                f"{each.latencies.quantile(0.5):,} ms" if known else "-",
                f"{each.latencies.quantile(0.99):,} ms" if known else "-",
                f"{each.letters.get('dead', 0):,}",
            )
        )
    return _table("", head, rows)


def _topic(figures: TopicFigures, picture: bytes, kind: str) -> str:
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    data = base64.b64encode(picture).decode()
    name = escape(figures.topic)
    parts = [
        f"<h2 id='{name}'>{name}</h2>",
        f"<img alt='rate, sizes, latencies and dead letters of {name}' src='data:{mime};base64,{data}'>",
        _spreads(figures),
        _table(
            "Partitions",
            ("partition", "messages"),
            [(str(n), f"{c:,}") for n, c in sorted(figures.partitions.items())],
        ),
    ]
    if figures.groups:
        rows = [
            (each.group, lag_text(each.lag), age_text(round(each.age_seconds))) for each in figures.groups
        ]
        parts.append(_table("Groups", ("group", "messages behind", "oldest of them"), rows))
    if figures.letters:
        rows_of_states = [(state, f"{count:,}") for state, count in sorted(figures.letters.items())]
        parts.append(_table("Dead letters", ("state", "letters"), rows_of_states))
    said = []
    if figures.unborn:
        said.append(f"{figures.unborn:,} messages do not say when they were born")
    if figures.early:
        said.append(f"{figures.early:,} were appended before they were born: a clock is wrong")
    if said:
        parts.append(f"<p class='soft'>{'; '.join(said)}.</p>")
    return "\n".join(parts)


def _spreads(figures: TopicFigures) -> str:
    rows = []
    for name, spread in (("payload, bytes", figures.sizes), ("latency, ms", figures.latencies)):
        row = spread.row()
        row.pop("values")
        rows.append((name, *("-" if value is None else f"{value:,}" for value in row.values())))
    head = ("", *(key for key in figures.sizes.row() if key != "values"))
    return _table("Distributions", head, rows)


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{said}<tr>{top}</tr>{body}</table>"
