"""A search and the training after it as two jobs of Slurm: one script for the shell that submits both.

The search comes with its options and, once it has an answer, the training by `autotune-amp run`. A minute before its
time is up a job saves and is queued again: a search goes on where it was, on the same card, and your training from
what `on_signal` saved. `--storage` is left out of it: add it. Of a job with several nodes (`--nodes=4`) the search
uses all, through Ray, where what was asked for allows it. Tried with stand-ins for Slurm's commands.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune_amp.core.text import shell_line
from autotune_amp.integrations.export import SHEBANG, Export, origin_comment

_TRAINING = ("python", "train.py")

# Slurm signals the shell of the job alone (B:), which has to pass it on; a trap ends a `wait`, not what is waited for.
# srun must not get it: it would kill its tasks at once. A job that was cancelled is not to come back (Incomplete).
_HEAD = """\
#!/bin/bash
again() {{ # the time is up, or the job makes way for another: {what}
    trap '' TERM
    {passed_on}
    wait "$running"
    scontrol requeue Incomplete "$SLURM_JOB_ID"
}}
trap again TERM"""
_TAIL = """\
running=$!
wait "$running\""""
# A cluster on all nodes of the job, which ends with it; its head is on the node where this script runs.
_CLUSTER = """\
ray=()
if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    address="$(hostname):6379"
    all_there="$(mktemp -u)"
    export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
    on_head=(bash -c "touch $all_there; sleep infinity") # once all nodes have come
    srun --ntasks-per-node=1 ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \\
        "${on_head[@]}" &
    for _ in {1..300}; do
        [ -e "$all_there" ] && break
        sleep 1
    done
    rm -f "$all_there"
    ray=(--ray "$address")
fi"""


def slurm(
    searching: Sequence[str] | None,
    training: Sequence[str] | None,
    *,
    name: str,
    study: str,
    origin: str,
    can_use_ray: bool = False,
) -> Export:
    """The script for a study in the folder `study`, whose jobs are called `name`.

    searching: the arguments of the search, None for that of a script which searches itself. It runs on all nodes of its
        job where it `can_use_ray`.
    training: the training's command as the search was given it, None where nobody has said it.
    """
    started = shell_line(training or _TRAINING)
    what = "a training that searches itself" if searching is None else "a search, then a training with its answer"
    lines = [
        *origin_comment(origin),
        f"# Submits {what}:",
        "#   bash THIS_FILE, with any options of sbatch, such as --partition=gpu --gpus-per-node=1",
        "# A job that is out of time is queued again: the training has to go on from what it saved.",
    ]
    if training is None:
        lines.append(f"# Put your own training in the place of {started}.")
    if searching is not None:
        lines.append("# The search's --storage is left out, since it may hold a password: add it yourself.")
    lines += ["set -euo pipefail", ""]
    depends = ""
    if searching is not None:
        options = shell_line([f"--job-name={name}-search"]) + ("" if can_use_ray else " --nodes=1 --ntasks=1")
        on_nodes = '"${ray[@]}" ' if can_use_ray else ""
        search = f"autotune-amp search {on_nodes}{shell_line(searching)}"
        kept = "what was measured is kept, and the same command goes on"
        before = [_CLUSTER] if can_use_ray else []
        lines += [*_job("searched=$(", options, search, 'kill -TERM "$running"', kept, before), ")"]
        started = f"autotune-amp run {shell_line([study])} -- {started}"
        # The name of a cluster may follow the job's number.
        depends = ' --dependency="afterok:${searched%%;*}" --kill-on-invalid-dep=yes'
    options = f"{shell_line([f'--job-name={name}'])}{depends}"
    to_its_tasks = 'scancel --signal=TERM "$SLURM_JOB_ID"'
    lines += _job("", options, f"srun {started}", to_its_tasks, "PrecisionController(on_signal=...) saves")
    return Export(to="slurm", text=SHEBANG + "\n".join([*lines, ""]))


def _job(opening: str, options: str, command: str, passed_on: str, what: str, before: Sequence[str] = ()) -> list[str]:
    always = "--requeue --open-mode=append --signal=B:TERM@60"
    submit = f"{opening}sbatch --parsable \"$@\" {options} {always} <<'JOB'"
    return [submit, _HEAD.format(passed_on=passed_on, what=what), *before, f"{command} &", _TAIL, "JOB"]
