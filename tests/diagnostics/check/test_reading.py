"""What the user's own files show without being run: old names, scalers under bf16, clipping of scaled gradients."""

from __future__ import annotations

import functools
import importlib.util
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp.core.errors import WorkloadError
from autotune_amp.diagnostics.check.findings import Finding
from autotune_amp.diagnostics.check.reading import parse_sources, source_findings, weights_finding
from autotune_amp.diagnostics.check.recording import location_of_error
from autotune_amp.trial.training import loss_with_checks

LOOP = """
import torch
from torch import nn

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        scaler.scale(loss).backward()
        {unscale}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


def findings(folder: Path, text: str) -> list[Finding]:
    """What is read in a file of a function `train`."""
    path = folder / "training.py"
    path.write_text(text)
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location("training", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (source,), unread = parse_sources([module.train])
    assert unread == ()
    return list(source_findings(source))


def test_clipping_before_unscale(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, LOOP.format(unscale="pass"))
    assert (finding.rule, finding.precisions) == ("clipping", ("fp16",))
    assert finding.code.startswith("torch.nn.utils.clip_grad_norm_")
    assert finding.mend.startswith("scaler.unscale_(optimizer)")


def test_clipping_after_unscale_and_without_a_scaler(tmp_path: Path) -> None:
    assert findings(tmp_path, LOOP.format(unscale="scaler.unscale_(optimizer)")) == []
    plain = LOOP.replace("scaler.scale(loss)", "loss").replace("scaler.step(optimizer)", "optimizer.step()")
    assert findings(tmp_path, plain.format(unscale="pass")) == []


def test_clipping_after_the_step_clips_nothing_that_is_scaled_for_it(tmp_path: Path) -> None:
    clip, step = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "scaler.step(optimizer)"
    swapped = LOOP.replace(clip, "CLIP").replace(step, clip).replace("CLIP", step)
    assert findings(tmp_path, swapped.format(unscale="pass")) == []


@pytest.mark.parametrize(
    ("imports", "call", "mended"),
    [
        ("import torch", "torch.cuda.amp.autocast()", 'with torch.amp.autocast("cuda"):'),
        ("import torch", "torch.cuda.amp.autocast(enabled=False)", 'with torch.amp.autocast("cuda", enabled=False):'),
        ("from torch.cuda.amp import autocast, GradScaler", "autocast()", "from torch.amp import autocast, GradScaler"),
        ("from torch.cuda import amp", "amp.autocast()", "from torch import amp"),
        ("import torch", 'torch.amp.autocast("cuda")', None),
        ("from torch import amp", 'amp.autocast("cuda")', None),
    ],
)
def test_the_old_interface(tmp_path: Path, imports: str, call: str, mended: str | None) -> None:
    text = f"{imports}\n\ndef train(model):\n    with {call}:\n        return model()\n"
    found = findings(tmp_path, text)
    assert [finding.rule for finding in found] == ([] if mended is None else ["old_interface"])
    assert all(finding.mend.startswith(mended or "") for finding in found)


@pytest.mark.parametrize(
    ("dtype", "scaler", "is_found"),
    [
        ("torch.bfloat16", 'GradScaler("cuda")', True),
        ("torch.bfloat16", 'GradScaler("cuda", enabled=False)', False),
        ("torch.bfloat16", 'GradScaler("cuda", enabled=is_fp16)', False),
        ("torch.float16", 'GradScaler("cuda")', False),
        ("chosen", 'GradScaler("cuda")', False),
    ],
)
def test_a_scaler_under_bf16(tmp_path: Path, dtype: str, scaler: str, is_found: bool) -> None:
    text = (
        "import torch\nfrom torch.amp import GradScaler, autocast\n\n"
        f"def train(model, chosen, is_fp16):\n    scaler = {scaler}\n"
        f'    with autocast("cuda", dtype={dtype}):\n        scaler.scale(model()).backward()\n'
    )
    found = findings(tmp_path, text)
    assert [(finding.rule, finding.line) for finding in found] == ([("scaler", 5)] if is_found else [])
    assert all("enabled=False" in finding.mend for finding in found)


def test_a_scaler_under_bf16_of_the_old_interface(tmp_path: Path) -> None:
    text = (
        "from torch import bfloat16\nfrom torch.cuda.amp import GradScaler, autocast\n\n"
        "def train(model):\n    scaler = GradScaler()\n"
        "    with autocast(True, bfloat16):\n        scaler.scale(model()).backward()\n"
    )
    assert [finding.rule for finding in findings(tmp_path, text)] == ["old_interface", "scaler"]


def test_what_is_installed_is_not_read_and_what_has_no_source_is_named() -> None:
    names: dict[str, Any] = {"nn": nn, "__name__": "made_up"}
    exec("class Made(nn.Module):\n    def forward(self, x): return x", names)
    sources, unread = parse_sources(
        [nn.Linear, functools.partial(torch.optim.AdamW, lr=1.0), print, names["Made"], findings]
    )
    assert [Path(source.file).name for source in sources] == ["test_reading.py"]
    assert unread == ("made_up.Made",)


def executed(path: Path, module: str) -> dict[str, Any]:
    """Return the names that a file defines, run as `module`."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile(path.read_text(), path, "exec"), names)
    return names


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_packages_of_another_environment_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "trainer.py"
    path.parent.mkdir()
    path.write_text("def train(): pass\n")
    assert parse_sources([executed(path, "trainer")["train"]]) == ([], ())


