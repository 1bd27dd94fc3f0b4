from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from autotune_amp import __version__, errors
from autotune_amp.cli import run
from autotune_amp.config import AmpConfig
from autotune_amp.hardware.types import DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.recommendation import (
    BaselineEvidence,
    Evidence,
    Exclusion,
    Fingerprint,
    Recommendation,
    SearchSummary,
)
from autotune_amp.report.failure import error_document, error_text, exit_code

if TYPE_CHECKING:
    from pathlib import Path

EXCLUDED = (
    Exclusion(precision="fp16", batch_size=8, reason="out of memory"),
    Exclusion(precision="fp8", batch_size=None, reason="no kernels"),
)


def command_line(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`autotune-amp` as a user starts it, in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "autotune_amp", *arguments], capture_output=True, text=True, cwd=folder, timeout=60
    )


def recommendation(study: str = "quiet-otter") -> Recommendation:
    config = AmpConfig(precision="bf16", batch_size=64)
    return Recommendation(
        config=config,
        evidence=Evidence(
            samples_per_second=412.3,
            samples_per_second_interval=(398.0, 426.0),
            step_seconds=0.155,
            peak_memory_bytes=1 << 30,
            baseline=BaselineEvidence(
                config=config,
                samples_per_second=None,
                samples_per_second_interval=None,
                step_seconds=None,
                peak_memory_bytes=None,
                reason="out of memory",
            ),
            speedup=None,
            speedup_interval=None,
            num_processes=3,
            is_confirmed=True,
            data_share=0.0,
        ),
        reason="It is the fastest.",
        warnings=(),
        excluded=EXCLUDED,
        candidates=(),
        search=SearchSummary(study=study, num_trials=1, num_failures=0, seconds=1.0),
        hardware=Hardware(
            device="cpu",
            identity=DeviceIdentity(type="cpu", name="caf\u00e9 processor", num_cpus=2, total_memory_bytes=1 << 30),
            memory=DeviceMemory(total=1 << 30, free=1 << 29, available=1 << 29),
            precisions={},
        ),
        versions={},
        fingerprint=Fingerprint(digest="", parts={}),
    )


def saved(folder: Path, study: str = "quiet-otter") -> Path:
    path = folder / "studies" / study / "recommendation.json"
    path.parent.mkdir(parents=True)
    recommendation(study).save(path)
    return path


# --- help and version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = command_line(*arguments, folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: autotune-amp ")
    assert [command for command in ("search", "probe", "show") if f"  {command} " in done.stdout] == [
        "search",
        "probe",
        "show",
    ]
    assert done.stderr == ""


