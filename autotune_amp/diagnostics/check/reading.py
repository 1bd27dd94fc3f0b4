"""Search of the user's source files for mixed-precision problems that recording a training step cannot show.

These are a needless GradScaler, clipping of gradients that are still scaled, and old names of torch.amp. The search
also locates the line that made weights of a dtype. Does not import torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import re
import sys
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

_PACKAGE_FOLDER = Path(__file__).parents[2]
_STDLIB: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
_PACKAGES: Final = {"site-packages", "dist-packages"}  # names of folders of installed packages, of any environment
_OLD_AMP_NAMES = re.compile(r"torch\.(cuda|cpu)\.amp\b")
_CLIP_FUNCTIONS: Final = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
# By dtype: the method of a tensor or module that casts to it, then its names.
_DTYPE_NAMES: Final = {
    "float16": ("half", "torch.float16", "torch.half"),
    "bfloat16": ("bfloat16", "torch.bfloat16"),
    "float64": ("double", "torch.float64", "torch.double"),
}


class SourceText(NamedTuple):
    """Parsed source file of the user. `names` maps each name that is imported in it to the full dotted name."""

    file: str
    tree: ast.Module
    names: dict[str, str]

    def full_name(self, node: ast.AST) -> str:
        """Return the full dotted name that an expression refers to, "" if it is not a name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.names.get(node.id, node.id), *reversed(parts)])

    def location(self, line: int) -> CodeLocation:
        """Return the location of a line of this file."""
        return CodeLocation(file=self.file, line=line)


def parse_sources(objects: Iterable[Any]) -> tuple[list[SourceText], tuple[str, ...]]:
    """Return the parsed files that define `objects`, and the names of those without source.

    An object is a class or function; another is taken as its class, a functools.partial as its function. Installed
    code, such as torch, is left out, since the user cannot fix it.
    """
    sources: dict[str, SourceText] = {}
    unread: dict[str, None] = {}
    for obj in objects:
        function = inspect.unwrap(getattr(obj, "func", obj))  # unwrap a functools.partial
        subject = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
        if getattr(subject, "__module__", "").partition(".")[0] in ("torch", "builtins"):
            continue
        file = _defining_file(subject)
        if file is not None and (file in sources or _is_installed(file)):
            continue
        source = None if file is None else _parse(file)
        if source is None:
            unread[f"{subject.__module__}.{subject.__qualname__}"] = None
        else:
            sources[source.file] = source
    return list(sources.values()), tuple(unread)


def parse_program() -> list[SourceText]:
    """Return the parsed files of the running program and of the modules that it imported, without installed ones and
    those that torch.compile has written.
    """
    modules = [
        module
        for name, module in tuple(sys.modules.items())
        if not getattr(module, "__name__", name).startswith("torch.")
    ]
    files = dict.fromkeys(getattr(module, "__file__", None) for module in modules)
    sources = [_parse(file) for file in files if file and file.endswith(".py") and not _is_installed(file)]
    return [source for source in sources if source is not None]


def source_findings(source: SourceText) -> Iterator[Finding]:
    """Yield the findings in a file: old names of torch.amp, needless scalers, and clipping before `unscale_`."""
    yield from _old_name_findings(source)
    yield from _scaler_findings(source)
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _clipping_findings(source, node)
    yield from _clipping_findings(source, source.tree)


def weights_finding(
    dtype: str, severity: Severity, modules: tuple[str, ...], sources: Iterable[SourceText], makers: Iterable[Any]
) -> Finding:
    """Return the finding that trained weights of `modules` have `dtype`, located at the line that requests this dtype.

    The line is searched in `makers`, the functions that build the model, and in functions that these use, the nearest
    first. Otherwise it is the only such line in all files. If there are several, they may belong to other training runs
    that the files define, so the finding has no line.
    """
    locations = [location for source in sources for location in _dtype_locations(source, dtype)]
    line_sets = (_function_lines(function) for maker in makers for function in _reachable_functions(maker))
    likely_locations = (
        location for lines in line_sets for location in locations if (location.file, location.line) in lines
    )
    location = next(likely_locations, locations[0] if len(set(locations)) == 1 else CodeLocation())
    finding = make_finding(
        rules.WEIGHTS,
        location,
        severity,
        why=f"Weights have the dtype {dtype}. {rules.WEIGHTS.why}",
        mend=fixes.use_fp32(location.code),
    )
    return replace(finding, modules=modules)


def _defining_file(subject: Any) -> str | None:
    """Return the file or notebook cell in which a function or class was written, or None if it is unknown.

    A class is located by its methods: their code holds the file's name even after unpickling in another process.
    `inspect` takes the file of the class's module instead, which fails for a class of the user's ``__main__``, since
    the process of a trial has another ``__main__``.
    """
    functions = map(_underlying_function, vars(subject).values() if inspect.isclass(subject) else [subject])
    files = (
        function.__code__.co_filename
        for function in functions
        if inspect.isfunction(function) and function.__module__ == subject.__module__
    )
    # The methods that a dataclass generates are in the file "<string>".
    if (file := next((file for file in files if file != "<string>"), None)) is not None:
        return file
    try:
        return inspect.getsourcefile(subject)
    except (TypeError, OSError):  # a built-in, or a class without methods in a module without a file
        return None


def _underlying_function(member: Any) -> Any:
    """Return the function behind a method, property or decorated function."""
    return inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))


def _is_installed(file: str) -> bool:
    """Whether a file is part of Python, of an installed package or of this one, where the user cannot fix anything.

    This package's built-in workload counts as a user's file, unless the package itself is installed.
    """
    path = Path(file)
    return (
        file.startswith(_STDLIB)
        or not _PACKAGES.isdisjoint(path.parts)
        or (path.is_relative_to(_PACKAGE_FOLDER) and path.name != "workloads.py")
    )