def test_a_class_of_a_script_is_read_by_its_methods_though_its_module_is_another_one_here(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import dataclasses\nfrom torch import nn\n\n@dataclasses.dataclass\nclass Sizes:\n    width: int = 3\n"
        "    @property\n    def twice(self): return 2 * self.width\n\nclass Bare(nn.Linear): pass\n\n"
        "class Net(nn.Module):\n    def forward(self, x): return x\n"
    )
    names = executed(path, "__main__")  # which has no such class where a trial unpacks it
    for name in ("Sizes", "Net"):
        sources, unread = parse_sources([names[name]])
        assert ([source.file for source in sources], unread) == ([str(path)], ())
    assert parse_sources([names["Bare"]])[1] == ("__main__.Bare",)


def test_the_function_that_makes_the_weights_is_named_before_the_rest_of_its_file() -> None:
    def make() -> nn.Module:
        return nn.Linear(2, 2).double()

    sources, _ = parse_sources([make])
    finding = weights_finding("float64", "hurts", ("head",), sources, [None, make])
    assert finding.code == "return nn.Linear(2, 2).double()"
    assert finding.mend == "return nn.Linear(2, 2).float()"
    assert (finding.severity, finding.modules) == ("hurts", ("head",))
    assert weights_finding("float16", "breaks", ("head",), [], []).file is None


def test_what_a_workloads_functions_call_is_named_and_not_what_anothers_do(tmp_path: Path) -> None:
    path = tmp_path / "helpers.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\ndef base():\n    return nn.Linear(2, 2).half()\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.half()\n\n"
        "first = lambda: base()\nsecond = lambda: nn.Sequential(Net())\nthird = lambda: nn.Linear(2, 2)\n"
    )
    names = executed(path, path.stem)
    sources, _ = parse_sources([names["first"]])
    lines = [
        weights_finding("float16", "breaks", (), sources, [names[name]]).line for name in ("first", "second", "third")
    ]
    assert lines == [5, 10, None]


def test_a_line_outside_the_functions_of_a_workload_is_named_if_there_is_no_other(tmp_path: Path) -> None:
    path = tmp_path / "several.py"
    path.write_text(
        "import torch\n\ndef make(dtype):\n    def workload():\n        return torch.zeros(2, dtype=dtype)\n"
        "    return workload\n\nfirst = make(torch.float16)\nsecond = make(torch.float16)\n"
        "third = make(torch.float64)\n"
    )
    names = executed(path, path.stem)
    sources, _ = parse_sources([names["second"]])
    assert weights_finding("float16", "breaks", (), sources, [names["second"]]).file is None  # it may be another's
    assert weights_finding("float64", "hurts", (), sources, []).line == 10  # there is no other


def test_files_of_this_package_are_not_the_users() -> None:
    assert parse_sources([loss_with_checks]) == ([], ())
    with pytest.raises(WorkloadError) as raised:
        loss_with_checks(lambda model, batch: None)(nn.Linear(1, 1), None)
    assert location_of_error(raised.value).file == __file__