def test_help_of_search_names_every_option(tmp_path: Path) -> None:
    done = command_line("search", "--help", folder=tmp_path)
    options = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  --")]
    assert options == [
        "--budget",
        "--trials",
        "--device",
        "--precision",
        "--batch-size",
        "--effective-batch-size",
        "--baseline",
        "--memory-fraction",
        "--study",
        "--out",
        "--storage",
        "--seed",
        "--fresh",
        "--json",
        "--quiet",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['autotune-amp', 'search', '--help']\n"
        "from autotune_amp.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    modules = done.stderr.split()
    assert "autotune_amp.cli" in modules
    assert {"torch", "optuna", "rich", "msgspec"}.isdisjoint(modules)


def test_version(tmp_path: Path) -> None:
    done = command_line("--version", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"autotune-amp {__version__}\n", "")


# --- wrong requests ------------------------------------------------------------------------------------------------

WRONG = [
    (("search", "--bogus"), "--bogus"),
    (("search", "--budget", "abc"), "--budget"),
    (("search", "--trials"), "--trials"),
    (("search", "a", "b"), "b"),
    (("bogus",), "bogus"),
    (("--bogus",), "--bogus"),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG)
def test_usage_error_is_said_with_the_next_step(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = command_line(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("Error: ")
    assert named in first
    place = "autotune-amp search" if arguments[0] == "search" else "autotune-amp"
    assert second == f"Next step: See `{place} --help`."


@pytest.mark.parametrize(("arguments", "named"), WRONG[:2])
def test_usage_error_is_a_document_too(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = command_line(*arguments, "--json", folder=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert sorted(document) == ["best", "error", "excluded", "format"]
    assert (document["format"], document["excluded"], document["best"]) == (1, [], None)
    assert sorted(document["error"]) == ["kind", "message", "next_step"]
    assert document["error"]["kind"] == "invalid_request"
    assert named in document["error"]["message"]
    assert named in done.stderr


# --- show ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["studies/quiet-otter", "studies/quiet-otter/recommendation.json", "studies", None])
def test_show_finds_the_recommendation(given: str | None, tmp_path: Path) -> None:
    saved(tmp_path)
    done = command_line("show", *([given] if given else []), folder=tmp_path)
    assert done.returncode == 0
    assert "bf16, batch size 64" in done.stdout
    assert done.stderr == ""


def test_show_without_folder_takes_the_latest(tmp_path: Path) -> None:
    for study, age in (("older", 2000), ("latest", 1000), ("oldest", 3000)):
        path = saved(tmp_path, study)
        os.utime(path, (10_000 - age, 10_000 - age))
    assert "Study latest:" in command_line("show", folder=tmp_path).stdout


def test_show_json_is_the_document(tmp_path: Path) -> None:
    path = saved(tmp_path)
    done = command_line("show", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 2}', "has format 2"),
        ("[]", "is damaged"),
    ],
)
def test_show_of_a_file_that_cannot_be_read(content: str, said: str, tmp_path: Path) -> None:
    saved(tmp_path).write_text(content)
    done = command_line("show", "--json", folder=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert document["error"]["kind"] == "format"
    assert said in document["error"]["message"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("given", ["missing", "missing/recommendation.json", ".", "x" * 5000, None])
def test_show_of_nothing(given: str | None, tmp_path: Path) -> None:
    done = command_line("show", *([given] if given else []), folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {given or 'studies'} ")
    assert "Next step: " in done.stderr
    assert "Traceback" not in done.stderr


def test_stdout_in_ascii_gets_every_row(tmp_path: Path) -> None:
    saved(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", "show"],
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf? processor" in done.stdout


# --- standard output that nobody reads -----------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "code"), [(("show",), 0), (("show", "--json"), 0), (("show", "x", "--json"), 2)])
def test_reader_that_went_away_is_no_error(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    saved(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    os.close(writer)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    saved(tmp_path)
    shell = f"{sys.executable} -m autotune_amp show >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], cwd=tmp_path, timeout=60).returncode == 0


# --- errors --------------------------------------------------------------------------------------------------------

PLAIN = [
    (errors.AutotuneAmpError, 1, "autotune_amp"),
    (errors.InvalidRequestError, 2, "invalid_request"),
    (errors.WorkloadError, 2, "workload"),
    (errors.DeviceError, 2, "device"),
    (errors.StudyError, 2, "study"),
    (errors.StudyBusyError, 2, "study_busy"),
    (errors.FormatError, 2, "format"),
    (errors.BudgetTooSmallError, 2, "budget_too_small"),
    (errors.RunnerError, 1, "runner"),
]
NOTHING_WORKS = errors.NothingWorksError("Nothing works.", "Try less.", EXCLUDED)
INTERRUPTED = errors.SearchInterruptedError("Interrupted.", "Go on.", EXCLUDED, recommendation())
INTERRUPTED_EARLY = errors.SearchInterruptedError("Interrupted.", "Go on.", (), None)
EXCLUDED_DOCUMENT = [
    {"precision": "fp16", "batch_size": 8, "reason": "out of memory"},
    {"precision": "fp8", "batch_size": None, "reason": "no kernels"},
]


@pytest.mark.parametrize(("kind", "code", "name"), PLAIN)
def test_error_becomes_a_document(kind: type[errors.AutotuneAmpError], code: int, name: str) -> None:
    error = kind("What \udcff was.", "What to do.")
    assert exit_code(error) == code
    assert json.loads(error_document(error)) == {
        "format": 1,
        "error": {"kind": name, "message": "What \udcff was.", "next_step": "What to do."},
        "excluded": [],
        "best": None,
    }
    assert error_text(error) == "Error: What \udcff was.\nNext step: What to do.\n"


def test_every_error_class_has_its_exit_code_tested() -> None:
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    tested = {kind for kind, _, _ in PLAIN} | {type(NOTHING_WORKS), type(INTERRUPTED)}
    assert classes == tested


def test_nothing_works_gives_every_reason() -> None:
    document = json.loads(error_document(NOTHING_WORKS))
    assert exit_code(NOTHING_WORKS) == 3
    assert document["error"]["kind"] == "nothing_works"
    assert document["excluded"] == EXCLUDED_DOCUMENT
    assert error_text(NOTHING_WORKS).splitlines() == [
        "Error: Nothing works.",
        "  fp16 batch 8: out of memory",
        "  fp8: no kernels",
        "Next step: Try less.",
    ]


def test_interruption_carries_the_best() -> None:
    document = json.loads(error_document(INTERRUPTED))
    assert exit_code(INTERRUPTED) == 130
    assert document["error"]["kind"] == "search_interrupted"
    assert document["excluded"] == EXCLUDED_DOCUMENT
    assert document["best"] == json.loads(recommendation().to_json())
    assert json.loads(error_document(INTERRUPTED_EARLY))["best"] is None


class Api:
    """Stands in for autotune_amp.api: remembers what it was asked, then raises or returns `answer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: BaseException | Recommendation) -> None:
        self.answer = answer
        self.target: object = None
        self.options: dict[str, Any] = {}
        module = types.ModuleType("autotune_amp.api")
        vars(module)["recommend_config"] = self.recommend_config
        monkeypatch.setitem(sys.modules, "autotune_amp.api", module)

    def recommend_config(self, target: object, **options: Any) -> Recommendation:
        self.target, self.options = target, options
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (errors.BudgetTooSmallError("Too small.", "Give 20 s."), 2),
        (NOTHING_WORKS, 3),
        (INTERRUPTED, 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_search_that_fails_prints_one_document(
    answer: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Api(monkeypatch, answer)
    assert run(["search", "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["format"] == 1
    assert captured.err.startswith("Error: ")


def test_interrupted_search_prints_the_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Api(monkeypatch, INTERRUPTED)
    assert run(["search"]) == 130
    captured = capsys.readouterr()
    assert "bf16, batch size 64" in captured.out
    assert captured.err == "Error: Interrupted.\nNext step: Go on.\n"


@pytest.mark.parametrize("fault", [BrokenPipeError("ours"), EOFError("ours"), ValueError("ours")])
def test_our_own_faults_are_not_hidden(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    Api(monkeypatch, fault)
    with pytest.raises(type(fault), match="ours"):
        run(["search"])


def test_search_prints_the_recommendation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Api(monkeypatch, recommendation())
    assert run(["search", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(recommendation().to_json())
    assert captured.err == ""


def test_search_without_options_asks_for_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(monkeypatch, recommendation())
    assert run(["search"]) == 0
    assert api.target is None
    assert api.options.pop("progress") is not None
    assert api.options == {
        "budget": 90.0,
        "trials": None,
        "device": "auto",
        "precision": None,
        "batch_size": None,
        "effective_batch_size": None,
        "baseline": None,
        "memory_fraction": 0.9,
        "study": None,
        "out": "studies",
        "storage": None,
        "seed": 0,
        "fresh": False,
        "quiet": False,
    }


def test_search_passes_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(monkeypatch, recommendation())
    line = (
        "search train.py:workload --budget 120 --trials 3 --device cuda:1 --precision fp32 --precision bf16 "
        "--batch-size 8:64 --effective-batch-size 128 --baseline fp32:32 --memory-fraction 0.5 --study s --out o "
        "--storage sqlite:///x.db --seed 7 --fresh --quiet"
    )
    assert run(line.split()) == 0
    assert api.target == "train.py:workload"
    assert api.options == {
        "budget": 120.0,
        "trials": 3,
        "device": "cuda:1",
        "precision": ["fp32", "bf16"],
        "batch_size": "8:64",
        "effective_batch_size": 128,
        "baseline": "fp32:32",
        "memory_fraction": 0.5,
        "study": "s",
        "out": "o",
        "storage": "sqlite:///x.db",
        "seed": 7,
        "fresh": True,
        "quiet": True,
        "progress": None,
    }


@pytest.mark.parametrize("is_json", [False, True])
def test_probe_prints_the_hardware(
    is_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("autotune_amp.hardware")
    asked: list[str] = []
    vars(module)["probe"] = lambda device: (asked.append(device), recommendation().hardware)[1]
    monkeypatch.setitem(sys.modules, "autotune_amp.hardware", module)
    assert run(["probe", "--device", "cpu", *(["--json"] if is_json else [])]) == 0
    assert asked == ["cpu"]
    out = capsys.readouterr().out
    if is_json:
        document = json.loads(out)
        assert (document["format"], document["hardware"]["device"]) == (1, "cpu")
    else:
        assert "512 MiB free of 1.00 GiB" in out
