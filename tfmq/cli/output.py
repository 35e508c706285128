"""Output of the commands: tables, JSON, and progress bars on standard error."""

import base64
import difflib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tfmq.message import BORN_MS_MAX

if TYPE_CHECKING:
    from rich.progress import Progress

    from tfmq.admin import Admin
    from tfmq.client.connection.connection import ClientConnection


Function = TypeVar("Function", bound=Callable[..., Any])
Row = TypeVar("Row")

UNITS = (("y", 31_536_000, "d", 86_400), ("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
"""Units of ages: (unit, seconds, next smaller unit, its seconds). A year has 365 days."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNBROKEN_WIDTH = 26
"""A cell of at most this length is not wrapped in a table: numbers, states, times."""
PIPE_WIDTH = 200
"""Minimum width of a table if the output is no terminal."""
BAR_TEXT_WIDTH = 26
"""Characters beside a progress bar: for the number, the time, and the blanks between them."""
BAR_AFTER_SECONDS = 1.0  # shorter work has no progress bar
CONNECTION_CHECK_SECONDS = 0.5
"""Interval at which a command checks its connection. A loss is reported if the next check finds no connection, too."""
SEPARATOR = "  "
"""Separates the values of a row that is not printed as a table, and indents the row's second and later lines."""


@dataclass(frozen=True, slots=True)
class Output:
    """The output options of a command, and the address of the broker."""

    servers: str | None
    json: bool
    quiet: bool

    @property
    def existing(self) -> str | None:
        """`servers`, for a command that must not create a data folder.

        With the address `file:PATH` a client would create the data folder PATH if it is missing, and start a broker in
        it. So this property raises ConnectionFailed if there is no data folder at PATH.
        """
        from tfmq.client.connection.addresses import data_folder_of as folder_of
        from tfmq.errors import NOT_DONE, ConnectionFailed

        folder = folder_of(self.servers)
        path = None if folder is None else os.path.abspath(os.path.expanduser(folder))
        if path is not None and not (os.path.isdir(path) and os.listdir(path)):
            raise ConnectionFailed(
                f"There is no data folder of a broker at {path}, and nothing was made. The first message makes it:"
                f" tfmq send TOPIC PAYLOAD --servers file:{path}.",
                outcome=NOT_DONE,
                retriable=False,
            )
        return self.servers

    def admin(self, *, may_create: bool = False, reads_standby: bool = False) -> "Admin":
        """Return an admin client. Unless `may_create`, raise ConnectionFailed for `file:PATH` without a data folder.

        `reads_standby`: stay at a standby that serves readers, which answers `topics` and `locate`.
        """
        from tfmq.admin import Admin

        admin = Admin(self.servers if may_create else self.existing)
        admin._driver.link.reads_standby = reads_standby
        return admin

    def info(self, sentence: str) -> None:
        if not (self.quiet or self.json):
            click.echo(sentence, err=True)

    def print_object(self, row: Mapping[str, Any]) -> None:
        """Print one object: as JSON, or its fields in two columns."""
        if self.json:
            click.echo(json_text(row))
        elif not self.quiet:
            cells = [(heading(key), format_cell(value)) for key, value in row.items()]
            print_table(("", ""), cells, header=False)

    def report(self, row: Mapping[str, Any], sentence: str) -> None:
        """Print the result of a change: `row` as JSON, or `sentence` on standard error."""
        if self.json:
            self.print_object(row)
        self.info(sentence)

    def print_array(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Print a long list as one JSON array, one row per line. Each row is printed as soon as it is read."""
        before = "["
        for row in rows:
            click.echo(f"{before}{json_text(row)}", nl=False)
            before = ",\n "
        click.echo("[]" if before == "[" else "]")

    def print_rows(
        self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str, bare: Sequence[str] = ()
    ) -> None:
        """Print a list as one JSON array, or the `columns` of its rows as a table.

        `empty`: sentence that is printed for an empty list. `bare`: columns that are printed without their heading if
        the terminal is too narrow for a table.
        """
        if self.json:
            click.echo(json_text(list(rows)))
        elif not rows:
            self.info(empty)
        elif not self.quiet:
            cells = [[format_cell(row.get(c)) for c in columns] for row in rows]
            print_table([heading(c) for c in columns], cells, bare=[heading(c) for c in bare])


def output_options(command: Function) -> Function:
    """Add the options of every command that connects to a broker; the command gets them as `output`."""
    option = click.option(
        "--servers", metavar="HOST:PORT", help="The broker's address [$TFMQ_SERVERS, else 127.0.0.1:8367]."
    )
    return option(offline_options(command))


ROWS_SHOWN = 100  # default limit of a table; JSON has all rows

rows_option = click.option(
    "-n", "count", type=click.IntRange(min=1), help=f"At most this many [{ROWS_SHOWN} in a table, all in JSON]."
)


PAGE_ROWS = 1_000


def iterate_pages(fetch: Callable[[Any], Sequence[Row]], after: Any, position: str) -> Iterator[Row]:
    """Yield the rows of all pages. `fetch(value)` returns the page after the row whose field `position` has this value.
    `after`: the value for the first page."""
    while True:
        page = fetch(after)
        yield from page
        if len(page) < PAGE_ROWS:
            return
        after = getattr(page[-1], position)


def offline_options(command: Function) -> Function:
    """Add the output options of a command that only reads files; the command gets them as `output`."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @click.option("-q", "--quiet", is_flag=True, help="Print nothing that was not asked for.")
    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool, quiet: bool, servers: str | None = None, **kwargs: Any) -> Any:
        return command(*args, output=Output(servers, as_json, quiet), **kwargs)

    return wrapped  # type: ignore[return-value]


def json_text(value: Any) -> str:
    """Format as JSON on one line; bytes as text if they are UTF-8, else base64."""
    return json.dumps(value, ensure_ascii=False, default=json_default)


def json_default(value: Any) -> Any:
    if not isinstance(value, bytes | bytearray | memoryview):
        return str(value)
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def payload_fields(payload: bytes | None) -> dict[str, str | None]:
    """Return the JSON field of a payload: `payload` with text (None: a tombstone), or `payload_base64` if not UTF-8."""
    if payload is None:
        return {"payload": None}
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def heading(key: str) -> str:
    return key.replace("_", " ")


def confirm(what: str, refused: str, warning: str = "") -> None:
    """Ask on a terminal whether to do `what`; elsewhere raise UsageError, so that no script deletes by accident.

    `refused` is printed if the user declines, such as "not deleted"; the command then ends with exit code 1. `warning`
    is a clause such as "this cannot be undone".
    """
    if not sys.stdin.isatty():
        end = f"; {warning}" if warning else ""
        raise click.UsageError(f"Add --yes to {what}{end}.")
    end = f" {warning[0].upper()}{warning[1:]}." if warning else ""
    if not click.confirm(f"{what[0].upper()}{what[1:]}?{end}", err=True):
        click.echo(refused, err=True)
        raise click.exceptions.Exit(1)


def format_cell(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 1 else f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(format_cell(v) for v in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={format_cell(v)}" for k, v in value.items())
    return str(value)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], header: bool = True, bare: Sequence[str] = ()
) -> None:
    """Print a table with rich. If the output is no terminal, the table has no colours and is never truncated.

    Long texts are wrapped between words; numbers, times and short texts are not wrapped. If the terminal is too narrow
    to print these without wrapping, `print_lines` prints each row instead of the table.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    least, most = [], []
    for number, column in enumerate(columns):
        texts = [row[number] for row in rows]
        least.append(max(map(cell_len, [*column.split(), *unbreakable_parts(texts)]), default=0))
        most.append(max(map(cell_len, [column, *texts]), default=0))
    edges = 2 * len(columns) + 1  # borders and padding of the table
    if sys.stdout.isatty() and sum(least) + edges > console.width:
        print_lines(columns if header else [""] * len(columns), rows, bare, console.width)
        return
    console.width = max(console.width, sum(least) + edges)
    table = Table(show_header=header, box=SIMPLE_HEAD if header else None, padding=(0, 1, 0, 0) if header else (0, 1))
    for column, width in zip(columns, column_widths(least, most, console.width - edges), strict=True):
        table.add_column(column, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    console.print(table)


def unbreakable_parts(texts: Iterable[str]) -> Iterator[str]:
    """Yield the parts of texts that are not wrapped: short texts, and the words of long ones."""
    for text in texts:
        yield from [text] if len(text) <= UNBROKEN_WIDTH else text.split()


def column_widths(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Return column widths with a sum of at most `room`, each between its minimum `least` and useful maximum `most`."""
    found, left = list(least), room - sum(least)
    order = sorted(range(len(least)), key=lambda number: most[number] - least[number])
    for turn, number in enumerate(order):
        more = max(0, min(most[number] - least[number], left // (len(order) - turn)))
        found[number] += more
        left -= more
    return found


def print_lines(columns: Sequence[str], rows: Iterable[Sequence[str]], bare: Sequence[str], width: int) -> None:
    """Print each row as lines of headings and values, without empty values; `width`: columns of the terminal.

    Values of the first column and of the columns in `bare` are printed without a heading.
    """
    from textwrap import wrap

    from rich.cells import cell_len

    for row in rows:
        line = ""
        for number, (column, text) in enumerate(zip(columns, row, strict=True)):
            if text == "-" and number:
                continue
            piece = text if not number or not column or column in bare else f"{column} {text}"
            if line and cell_len(line) + len(SEPARATOR) + cell_len(piece) > width:
                click.echo(line)
                line = SEPARATOR + piece
            else:
                line += SEPARATOR + piece if line else piece
            if cell_len(line) > width and len(text) > UNBROKEN_WIDTH:
                # A word that is longer than a line is not broken, so that users can copy the word.
                lines = wrap(line, width, subsequent_indent=SEPARATOR, break_long_words=False, break_on_hyphens=False)
                line = lines.pop() if lines else ""  # a name may consist of blanks
                click.echo("".join(f"{each}\n" for each in lines), nl=False)
        click.echo(line)


def terminal_width() -> int:
    from rich.console import Console

    return Console(file=sys.stdout).width


def size_text(size_bytes: float) -> str:
    """Format a size: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} TiB"


def age_text(seconds: float) -> str:
    """Format an age in its two largest units: 7500 -> '2 h 5 min'."""
    for unit, size, smaller, part in UNITS:
        if seconds >= size:
            rest = int(seconds % size // part)
            return f"{int(seconds // size):,} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.3g} s" if seconds < 10 else f"{int(seconds)} s"


def time_text(time: "int | datetime | None", exact: bool = False) -> str:
    """Format a time like 2026-11-22 15:05:54 +01:00. Every command-line option for times accepts this format.

    `time`: ms since 1970, formatted as local time; an aware datetime, formatted in its own zone; or None, formatted as
    "-". `exact`: with ms.
    """
    if isinstance(time, int):
        try:
            time = (EPOCH + timedelta(milliseconds=time)).astimezone()
        except (ValueError, OverflowError, OSError):
            return "after the year 9999"
    if time is None:
        return "-"
    unit = "milliseconds" if exact else "seconds"
    clock = time.replace(tzinfo=None).isoformat(" ", unit)
    return f"{clock} {time.isoformat(' ', unit)[len(clock) :]}"


def iso_text(time_ms: int) -> str | None:
    """Format ms since 1970 as ISO 8601 in UTC; None for negative times and after the year 9999."""
    if not 0 <= time_ms <= BORN_MS_MAX:
        return None
    return (EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")


def with_times(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return `row` and a field NAME_at for each of `names`: the ISO time of NAME_ms (ms since 1970), or None for 0."""
    return {**row, **{f"{name}_at": iso_text(row.get(f"{name}_ms") or -1) for name in names}}


def escape_unprintable(text: str) -> str:
    """Escape characters of a foreign text that would control the terminal or break a line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def escape_values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: escape_unprintable(each) if isinstance(each, str) else each for key, each in row.items()}


def with_noun(count: int, one: str, many: str = "") -> str:
    """Format a number with its noun: '1 segment', '2,000 segments'."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean 'orders'?' for the nearest known word, or ""."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


@contextmanager
def progress(
    output: Output, text: str, total: int | None, shares_terminal: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if that is a terminal; yields a function that adds completed items.

    The bar appears only after BAR_AFTER_SECONDS. In a pipeline, another program may soon write its first line to the
    same terminal; if the bar was there already, this line would be appended to it. `shares_terminal`: the command
    itself prints lines or reads input on the terminal meanwhile; then there is no bar.
    """
    if output.quiet or output.json or shares_terminal or not sys.stderr.isatty():
        yield lambda done: None
        return
    bar = make_bar()
    room = max(10, bar.console.width - bar_width(bar.console.width) - BAR_TEXT_WIDTH)
    task = bar.add_task(text if len(text) <= room else f"{text[: room - 1]}…", total=total)
    ended, starts = False, threading.Lock()

    def start() -> None:
        with starts:
            if not ended:
                bar.start()

    timer = threading.Timer(BAR_AFTER_SECONDS, start)
    timer.daemon = True
    if BAR_AFTER_SECONDS:
        timer.start()
    else:
        start()
    try:
        yield lambda done: bar.advance(task, done)
    finally:
        timer.cancel()
        with starts:
            ended = True
            bar.stop()


class ConnectionReport:
    """Prints once per loss of a connection that requests wait for it, and once that it was made again.

    It only reads the state of `link`, so it does not need the driver's lock.
    """

    def __init__(self, link: "ClientConnection") -> None:
        self._link = link
        self._suspected: int | None = None
        """The number of connections so far, if the last check found none; otherwise None."""
        self._lost: int | None = None
        """The number of connections before the loss that was printed and has not ended; otherwise None."""

    def check(self) -> None:
        from tfmq.client.connection.connection import ConnectionState, join_addresses

        # What accepts connections and never answers, such as a port forward, is no broker either.
        disconnected = (ConnectionState.DOWN, ConnectionState.CONNECTING, ConnectionState.GREETING)
        link = self._link
        count = link.connection_count
        if self._lost is not None:
            if count > self._lost:
                click.echo(f"tfmq: connected to the broker at {link.server} again", err=True)
                self._lost = self._suspected = None
            return
        # The first connection is not lost, and a loss for which no request waits is not noticed by the user.
        is_lost = count > 0 and link.state in disconnected and link.has_pending_requests
        if is_lost and count == self._suspected:
            self._lost = count
            servers = join_addresses(link.servers)
            click.echo(f"tfmq: no connection to the broker at {servers}, trying again; stop with Ctrl-C", err=True)
        self._suspected = count if is_lost else None


@contextmanager
def call_repeatedly(pause_seconds: float, action: Callable[[], None], name: str) -> Iterator[None]:
    """Call `action` in a thread called `name` every `pause_seconds`, until the `with` block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(pause_seconds):
            action()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def report_connection(output: Output, link: "ClientConnection") -> Iterator[None]:
    """While the block runs, print on standard error when its connection is lost and when it is made again."""
    if output.quiet:
        yield
        return
    report = ConnectionReport(link)
    try:
        with call_repeatedly(CONNECTION_CHECK_SECONDS, report.check, "tfmq connection report"):
            yield
    finally:
        report.check()


def bar_width(columns: int) -> int:
    return min(40, columns // 3)


def make_bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width(console.width)),
        TextColumn("{task.completed:,.0f}"),
        TimeElapsedColumn(),
    )
    # Other output to standard error is printed above the bar. So is standard output, if it is a terminal.
    return Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