def _parse(file: str) -> SourceText | None:
    """Return the parsed file or notebook cell, or None if its source is unknown or not plain Python."""
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # as in a notebook cell with IPython magic
        return None
    return SourceText(file, tree, _imported_names(tree)) if lines else None


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full dotted name for each name that an absolute import binds, except for ``import a.b`` without as."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname is not None}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _dtype_locations(source: SourceText, dtype: str) -> Iterator[CodeLocation]:
    """Yield the locations where a file names a dtype, as ``.half()`` or ``torch.float16``."""
    method, *names = _DTYPE_NAMES[dtype]
    for node in ast.walk(source.tree):
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        if is_method or (isinstance(node, ast.Attribute) and source.full_name(node) in names):
            yield source.location(node.lineno)  # type: ignore[attr-defined]  # expressions have one


def _reachable_functions(maker: Any) -> Iterator[Any]:
    """Yield a user's function (or the methods of a class) and all the user's functions it refers to, nearest first.

    Functions are found through global names and closures, at any depth. Nothing is yielded for other objects.
    """
    visited_code: set[CodeType] = set()
    candidates = [maker]
    for candidate in candidates:  # the loop appends to it
        function = candidate.func if isinstance(candidate, functools.partial) else candidate
        if inspect.isclass(function):
            candidates += [
                member for member in map(_underlying_function, vars(function).values()) if inspect.isfunction(member)
            ]
        function = inspect.unwrap(function) if inspect.isfunction(function) else None
        if function is None or function.__code__ in visited_code or _is_installed(function.__code__.co_filename):
            continue
        visited_code.add(function.__code__)
        yield function
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a closure variable that has no value yet
                candidates.append(cell.cell_contents)
        candidates += (
            function.__globals__[name] for name in _used_names(function.__code__) if name in function.__globals__
        )


def _used_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, including its inner functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _used_names(inner)


def _function_lines(function: Any) -> set[tuple[str | None, int | None]]:
    """Return the (file, line) pairs of a function's source, none if it has no source."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):  # it has no source
        return set()
    file = inspect.getsourcefile(function)
    return {(file, first + number) for number in range(len(lines))}


def _old_name_findings(source: SourceText) -> Iterator[Finding]:
    """Yield a finding for each import or use of ``torch.cuda.amp`` or ``torch.cpu.amp``, deprecated by torch.amp."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            is_old = any(_OLD_AMP_NAMES.match(f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            is_old = any(_OLD_AMP_NAMES.match(alias.name) for alias in node.names)
        else:
            # A name imported from torch.cuda.amp is reported at its import.
            is_old = isinstance(node, ast.Attribute) and bool(_OLD_AMP_NAMES.fullmatch(ast.unparse(node)))
        if is_old:
            location = source.location(node.lineno)  # type: ignore[attr-defined]
            yield make_finding(rules.OLD_INTERFACE, location, mend=fixes.fix_old_name(location.code))


def _scaler_findings(source: SourceText) -> Iterator[Finding]:
    """Yield a finding for each GradScaler made without `enabled`, in a file in which every autocast is to bf16.

    Bf16 has the exponent range of fp32, so the loss needs no scale.
    """
    calls = [(source.full_name(node.func), node) for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    dtypes = [_autocast_dtype_name(source, node) for name, node in calls if name.endswith("autocast")]
    if not dtypes or any(dtype != "bfloat16" for dtype in dtypes):
        return
    for name, node in calls:
        if name.endswith("amp.GradScaler") and not any(keyword.arg == "enabled" for keyword in node.keywords):
            location = source.location(node.lineno)
            yield make_finding(rules.SCALER, location, mend=fixes.disable_scaler(location.code))


def _autocast_dtype_name(source: SourceText, call: ast.Call) -> str:
    """Return the last part of the name of the dtype passed to an autocast call, "" if none is passed by name."""
    dtype_arguments = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
    dtype_arguments += call.args[1:2]  # after the device type, or after `enabled` of the old interface
    return source.full_name(dtype_arguments[0]).rpartition(".")[2] if dtype_arguments else ""


def _clipping_findings(
    source: SourceText, scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Finding]:
    """Yield a finding for gradient clipping after a scaled backward pass and before `unscale_`.

    `scope` is one function, or the top level of the file. Calls are compared by their lines, without regard to branches
    and loops.
    """
    calls = sorted(
        (node for node in _nodes_in_scope(scope) if isinstance(node, ast.Call)), key=lambda node: node.lineno
    )
    method_calls = [  # (line, name of the method, source of the object that it is called on, node)
        (node.lineno, node.func.attr, ast.unparse(node.func.value), node)
        for node in calls
        if isinstance(node.func, ast.Attribute)
    ]
    scalers = {owner for _, name, owner, _ in method_calls if name in ("scale", "backward")}
    steps = [
        (owner, node) for _, name, owner, node in method_calls if name == "step" and node.args and owner in scalers
    ]
    for clip in calls:
        called = source.full_name(clip.func)
        if not (called in _CLIP_FUNCTIONS or called.startswith("nn.utils.clip_grad_")):
            continue
        for scaler, step in steps:
            before = [name for line, name, owner, _ in method_calls if owner == scaler and line < clip.lineno]
            if {"scale", "backward"} & set(before) and "unscale_" not in before and step.lineno > clip.lineno:
                line = f"{scaler}.unscale_({ast.unparse(step.args[0])})  # before this line"
                yield make_finding(rules.CLIPPING, source.location(clip.lineno), mend=line)
                break


def _nodes_in_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in a scope, without those inside its functions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _nodes_in_scope(node)
