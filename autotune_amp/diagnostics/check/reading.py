"""Findings in the user's source that one recorded step cannot show: scalers, clipping, old names. No torch."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from autotune_amp.diagnostics.check import fixes
from autotune_amp.diagnostics.check.findings import CodeLocation, Finding, make_finding
from autotune_amp.precision import rules
from autotune_amp.precision.rules import Severity

_OWN = Path(__file__).parents[2]
_INSTALLED: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OLD = re.compile(r"torch\.(cuda|cpu)\.amp\b")
_CLIPS: Final = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
_WIDTHS: Final = {
    "float16": ("half", "torch.float16", "torch.half"),
    "bfloat16": ("bfloat16", "torch.bfloat16"),
    "float64": ("double", "torch.float64", "torch.double"),
}


class SourceText(NamedTuple):
    """Parsed file of the user. `names` maps each name that the file imports to its full name."""

    file: str
    tree: ast.Module
    names: dict[str, str]

    def called(self, node: ast.AST) -> str:
        """Return the full dotted name that an expression refers to, "" if it is not a name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.names.get(node.id, node.id), *reversed(parts)])

    def place(self, line: int) -> CodeLocation:
        """Return the place of a line of this file."""
        return CodeLocation(file=self.file, line=line)


def sources_of(objects: Iterable[Any]) -> tuple[list[SourceText], tuple[str, ...]]:
    """Return the parsed files that define these classes and functions, and the names of those without source.

    Installed code, such as torch, is left out, since the user cannot fix it.
    """
    sources: dict[str, SourceText] = {}
    unread: dict[str, None] = {}
    for given in objects:
        function = inspect.unwrap(getattr(given, "func", given))  # of a functools.partial
        subject = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
        if getattr(subject, "__module__", "").partition(".")[0] in ("torch", "builtins"):
            continue
        file = _file_of(subject)
        if file is not None and (file in sources or _is_installed(file)):
            continue
        source = None if file is None else _parsed(file)
        if source is None:
            unread[f"{subject.__module__}.{subject.__qualname__}"] = None
        else:
            sources[source.file] = source
    return list(sources.values()), tuple(unread)


def read(source: SourceText) -> Iterator[Finding]:
    """Yield the findings in a file."""
    yield from _old_names(source)
    yield from _scalers(source)
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _clipping(source, node)
    yield from _clipping(source, source.tree)


def of_weights(
    dtype: str, severity: Severity, modules: tuple[str, ...], sources: Iterable[SourceText], makers: Iterable[Any]
) -> Finding:
    """Return the finding that trained weights of `modules` are kept in `dtype`, at the line that asks for this dtype.

    The line is in one of `makers` or a function that it uses, or assigns a maker to its name; otherwise it is the only
    one in any file. If several lines ask for the dtype, any may belong to another workload, and none is named.
    """
    sources = list(sources)
    places = [place for source in sources for place in _mentions(source, dtype)]
    makers = list(makers)
    spans = [_span(function) for maker in makers for function in _reachable(maker)]
    spans += [_assignments(source, maker) for maker in makers for source in sources]
    made = (place for span in spans for place in places if (place.file, place.line) in span)
    place = next(made, places[0] if len(set(places)) == 1 else CodeLocation())
    one = make_finding(
        rules.WEIGHTS,
        place,
        severity,
        why=f"Weights are kept in {dtype}. {rules.WEIGHTS.why}",
        mend=fixes.in_fp32(place.code),
    )
    return replace(one, modules=modules)


def _file_of(subject: Any) -> str | None:
    """Return the file or notebook cell in which a function or class was written, or None if it is unknown.

    A class is found by its methods, whose code keeps its file when unpickled. `inspect` looks in the module of the
    class, and in a trial's process ``__main__`` is not the user's.
    """
    functions = map(_function_of, vars(subject).values() if inspect.isclass(subject) else [subject])
    written = (
        function.__code__.co_filename
        for function in functions
        if inspect.isfunction(function) and function.__module__ == subject.__module__
    )
    # The methods that a dataclass generates are in the file "<string>".
    if (file := next((file for file in written if file != "<string>"), None)) is not None:
        return file
    try:
        return inspect.getsourcefile(subject)
    except (TypeError, OSError):  # a built-in, or a class without methods in a module without a file
        return None


def _function_of(member: Any) -> Any:
    """Return the function behind a method, property or decorated function."""
    return inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))


def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or (Path(file).is_relative_to(_OWN) and Path(file).name != "workloads.py")


def _parsed(file: str) -> SourceText | None:
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # as in a notebook cell with IPython magic
        return None
    return SourceText(file, tree, _imports(tree)) if lines else None


