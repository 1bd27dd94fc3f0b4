"""Searches a script by its command, then runs the answered command without autotune_amp: `python launch.py NAME…`.

Of each case: results/NAME.json, which holds the recommendation and NUM_RUNS paces of pace.py, of today's command and of
the answer in turn. What the answered command has no argument for is written into a copy of the script by
`autotune-amp apply --write`. A case that has its file is not run again. --work says where scripts are copied and data
is made.
"""

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cases import CASES, Case
from msgspec import convert

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.setting import Setting

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NUM_RUNS = 3
RUN_SECONDS = 600


def prepared(name: str, case: Case, work: Path, mirrors: Path) -> Path:
    """The folder that the command runs in, with the script and its data; made once."""
    folder = work / name
    if not (folder / ".made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if case.paths:
            _copy(case, folder, mirrors)
        (folder / case.folder).mkdir(exist_ok=True)
        case.make(folder / case.folder)
        (folder / ".made").touch()
    return folder / case.folder


def _copy(case: Case, folder: Path, mirrors: Path) -> None:
    git, tar = shutil.which("git") or "git", shutil.which("tar") or "tar"
    repository, _, commit = case.source.partition("@")
    mirror = mirrors / repository.replace("/", "+") / "repo"
    if not mirror.exists():
        mirror = mirrors / repository.replace("/", "+")
        subprocess.run([git, "clone", "--quiet", f"https://github.com/{repository}", mirror], check=True)
        mirror = mirror / ".git"
    archive = subprocess.run(
        [git, f"--git-dir={mirror}", "archive", commit, *case.paths], check=True, stdout=subprocess.PIPE
    )
    subprocess.run([tar, "-x", "-C", folder], input=archive.stdout, check=True)


def search(name: str, case: Case, folder: Path, budget: int, out: Path) -> dict:
    """What became of `autotune-amp search -- COMMAND`."""
    words = _search_words(name, budget, out)
    return ours(case, folder, *words, *case.options, command=shlex.split(case.command))


def search_in_process(name: str, case: Case, folder: Path, budget: int, out: Path) -> dict:
    """What became of the search of in_process.py's workload, the same training."""
    words = _search_words(f"{name}_in_process", budget, out)
    return ours(case, folder, *words, *case.in_process, f"{HERE / 'in_process.py'}:{name}")


def _search_words(study: str, budget: int, out: Path) -> list[str]:
    return ["search", "--budget", str(budget), "--out", str(out), "--study", study, "--fresh"]


def ours(case: Case, folder: Path, *words: str, command: Sequence[str] = ()) -> dict:
    """How long a command of autotune_amp took, its status, and the document that it printed: an error's too."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", *words, "--json", *(["--", *command] if command else [])],
        cwd=folder,
        env=_environment(case),
        stdout=subprocess.PIPE,
        check=False,
    )
    document = json.loads(done.stdout) if done.stdout.strip() else {}
    return {"seconds": time.monotonic() - began, "status": done.returncode, "document": document}


def attain(case: Case, folder: Path, other: Path, study: Path, document: dict) -> dict:
    """The paces of today's command and of the answer in turn; what `apply` did to the script in the folder `other`
    where the answer needs an edit."""
    line = convert(document["launch_line"], CommandTemplate)
    today, answer = (
        convert(each, Setting) for each in (document["evidence"]["baseline"]["config"], document["config"])
    )
    answers = document["config"]["environment"]
    runs, found = {"today": (folder, line, today, {}), "answer": (folder, line, answer, answers)}, {}
    if line.outside(answer, today):
        with tempfile.TemporaryDirectory() as trial_dir:
            command, _ = _filled(line, answer, trial_dir)
            found["applied"] = ours(case, other, "apply", "--write", str(study), command=command)
        henceforth = found["applied"]["document"].get("command") or command
        runs["answer"] = (other, CommandTemplate.of(shlex.join(henceforth)), answer, answers)
        if not found["applied"]["document"].get("verified"):  # what is left to do by hand nobody did
            del runs["answer"]
    paces = [{"of": of, **pace(case, *each)} for _ in range(NUM_RUNS) for of, each in runs.items()]
    return {**found, "paces": paces}


def pace(case: Case, folder: Path, line: CommandTemplate, setting: Setting, environment: dict[str, str]) -> dict:
    """The command filled with `setting`, run by pace.py in place of what would run the script."""
    with tempfile.TemporaryDirectory() as trial_dir:
        filled, _ = _filled(line, setting, trial_dir)
        measured = Path(trial_dir, "pace.json")
        done = subprocess.run(
            timed(filled),
            cwd=folder,
            env={**_environment(case), **environment, "PACE": str(measured)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=RUN_SECONDS,
            check=False,
            text=True,
        )
        if not measured.exists():
            return {"command": shlex.join(filled), "error": done.stderr[-2000:]}
        return {"command": shlex.join(filled), **json.loads(measured.read_text())}


def _filled(line: CommandTemplate, setting: Setting, trial_dir: str) -> tuple[tuple[str, ...], dict[str, str]]:
    return line.of_setting(setting, trial_dir, seed=0, trial_dir=trial_dir, port=_free_port())


def timed(arguments: tuple[str, ...]) -> list[str]:
    """pace.py before the script, whatever starts it."""
    scripts = [number for number, argument in enumerate(arguments) if argument.endswith(".py")]
    at = scripts[0] if scripts else max(number for number, argument in enumerate(arguments) if argument == "-m")
    return [*arguments[:at], str(HERE / "pace.py"), *arguments[at:]]


def _environment(case: Case) -> dict[str, str]:
    extra = dict(case.environment)
    paths = [each for each in (extra.pop("PYTHONPATH", ""), str(ROOT)) if each]
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    return {**os.environ, **offline, **extra, "PYTHONPATH": ":".join(paths), "PATH": binaries}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--budget", type=int, default=150)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "studies_launch")
    parser.add_argument("--mirrors", type=Path, help="git mirrors, OWNER+NAME/repo; cloned where they are not")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    for name in options.names:
        result = options.results / f"{name}.json"
        if result.exists():
            continue
        case = CASES[name]
        folder = prepared(name, case, options.work, options.mirrors or options.work / "mirrors")
        found = search(name, case, folder, options.budget, options.work / "found")
        if found["status"] == 0:
            shutil.rmtree(options.work / "applied" / name, ignore_errors=True)
            other = prepared(name, case, options.work / "applied", options.mirrors or options.work / "mirrors")
            found |= attain(case, folder, other, options.work / "found" / name, found["document"])
        if case.in_process is not None:
            found["in_process"] = search_in_process(name, case, folder, options.budget, options.work / "found")
        result.parent.mkdir(parents=True, exist_ok=True)
        said = json.dumps({"command": case.command, "source": case.source, **found}, indent=1)
        result.write_text(said.replace(f"{options.work}/", ""))  # where it was run says nothing
        print(name, found["status"], f"{found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
