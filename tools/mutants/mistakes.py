"""Plausible mistakes at lines of code: which lines can have one, which mistakes those are, and the text with one in it.

A mistake is what passes a reviewer: a comparison that is off by one, a clause or a check that is missing, a wrong
argument, key or constant. Texts, signatures, imports, log calls, assertions and `__repr__` are left alone.
"""

from __future__ import annotations

import ast
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

PACKAGES = ("journal", "tfmq", "pyspark_tfmq")
LEFT_ALONE = ("__repr__", "__str__")
LOG_METHODS = ("debug", "info", "warning", "error", "critical", "exception", "log", "print", "echo")
SELDOM = ("arguments swapped", "wrong argument", "wrong constant")
"""Where a line can have another mistake that is the likelier one: the types or the first run see these."""
LARGE = 10
"""Constants from here on are wrong by a factor, smaller ones by one."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """Bytes `begin` to `end` of `file` become `text`; `line` is where that begins."""

    file: str
    line: int
    kind: str
    begin: int
    end: int
    old: str
    text: str

    def applied(self, source: bytes) -> bytes:
        """The file with the mistake in it."""
        if source[self.begin : self.end].decode() != self.old:
            raise ValueError(f"{self.file} is another one: the mistake at line {self.line} does not fit")
        return source[: self.begin] + self.text.encode() + source[self.end :]


class Finder(ast.NodeVisitor):
    """Gathers the mistakes that a module's code can have."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mistake] = []
        self._names: list[str] = []
        """The parameters of the function that is looked at."""
        self._depth = 0

    def _offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def _text(self, node: ast.expr | ast.stmt) -> str:
        begin, end = self._span(node)
        return self.source[begin:end].decode()

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        begin, end = self._span(node)
        self._put(kind, begin, end, text)

    def _put(self, kind: str, begin: int, end: int, text: str) -> None:
        old = self.source[begin:end].decode()
        if text != old:
            line = bisect_right(self.starts, begin)
            self.found.append(Mistake(self.file, line, kind, begin, end, old, text))

    # What is not looked into.

    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Raise(self, node: ast.Raise) -> None:
        """What it says is text; whether it is raised is not."""
        if node.exc is not None:
            self._add("check removed", node, "pass")
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self.OUTCOMES:
                self._add("wrong outcome", part, self.OUTCOMES[part.id])

    OUTCOMES: ClassVar = {"UNKNOWN": "NOT_DONE", "NOT_DONE": "UNKNOWN"}

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._statements(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in LEFT_ALONE or any("overload" in ast.unparse(d) for d in node.decorator_list):
            return
        outside, arguments = self._names, node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        self._names = [each.arg for each in every if each.arg not in ("self", "cls")]
        self._depth += 1
        self._statements(node.body)
        self._depth -= 1
        self._names = outside

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_Module(self, node: ast.Module) -> None:
        self._statements(node.body)

    def _statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)
        for one, other in pairwise(body):
            if self._depth and (_calls(one) or _checks(one)) and (_acts(other) or _checks(other)):
                (begin, middle), (second, end) = self._span(one), self._span(other)
                between = self.source[middle:second].decode()
                self._put("order swapped", begin, end, f"{self._text(other)}{between}{self._text(one)}")

    # Conditions.

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test):
            return
        if all(_tells(statement) for statement in node.body):
            return  # what is in the log
        self._condition(node.test)
        self._statements(node.body)
        self._statements(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._condition(node.test)
        self._statements(node.body)
        self._statements(node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for condition in node.ifs:
            self._condition(condition)
            self._add("condition dropped", condition, "True")

    def _condition(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr | ast.BoolOp):
            self._add("condition negated", node, f"not ({self._text(node)})")
        self.visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("condition negated", node, f"({self._text(node.operand)})")
        elif isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return
        self.visit(node.operand)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for place in range(len(node.values)):
            kept = [self._text(v) for i, v in enumerate(node.values) if i != place]
            word = " and " if isinstance(node.op, ast.And) else " or "
            self._add("clause dropped", node, f"({word.join(f'({text})' for text in kept)})")
        self.generic_visit(node)

    COMPARED: ClassVar[dict[type[ast.cmpop], tuple[str, ...]]] = {
        ast.Lt: ("<=", ">"),
        ast.LtE: ("<", ">"),
        ast.Gt: (">=", "<"),
        ast.GtE: (">", "<"),
        ast.Eq: ("!=",),
        ast.NotEq: ("==",),
        ast.Is: ("is not",),
        ast.IsNot: ("is",),
        ast.In: ("not in",),
        ast.NotIn: ("in",),
    }

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for place, operator in enumerate(node.ops):
            left, right = sides[place], sides[place + 1]
            begin, end = self._span(left)[1], self._span(right)[0]
            between = self.source[begin:end].decode()
            if (
                "\n" in between
                or "#" in between
                or between.strip("() ") not in ("<", "<=", ">", ">=", "==", "!=", "is", "is not", "in", "not in")
            ):
                continue
            for other in self.COMPARED[type(operator)]:
                self._put("comparison", begin, end, between.replace(between.strip("() "), other))
        self.generic_visit(node)

    # Values.

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if value is True or value is False:
            self._add("wrong constant", node, str(not value))
        elif isinstance(value, int) and abs(value) < LARGE:
            self._add("wrong constant", node, str(value + 1))
        elif isinstance(value, int | float) and value:
            self._add("wrong constant", node, f"({self._text(node)} * {LARGE})")

    OPERATORS: ClassVar[dict[type[ast.operator], str]] = {
        ast.Add: "-",
        ast.Sub: "+",
        ast.Mult: "+",
        ast.FloorDiv: "*",
        ast.Div: "*",
        ast.Mod: "//",
        ast.BitOr: "&",
        ast.BitAnd: "|",
        ast.LShift: ">>",
        ast.RShift: "<<",
    }

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = self.OPERATORS.get(type(node.op))
        textual = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
            for side in (node.left, node.right)
        )
        if isinstance(node.op, ast.BitOr) and not self._depth:
            other = None  # a union of types
        if other is not None and not textual:
            begin, end = self._span(node.left)[1], self._span(node.right)[0]
            between = self.source[begin:end].decode()
            sign = between.strip("() \n")
            if sign and not any(c.isalnum() or c in "#'\"" for c in sign):
                self._put("wrong operator", begin, end, between.replace(sign, other))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if isinstance(node.slice, ast.Tuple):
            if self._depth:  # outside of functions it is a type
                self._key(node.slice)
        elif isinstance(node.slice, ast.Slice):
            for bound in (node.slice.lower, node.slice.upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    self._add("off by one", bound, f"{self._text(bound)} + 1")
                elif bound is not None:
                    self.visit(bound)
        else:
            self.visit(node.slice)

    def _key(self, node: ast.Tuple) -> None:
        """A part of a key is forgotten: all that differ in it are one."""
        for part in node.elts:
            if isinstance(part, ast.Name | ast.Attribute):
                self._add("part of a key dropped", part, "0")

    CALLED: ClassVar = {
        "min": "max",
        "max": "min",
        "any": "all",
        "all": "any",
        "popleft": "pop",
        "appendleft": "append",
        "bisect_left": "bisect_right",
        "bisect_right": "bisect_left",
        "floor": "ceil",
        "ceil": "floor",
    }

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if name in LOG_METHODS or name.endswith(("Error", "TypeVar", "cast", "getLogger", "NewType")):
            return
        if name in self.CALLED:
            begin, end = self._span(node.func)
            self._put("wrong function", end - len(name), end, self.CALLED[name])
        if name in ("get", "pop", "setdefault", "add", "discard") and node.args and isinstance(node.args[0], ast.Tuple):
            self._key(node.args[0])
        for keyword in node.keywords:
            if keyword.arg not in (None, "strict"):
                self._dropped(node, keyword)
        for one, other in pairwise(node.args):
            if name != "isinstance" and all(isinstance(each, ast.Name | ast.Attribute) for each in (one, other)):
                begin, end = self._span(one)[0], self._span(other)[1]
                between = self.source[self._span(one)[1] : self._span(other)[0]].decode()
                self._put("arguments swapped", begin, end, f"{self._text(other)}{between}{self._text(one)}")
        for argument in node.args:
            if isinstance(argument, ast.Name) and argument.id in self._names:
                for parameter in self._names:
                    if parameter != argument.id:
                        self._add("wrong argument", argument, parameter)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.visit(node.value)

    def _dropped(self, call: ast.Call, keyword: ast.keyword) -> None:
        """One that the function has a default for: where it has none, any test of the line sees it."""
        begin = self._offset(keyword.lineno, keyword.col_offset)
        end = self._span(keyword.value)[1]
        rest = self.source[end : self._span(call)[1]]
        comma = len(rest) - len(rest.lstrip(b", ")) if rest.lstrip().startswith(b",") else 0
        self._put("argument dropped", begin, end + comma, "")

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
            if name in LOG_METHODS:
                return
            self._add("call removed", node, "pass")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if _acts(node) and not self._in_init(node):
            self._add("assignment removed", node, "pass")
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self.visit(target)
        self.visit(node.value)

    def _in_init(self, node: ast.stmt) -> bool:
        return node.lineno in self.init_lines

    init_lines: frozenset[int] = frozenset()

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("assignment removed", node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("call removed", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add("return removed", node, "pass")
            return
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("return removed", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("return removed", node, "pass")


def _acts(node: ast.stmt) -> bool:
    """It changes what others see: in which order is part of what was meant."""
    if isinstance(node, ast.Expr):
        return _calls(node)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)


def _calls(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _tells(node)


def _tells(node: ast.stmt) -> bool:
    """It is a line in the log, or on a terminal."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return _name_of(node.value.func) in LOG_METHODS


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _checks(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise | ast.Return) and not node.orelse


def mistakes(file: str, source: bytes) -> list[Mistake]:
    """All that a module can have."""
    tree = ast.parse(source)
    finder = Finder(file, source)
    finder.init_lines = frozenset(
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )
    finder.visit(tree)
    return finder.found


def drawn(root: Path, seed: int, count: int) -> Iterator[Mistake]:
    """`count` lines of the product at random, and at each one mistake: first its kind is drawn, then its place."""
    generator = random.Random(f"mistakes/{seed}")
    lines: dict[tuple[str, int], list[Mistake]] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for mistake in mistakes(name, path.read_bytes()):
                lines.setdefault((name, mistake.line), []).append(mistake)
    for place in generator.sample(sorted(lines), count):
        kinds = sorted({mistake.kind for mistake in lines[place]})
        weights = [1 if kind in SELDOM else 3 for kind in kinds]
        kind = generator.choices(kinds, weights)[0]
        yield generator.choice([mistake for mistake in lines[place] if mistake.kind == kind])
