"""Which expressions of a source tree can be changed, how, and which are drawn."""

import ast
import copy
import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed expression; lines count from 1."""

    file: str
    line: int
    column: int  # in bytes of UTF-8, as `ast` counts
    operator: str
    before: str
    after: str
    first_line: int  # of the statement, without the body of an `if` or a loop
    last_line: int
    at_import: bool

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Return what distinguishes a mutant from all others of a tree."""
        return self.file, self.line, self.column, self.after


def _is_text(node: ast.AST) -> bool:
    return isinstance(getattr(node, "value", None), str) or isinstance(
        node, ast.JoinedStr
    )


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each change of an expression, with the name of its kind."""

    def changed(**fields: object) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS[type(op)]:
                yield "comparison", changed(ops=[other()])
        case ast.BinOp(op=op, left=left, right=right):
            if isinstance(op, ast.Div) and (_is_text(left) or _is_text(right)):
                return  # a path and the name of what is below it
            if type(op) in ARITHMETIC:
                yield "arithmetic", changed(op=ARITHMETIC[type(op)]())
            if isinstance(op, ast.Sub | ast.Div):
                yield "swapped", changed(left=right, right=left)
        case ast.BoolOp(op=op):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "boolean", changed(op=other)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "removed", operand
        case ast.Constant(value=bool(value)):
            yield "constant", changed(value=not value)
        case ast.Constant(value=int(value)) if value > 9:
            yield "constant", changed(value=value * 2)
        case ast.Constant(value=int(value)):
            yield "off by one", changed(value=value + 1)
            yield "off by one", changed(value=value - 1)
        case ast.Constant(value=float(value)):
            yield "constant", changed(value=value * 2 if value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield "call", changed(func=ast.Name(id=CALLS[name]))
        case ast.IfExp(test=test):
            yield "condition", changed(test=ast.UnaryOp(ast.Not(), test))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node's children that may change; no annotations, no f-strings.

    Options of `dataclass` change nothing that a test should see, and Python 3.11 gives
    no positions inside an f-string.
    """
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_option = name == "decorator_list" and "dataclass" in ast.unparse(child)
            if isinstance(child, ast.AST) and not is_option:
                if name not in ("annotation", "returns"):
                    yield child


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    content = source.encode()
    starts = _starts(content)
    mutants = []

    def add(node, kind, after, statement, at_import):
        first = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
        mutant = Mutant(
            file=file,
            line=node.lineno,
            column=node.col_offset,
            operator=kind,
            before=content[first:stop].decode(),
            after=f"({ast.unparse(ast.fix_missing_locations(after))})",
            first_line=statement.lineno,
            last_line=max(last, statement.lineno),
            at_import=at_import,
        )
        mutants.append(mutant)

    def visit(node, statement, at_import):
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.expr):
            for kind, after in changes(node):
                add(node, kind, after, statement, at_import)
        if isinstance(node, ast.If | ast.While) and not re.search(
            "TYPE_CHECKING|__main__", ast.unparse(node.test)
        ):
            after = ast.UnaryOp(ast.Not(), node.test)
            add(node.test, "condition", after, statement, at_import)
        body = getattr(node, "body", []) if isinstance(node, FUNCTIONS) else []
        for child in _children(node):
            is_body = child is body or (isinstance(body, list) and child in body)
            visit(child, statement, at_import and not is_body)

    visit(ast.parse(source), None, True)
    return mutants


def _starts(content: bytes) -> list[int]:
    lengths = map(len, content.splitlines(keepends=True))
    return list(itertools.accumulate(lengths, initial=0))


def apply(source: str, mutant: Mutant) -> str:
    """Return the text of a file with its expression changed."""
    content = source.encode()
    start = _starts(content)[mutant.line - 1] + mutant.column
    stop = start + len(mutant.before.encode())
    return (content[:start] + mutant.after.encode() + content[stop:]).decode()


def is_valid(source: str, mutant: Mutant) -> bool:
    """Return whether a changed file still parses, and as another program."""
    try:
        changed = ast.parse(apply(source, mutant))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def rooms_of(tree: Path) -> dict[str, list[Path]]:
    """Return the source files of each top package."""
    return {
        path.parent.name: sorted(path.parent.rglob("*.py"))
        for path in sorted(tree.glob("*/__init__.py"))
        if path.parent.name != "tests"
    }


def n_code_lines(source: str) -> int:
    """Count the lines that hold code: no blanks, comments or docstrings."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt | ast.expr) and not is_text:
            lines.add(node.lineno)
    return len(lines)


def draw(tree: Path, n_mutants: int, seed: int) -> list[Mutant]:
    """Draw mutants in proportion to lines of code; every room gives three or more."""
    rng, every, drawn = random.Random(seed), functools.cache(mutants_of), []
    sources = {
        (room, str(path.relative_to(tree))): path.read_text(encoding="utf-8")
        for room, paths in rooms_of(tree).items()
        for path in paths
    }
    weights = {key: n_code_lines(source) for key, source in sources.items()}
    for room in sorted({room for room, _ in sources}):
        files = [key for key in sorted(sources) if key[0] == room]
        share = sum(weights[key] for key in files) / sum(weights.values())
        chosen: dict[tuple, Mutant] = {}
        while len(chosen) < max(3, round(n_mutants * share)):
            (key,) = rng.choices(files, [weights[key] for key in files])
            mutants = every(key[1], sources[key])
            kinds = sorted({mutant.operator for mutant in mutants})
            if not kinds:
                continue
            kind = rng.choice(kinds)  # constants would be half of all otherwise
            mutant = rng.choice([m for m in mutants if m.operator == kind])
            if is_valid(sources[key], mutant):
                chosen[mutant.key] = mutant
        drawn += chosen.values()
    rng.shuffle(drawn)
    return drawn
