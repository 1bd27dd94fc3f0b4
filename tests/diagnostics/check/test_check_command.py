"""`autotune-amp check` and check_workload(): exit codes, the document, the terminal, and what cannot be checked."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import check_samples
import pytest
from forked_python import ForkServer
from torch import Tensor
from unisolated import run_jobs_here

from autotune_amp import check_workload
from autotune_amp.cli import run
from autotune_amp.core.errors import RunnerError, WorkloadError
from autotune_amp.diagnostics.check import recording
from autotune_amp.diagnostics.check.check_workload import run_workload_check
from autotune_amp.diagnostics.check.child import report_on
from autotune_amp.search.progress import Progress
from autotune_amp.search.source import live_source
from autotune_amp.trial.context import make_model

pytestmark = pytest.mark.usefixtures("forked_processes")

SICK = """
import torch
from torch import nn
from torch.nn import functional
from autotune_amp import Workload

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x):
        scores = self.query(x) @ x.transpose(1, 2)
        scores = scores.masked_fill(scores > 1, -1e9)
        return scores.softmax(-1) @ x

def loss(model, batch):
    out = model(batch)
    return (out * out).mean()

def workload():
    return Workload(lambda: nn.Sequential(nn.Linear(16, 16), Attention()), loss, lambda n: torch.randn(n, 4, 16))
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check in this process."""
    run_jobs_here(monkeypatch)


def written(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return f"{path}:workload"


def test_what_breaks_is_named_with_its_line_and_exits_with_4(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = written(tmp_path, SICK)
    assert run(["check", target, "--json", "--quiet"]) == 4
    document = json.loads(capfd.readouterr().out)
    assert (document["format"], document["device"], document["workload"]) == (1, "cuda", "workload")
    first, *others = document["findings"]
    assert (first["rule"], first["severity"], first["precisions"]) == ("large_constant", "breaks", ["fp16"])
    assert (Path(first["file"]).name, first["line"], first["modules"]) == ("train.py", 14, ["1"])
    assert first["mend"] == "scores = scores.masked_fill(scores > 1, torch.finfo(scores.dtype).min)"
    assert [finding["rule"] for finding in others] == ["loss"]

    run_jobs_here(monkeypatch)
    assert run(["check", target]) == 4
    said = capfd.readouterr()
    assert "train.py:14" in said.out
    assert "will break" in said.out
    assert max(map(len, said.out.splitlines())) <= max(80, len(str(tmp_path)) + 20)
    assert "Recording one fp32 step for cuda" in said.err


@pytest.mark.usefixtures("here")
def test_what_only_hurts_and_what_is_healthy_exit_with_0(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", written(tmp_path, SICK.replace("-1e9", "-1e4")), "--json", "--quiet"]) == 0
    assert [finding["severity"] for finding in json.loads(capfd.readouterr().out)["findings"]] == ["hurts"]
    assert run(["check", "--for", "mps", "--quiet"]) == 0  # the embedded workload
    said = capfd.readouterr().out
    assert "nothing found" in said
    assert "not checked" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--for", "tpu"], "tpu"), (["--batch-size", "0"], "0"), (["missing.py:workload"], "missing")],
)
@pytest.mark.usefixtures("here")
def test_a_wrong_request(arguments: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *arguments, "--json", "--quiet"]) == 2
    assert named in json.loads(capfd.readouterr().out)["error"]["message"]


@pytest.mark.usefixtures("here")
def test_a_workload_that_raises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    raising = written(tmp_path, SICK.replace("out = model", "raise KeyError('labels')\n    out = model"))
    assert run(["check", raising, "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["kind"] == "workload"
    assert "labels" in error["message"]


def test_a_workload_that_ends_its_process() -> None:
    with pytest.raises(WorkloadError, match=r"crash.*status 3"):
        check_workload(check_samples.workload(_ends), quiet=True)


def _ends(x: Tensor) -> Tensor:
    import os

    os._exit(3)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_process_that_dies_of_a_signal_is_our_fault_unless_the_step_alone_dies_too(
    number: signal.Signals, is_ours: bool
) -> None:
    def dies(x: Tensor) -> Tensor:
        assert len(x) > 2  # so that it takes more samples than are tried first
        import faulthandler
        import os

        import torch

        faulthandler.disable()
        if torch.overrides._get_current_function_mode() is not None or not is_ours:  # type: ignore[no-untyped-call]
            os.kill(os.getpid(), number)
        return x

    with pytest.raises(RunnerError if is_ours else WorkloadError, match=number.name) as caught:
        check_workload(check_samples.workload(dies), quiet=True)
    assert ("fix what it raises" in caught.value.next_step) is not is_ours
    assert ("report" in caught.value.next_step) is is_ours
    assert caught.value.exit_code == (1 if is_ours else 2)


def test_a_long_recording_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "PROGRESS_SECONDS", 0.0)
    workload, said = check_samples.workload(check_samples.masks_far), list[str]()
    report_on(workload, make_model(workload), "cuda", 2, on_progress=said.append)
    assert said[0] == "loading 2 samples"
    assert any(re.fullmatch(r"\d+ calls recorded, now in body", text) for text in said)
    assert any(text.endswith("the backward pass") for text in said)


def test_what_a_process_says_that_it_does_is_shown() -> None:
    heard: list[str] = []

    class Hears(Progress):
        def activity(self, text: str, slot: str | None = None) -> None:
            assert slot is None
            heard.append(text)

    run_workload_check(live_source(check_samples.workload(check_samples.identity)), Hears(), "cuda", None, 0)
    assert heard[:2] == ["building the model", "loading 2 samples"]
    assert heard[-1].endswith("the backward pass")


def test_live_objects() -> None:
    found = check_workload(check_samples.workload(check_samples.masks_far), batch_size=3, quiet=True)
    assert [(finding.rule, finding.modules) for finding in found.findings] == [("large_constant", ("body",))]
    assert (found.batch_size, found.will_break) == (3, True)
    assert [Path(file).name for file in found.files] == ["check_samples.py"]


@pytest.mark.usefixtures("here")
def test_as_few_samples_are_recorded_as_a_step_runs_with() -> None:
    def batch_size(least: int) -> int:
        def compares(x: Tensor) -> Tensor:
            assert len(x) >= least
            return x

        return check_workload(check_samples.workload(compares), quiet=True).batch_size

    assert (batch_size(1), batch_size(3)) == (2, 8)


@pytest.mark.parametrize("kind", ["script", "string", "cell"])
def test_a_class_of_a_script_itself_of_a_string_or_of_a_notebooks_cell(
    tmp_path: Path, fork_server: ForkServer, kind: str
) -> None:
    file = {"script": str(tmp_path / "script.py"), "string": "<string>", "cell": "/tmp/ipykernel_7/123.py"}[kind]
    asks = "from autotune_amp import check_workload\nprint(check_workload(workload(), quiet=True).to_json())"
    script = SICK + asks
    if kind != "script":
        keeps = f"linecache.cache[{file!r}] = len(text), None, text.splitlines(True), {file!r}" * (kind == "cell")
        script = f"import linecache\ntext = {SICK!r}\n{keeps}\nexec(compile(text, {file!r}, 'exec'))\n{asks}"
    (tmp_path / "script.py").write_text(script)
    done = fork_server.run(["script.py"], cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    line = "scores = scores.masked_fill(scores > 1, -1e9)" if kind != "string" else ""
    first, second = found["findings"]
    assert (first["rule"], first["file"], first["line"], first["code"]) == ("large_constant", file, 14, line)
    assert (second["rule"], second["line"]) == ("loss", 19)
    assert (found["files"], bool(found["unread"])) == ([] if kind == "string" else [file], kind == "string")
