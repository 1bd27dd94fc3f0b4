"""The import directions of the design, held by the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune_amp

ROOT = Path(autotune_amp.__file__).parent
# The runtime lives in the training job: it knows what a search found, not how.
ABOVE_RUNTIME = ("search", "trial", "isolation", "report", "api", "cli", "core.workload")
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def imported(file: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield node.module or ""


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("file", FILES)
def test_directions(file: str) -> None:
    modules = list(imported(file))
    light = ("search/", "isolation/runner.py", "isolation/process.py", "cli.py", "api.py", "__init__.py")
    if file.startswith(light):
        assert not any(is_under(module, "torch") for module in modules)
    if file != "search/study.py":
        assert not any(is_under(module, "optuna") for module in modules)
    in_child = ("profile/child.py",)
    if file.startswith("profile/") and file not in in_child:
        assert not any(is_under(module, "torch") for module in modules)
    if file.startswith(("trial/", "isolation/", "hardware/", "fingerprint/")) or file in in_child:
        assert not any(is_under(module, f"autotune_amp.{p}") for module in modules for p in ("search", "report", "api"))
    if file in [f"runtime/{name}.py" for name in ("policy", "actions", "state", "scale_rule", "checkpoint", "run_log")]:
        assert not any(is_under(module, "torch") for module in modules)
    if file in [f"numerics/{name}.py" for name in ("grading", "scaler_replay")]:  # the parent reads them
        assert not any(is_under(module, "torch") for module in modules)
    if file.startswith("numerics/"):
        above = ("runtime", *ABOVE_RUNTIME)
        assert not any(is_under(module, f"autotune_amp.{p}") for module in modules for p in above)
    if file.startswith("runtime/"):
        assert not any(is_under(module, f"autotune_amp.{p}") for module in modules for p in ABOVE_RUNTIME)
    results = ("core/recommendation.py", "profile/results.py")  # which explain themselves
    if not file.startswith(("report/", "cli.py", "api.py", *results)):
        # How a number reads is the same in every sentence; that file imports nothing.
        words = "autotune_amp.core.text" if file.startswith("search/") else None
        assert not any(is_under(module, "autotune_amp.report") for module in modules if module != words)


@pytest.mark.parametrize("file", FILES)
def test_frameworks_are_imported_by_their_adapters_alone(file: str) -> None:
    frameworks = ("accelerate", "deepspeed", "lightning", "transformers")
    if any(is_under(module, framework) for module in imported(file) for framework in frameworks):
        assert file.startswith("integrations/") or file == "core/config.py"  # AmpConfig.to_training_arguments


@pytest.mark.parametrize("file", [file for file in FILES if file not in ("cli.py", "__main__.py")])
def test_only_the_command_line_prints_or_exits(file: str) -> None:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("print", "exit", "sys.exit", "quit"), f"{file}:{node.lineno} calls {name}"


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_five_hundred_lines_at_most(file: str) -> None:
    assert len((ROOT / file).read_text().splitlines()) <= 500


def test_importing_the_package_imports_neither_torch_nor_optuna_and_exports_its_names() -> None:
    program = (
        "import sys, autotune_amp\n"
        "assert not {'torch', 'optuna', 'msgspec', 'rich'} & set(sys.modules)\n"
        "print(sorted(name for name in dir(autotune_amp)))\n"
        "from autotune_amp import AmpConfig, LossScale, Recommendation, Workload, probe, recommend_config\n"
        "assert 'torch' not in sys.modules and 'optuna' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(autotune_amp.__all__))


def test_the_controller_is_exported_and_brings_no_optuna() -> None:
    program = (
        "import sys\n"
        "from autotune_amp import PrecisionController\n"
        "assert PrecisionController.__module__ == 'autotune_amp.runtime.controller'\n"
        "assert 'torch' in sys.modules and not {'optuna', 'typer', 'sqlalchemy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_policy_runs_without_torch() -> None:
    program = "import sys, autotune_amp.runtime.policy\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
