"""The layers of the design, held by the syntax trees: what may import what, lazy and typing imports counted."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import autotune_amp

ROOT = Path(autotune_amp.__file__).parent
MAX_LINES, MAX_FILES = 800, 16

# From the bottom up: a folder, or a file beside the folders, imports its own and what stands in a line before it.
LAYERS = (
    ("core",),
    ("precision", "hardware"),
    ("interruption",),
    ("distributed",),
    ("fingerprint",),
    ("dimensions",),
    ("numerics",),
    ("runtime", "trial"),
    ("processes",),
    ("command",),
    ("integrations", "workloads"),
    ("search",),
    ("diagnostics",),
    ("report",),
    ("service",),
    ("api",),
    ("cli",),
    ("__main__",),
)

# Files that run in a parent, or that a parent reads, know no torch; only the study knows Optuna.
WITHOUT_TORCH = (
    *("__init__", "api", "cli", "core", "search", "service", "processes.process", "processes.local"),
    *("command.backend", "command.command", "command.running", "command.ranks", "command.measure", "command.settable"),
    *("command.rank_steps", "command.verdict", "trial.judge"),
    *("trial.step_profile.breakdown", "diagnostics.profile_amp", "diagnostics.check_fidelity"),
    *("diagnostics.check.findings", "diagnostics.check.check_workload"),
    *("diagnostics.memory.results", "diagnostics.memory.profile_memory"),
    *("numerics.scaler_replay", "numerics.grading", "runtime.policy", "runtime.status", "runtime.run_log"),
    *("runtime.checkpoint", "runtime.gpu_sampler", "runtime.sinks"),
)
WITH_OPTUNA = ("search.storage.study", "search.storage.database")
AGENT = "command.agent"
OF_THE_AGENT_FOR_ALL = ("command.agent.tokens", "command.agent.flops")
FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "transformers")
WITH_FRAMEWORKS = ("integrations", "core.config")  # AmpConfig.to_training_arguments makes theirs
WITH_RAY = ("processes.on_ray.driver",)
HTTP_SERVER = ("fastapi", "pydantic", "starlette", "uvicorn")
WITH_HTTP_SERVER = ("service",)


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of every module, by its name below the package."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
    }


@cache
def imported(module: str) -> list[str]:
    """What a module imports, wherever in it; of the package the modules themselves, below its name."""
    found = []
    for node in ast.walk(trees()[module]):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # In the user's processes the agent has another name, and nothing of the package beside it.
            above = ".".join(module.split(".")[: -node.level]) if node.level else ""
            assert not node.level or is_under(above, (AGENT,)), f"{module} has a relative import"
            package = f"autotune_amp.{above}." if node.level else ""
            names = [package + ".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        for name in names:
            own = name.removeprefix("autotune_amp.")
            parent = own.rpartition(".")[0]
            candidates = (own, f"{own}.__init__", parent, f"{parent}.__init__", "__init__")
            is_own = own != name
            found.append("autotune_amp." + next(c for c in candidates if c in trees()) if is_own else name)
    return found


@cache
def edges() -> dict[str, set[str]]:
    """The modules of the package that each of them imports; the package itself only hands out public names."""
    found: dict[str, set[str]] = {}
    for module in trees().keys() - {"__init__"}:
        own = (name.removeprefix("autotune_amp.") for name in imported(module) if name.startswith("autotune_amp."))
        found[module] = {name for name in own if name not in (module, "__init__")}
    return found


def is_under(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def folder(module: str) -> str:
    return module.partition(".")[0]


def test_imports_point_down_the_layers() -> None:
    floor = {name: height for height, names in enumerate(LAYERS) for name in names}
    unknown = {folder(module) for module in edges()} - floor.keys()
    assert not unknown, f"Give {', '.join(sorted(unknown))} a layer in LAYERS."
    breaches = [
        f"{module} imports {other}"
        for module, others in edges().items()
        for other in sorted(others)
        if folder(other) != folder(module)
        and floor[folder(other)] >= floor[folder(module)]
        # The agent imports nothing of the package, so that these of its files stand below everything.
        and other not in OF_THE_AGENT_FOR_ALL
    ]
    assert not breaches, "\n".join(breaches)


def test_no_modules_import_one_another() -> None:
    left = {module: set(others) for module, others in edges().items()}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    assert not left, f"In a circle, or above one: {', '.join(sorted(left))}"


def test_torch_optuna_and_the_frameworks_are_imported_where_they_belong() -> None:
    places = (*WITHOUT_TORCH, *WITH_OPTUNA, *WITH_FRAMEWORKS, *WITH_RAY)
    gone = [place for place in places if not any(is_under(module, (place,)) for module in trees())]
    assert not gone, f"There is no {', '.join(gone)} any more: name what took its place."
    breaches = [
        f"{module} imports {name}"
        for module in trees()
        for name in imported(module)
        if (is_under(name, ("torch",)) and is_under(module, WITHOUT_TORCH))
        or (is_under(name, ("optuna",)) and not is_under(module, WITH_OPTUNA))
        or (is_under(name, FRAMEWORKS) and not is_under(module, WITH_FRAMEWORKS))
        or (is_under(name, ("ray",)) and not is_under(module, WITH_RAY))
        or (is_under(name, HTTP_SERVER) and not is_under(module, WITH_HTTP_SERVER))
    ]
    assert not breaches, "\n".join(breaches)


def test_files_and_folders_are_small_and_only_the_command_line_prints_or_exits() -> None:
    texts = {module: (ROOT / f"{module.replace('.', '/')}.py").read_text() for module in trees()}
    lines = {module: text.count("\n") for module, text in texts.items()}
    breaches = [f"{module} has {num} lines" for module, num in lines.items() if num > MAX_LINES]
    parents = (module.rpartition(".")[0] for module in trees() if not module.endswith("__init__"))
    crowded = {parent: num for parent, num in Counter(parents).items() if num > MAX_FILES}
    breaches += [f"{parent} has {num} files" for parent, num in crowded.items()]
    breaches += [
        f"{module}:{node.lineno} has {ast.unparse(node)}"
        for module, tree in trees().items()
        if folder(module) not in ("cli", "__main__")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in ("print", "exit", "quit"))
        or (isinstance(node, ast.Attribute) and node.attr == "exit" and ast.unparse(node) == "sys.exit")
    ]
    assert not breaches, "\n".join(breaches)


def test_each_module_of_the_standard_library_keeps_its_name() -> None:
    own = {module.rpartition(".")[2] for module in trees()}
    assert not own & sys.stdlib_module_names, sorted(own & sys.stdlib_module_names)


def test_the_package_imports_neither_torch_nor_optuna_and_the_controller_no_optuna() -> None:
    program = (
        "import sys, autotune_amp\n"
        "assert not {'torch', 'optuna', 'msgspec', 'rich'} & set(sys.modules)\n"
        "assert sorted(dir(autotune_amp)) == sorted(autotune_amp.__all__)\n"
        "from autotune_amp import AmpConfig, LossScale, Recommendation, Workload, probe, recommend_config\n"
        "import autotune_amp.dimensions, autotune_amp.processes.process, autotune_amp.runtime.policy\n"
        "assert not {'torch', 'optuna', 'rich', 'plotly', 'typer'} & set(sys.modules)  # nor for explain()\n"
        "from autotune_amp import PrecisionController\n"
        "assert 'torch' in sys.modules and not {'optuna', 'typer', 'sqlalchemy'} & set(sys.modules)\n"
        "import autotune_amp.api, autotune_amp.cli, autotune_amp.search.search\n"
        "served = {'fastapi', 'starlette', 'uvicorn', 'autotune_amp.service'}\n"
        "assert not served & set(sys.modules)  # nor do searches and the loop\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
