"""Tests import a framework when they run, not when pytest collects them: Lightning alone takes six seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import autotune_amp

TESTS, PACKAGE = Path(__file__).parent, Path(autotune_amp.__file__).parent
FRAMEWORKS = {
    *("accelerate", "deepspeed", "lightning", "mlflow", "ray", "sklearn", "tensorboard", "torchao", "torchmetrics"),
    *("torchvision", "transformers", "wandb"),
}


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module that a test may import: the helpers beside it and the package's own."""
    files = {path.stem: path for path in TESTS.rglob("*.py")}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    return files


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: without the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Lambda) or is_for_types_only(child):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in [*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)]:
                yield part
                yield from run_at_import(part)
            continue
        yield child
        yield from run_at_import(child)


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the modules that a file imports when it is imported itself, `pytest.importorskip` counted."""
    names: set[str] = set()
    for node in run_at_import(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            names.add(ast.literal_eval(node.args[0]))
    return frozenset(names)


def frameworks_behind(path: Path) -> set[str]:
    """Return the chains of imports by which collecting this file imports a framework."""
    left, seen, found = [(path, path.name)], {path}, set()
    while left:
        current, chain = left.pop()
        for name in imported(current):
            if name.partition(".")[0] in FRAMEWORKS:
                found.add(f"{chain} -> {name}")
            other = modules().get(name)
            if other is not None and other not in seen:
                seen.add(other)
                left.append((other, f"{chain} -> {name}"))
    return found


def test_no_framework_is_imported_at_collection() -> None:
    assert frameworks_behind(TESTS / "integrations" / "lightning_samples.py"), "what is looked for can be found"
    collected = [
        *TESTS.rglob("test_*.py"),
        *TESTS.rglob("conftest.py"),
        TESTS / "virtual_gpu" / "virtual_gpu_plugin.py",
    ]
    breaches = sorted(set[str]().union(*map(frameworks_behind, collected)))
    assert not breaches, "Import these in the tests or fixtures that use them:\n" + "\n".join(breaches)