def _imports(tree: ast.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname is not None}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _mentions(source: SourceText, dtype: str) -> Iterator[CodeLocation]:
    """Yield the places where a file names a dtype, as ``.half()`` or ``torch.float16``."""
    method, *names = _WIDTHS[dtype]
    for node in ast.walk(source.tree):
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        if is_method or (isinstance(node, ast.Attribute) and source.called(node) in names):
            yield source.place(node.lineno)  # type: ignore[attr-defined]  # expressions have one


def _reachable(maker: Any) -> Iterator[Any]:
    """Yield a function of the user and the functions that it refers to, nearest first; of a class its methods."""
    seen: set[CodeType] = set()
    waiting = [maker]
    for given in waiting:  # the loop appends to it
        function = given.func if isinstance(given, functools.partial) else given
        if inspect.isclass(function):
            waiting += [member for member in map(_function_of, vars(function).values()) if inspect.isfunction(member)]
        function = inspect.unwrap(function) if inspect.isfunction(function) else None
        if function is None or function.__code__ in seen or _is_installed(function.__code__.co_filename):
            continue
        seen.add(function.__code__)
        yield function
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a closure variable that has no value yet
                waiting.append(cell.cell_contents)
        waiting += (function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, including its inner functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _span(maker: Any) -> set[tuple[str | None, int | None]]:
    """Return the (file, line) pairs of a function, none if it has no source."""
    try:
        lines, first = inspect.getsourcelines(maker)
    except (OSError, TypeError):  # it has no source
        return set()
    file = inspect.getsourcefile(maker)
    return {(file, first + number) for number in range(len(lines))}


def _assignments(source: SourceText, maker: Any) -> set[tuple[str | None, int | None]]:
    """Return the (file, line) pairs that assign `maker` to a global name in its file, as ``half = make(float16)``."""
    known = getattr(maker, "__globals__", {})
    return {
        (source.file, line)
        for node in source.tree.body
        if isinstance(node, ast.Assign)
        and getattr(getattr(maker, "__code__", None), "co_filename", None) == source.file
        for target in node.targets
        if isinstance(target, ast.Name) and known.get(target.id) is maker
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _old_names(source: SourceText) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            is_old = any(_OLD.match(f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            is_old = any(_OLD.match(alias.name) for alias in node.names)
        else:
            # A name imported from there is reported at its import.
            is_old = isinstance(node, ast.Attribute) and bool(_OLD.fullmatch(ast.unparse(node)))
        if is_old:
            place = source.place(node.lineno)  # type: ignore[attr-defined]
            yield make_finding(rules.OLD_INTERFACE, place, mend=fixes.of_old_name(place.code))


def _scalers(source: SourceText) -> Iterator[Finding]:
    """Yield a finding for each GradScaler that is always on, in a file in which every autocast is to bf16."""
    calls = [(source.called(node.func), node) for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    dtypes = [_dtype_of(source, name, node) for name, node in calls if name.endswith("autocast")]
    if not dtypes or any(dtype != "bfloat16" for dtype in dtypes):
        return
    for name, node in calls:
        if name.endswith("amp.GradScaler") and not any(keyword.arg == "enabled" for keyword in node.keywords):
            place = source.place(node.lineno)
            yield make_finding(rules.SCALER, place, mend=fixes.of_scaler(place.code))


def _dtype_of(source: SourceText, name: str, call: ast.Call) -> str:
    """Return the last part of the name of the dtype passed to an autocast call, "" if none is passed by name."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
    place = 0 if _OLD.match(name) else 1
    given += call.args[place : place + 1]
    return source.called(given[0]).rpartition(".")[2] if given else ""


def _clipping(source: SourceText, scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    """Yield a finding for gradient clipping after a scaled backward pass and before `unscale_`.

    The calls are looked for in one function, or at the top level of the file.
    """
    calls = sorted((node for node in _inside(scope) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
    methods = [
        (node.lineno, node.func.attr, ast.unparse(node.func.value), node)
        for node in calls
        if isinstance(node.func, ast.Attribute)
    ]
    scalers = {owner for _, name, owner, _ in methods if name in ("scale", "backward")}
    steps = [(owner, node) for _, name, owner, node in methods if name == "step" and node.args and owner in scalers]
    for clip in calls:
        called = source.called(clip.func)
        if not (called in _CLIPS or called.startswith("nn.utils.clip_grad_")):
            continue
        for scaler, step in steps:
            before = [name for line, name, owner, _ in methods if owner == scaler and line < clip.lineno]
            if {"scale", "backward"} & set(before) and "unscale_" not in before and step.lineno > clip.lineno:
                line = f"{scaler}.unscale_({ast.unparse(step.args[0])})  # before this line"
                yield make_finding(rules.CLIPPING, source.place(clip.lineno), mend=line)
                break


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in a scope, without those inside its functions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _inside(node)
