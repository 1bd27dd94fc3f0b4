"""A search and the training after it as two jobs of Slurm: one script for the shell that submits both."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from autotune_amp.integrations.export import SHEBANG, Export, origin_comment

_TRAINING = ("python", "train.py")

# Slurm signals the shell of the job alone (B:), which has to pass it on; a trap ends a `wait`, not what is waited for.
_HEAD = """\
#!/bin/bash
again() {{ # the time is up, or the job makes way for another: {what}
    trap '' TERM
    kill -TERM "$running"
    wait "$running"
    scontrol requeue "$SLURM_JOB_ID"
}}
trap again TERM"""
_TAIL = """\
running=$!
wait "$running\""""


def slurm(
    searching: Sequence[str] | None, training: Sequence[str] | None, *, name: str, study: str, origin: str
) -> Export:
    """The script for a study in the folder `study`, whose jobs are called `name`.

    searching: the arguments of the search, None for that of a script which searches itself.
    training: the training's command as the search was given it, None where nobody has said it.
    """
    ours = shlex.join(training or _TRAINING)
    started = ours if searching is None else f"autotune-amp run {shlex.quote(study)} -- {ours}"
    usage = "bash THIS_FILE, with any options of sbatch for both jobs, such as --partition=gpu --gpus-per-task=1"
    lines = [
        *origin_comment(origin),
        f"# Submits {'a training that searches itself' if searching is None else 'a search, then a training with it'}:",
        f"#   {usage}",
        "# Run it where both commands run. The options of one job alone belong into its own line below.",
        "set -euo pipefail",
        "",
    ]
    first, depends = [], ""
    if searching is not None:
        depends = ' --dependency="afterok:$searched" --kill-on-invalid-dep=yes'
        kept = "what was measured is kept, and the same command goes on"
        command = shlex.join(["autotune-amp", "search", *searching])
        first = _job("searched=$(", f"--job-name={name}-search --nodes=1 --ntasks=1", command, kept, ")")
    if training is None:
        lines.insert(-2, f"# Put your own training in the place of {ours}.")
    saved = "PrecisionController(on_signal=...) has saved"
    second = _job("", f"--job-name={name}{depends}", f"srun {started}", saved, "")
    return Export(to="slurm", text=SHEBANG + "\n".join([*lines, *first, *second, ""]))


def _job(before: str, options: str, command: str, what: str, after: str) -> list[str]:
    submit = f"{before}sbatch --parsable {options} --requeue --signal=B:TERM@60 \"$@\" <<'JOB'"
    return [submit, _HEAD.format(what=what), f"{command} &", _TAIL, "JOB", *([after] if after else [])]
