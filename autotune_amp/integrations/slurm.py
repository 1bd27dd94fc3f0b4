"""A search and the training run after it as two Slurm jobs, in one shell script that submits both.

The search job has the search's options; once it has a recommendation, `autotune-amp run` starts the training run. A
minute before its time limit a job saves and is requeued: a search resumes where it was, on the same GPU, and your
training run from the checkpoint saved by `on_signal`. `--storage` is left out: add it. If the job has several nodes
(`--nodes=4`) the search uses all of them through Ray, if its options allow it. Tested with programs that imitate
Slurm's commands.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune_amp.core.text import shell_line
from autotune_amp.integrations.export import SHEBANG, Export, origin_comment

_TRAINING = ("python", "train.py")

# Slurm sends the signal to the job's shell only (B:), which forwards it. The trap ends `wait` but not the process that
# it waits for, hence the second `wait`. srun itself must not get the signal: it would kill its tasks at once.
# `requeue Incomplete` does not restart a cancelled job.
_HEAD = """\
#!/bin/bash
again() {{ # at the time limit, or when preempted: {comment}
    trap '' TERM
    {stop_command}
    wait "$running"
    scontrol requeue Incomplete "$SLURM_JOB_ID"
}}
trap again TERM"""
_TAIL = """\
running=$!
wait "$running\""""
# A Ray cluster on all nodes of the job, which ends with it; its head is on the node that runs this script.
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
    """Return the script for a study in the folder `study`, with jobs called `name`.

    searching: the arguments of the search, None for a script that searches itself. The search runs on all nodes of its
        job if it `can_use_ray`.
    training: the training command that the search ran, None if it is unknown.
    """
    started = shell_line(training or _TRAINING)
    content = (
        "a training that searches itself" if searching is None else "a search, then a training with its recommendation"
    )
    lines = [
        *origin_comment(origin),
        f"# Submits {content}:",
        "#   bash THIS_FILE, with any options of sbatch, such as --partition=gpu --gpus-per-node=1",
        "# A job at its time limit is queued again: your training has to resume from its own checkpoint.",
    ]
    if training is None:
        lines.append(f"# Replace {started} with your training command.")
    if searching is not None:
        lines.append("# The search's --storage is left out, since it may hold a password: add it yourself.")
    lines += ["set -euo pipefail", ""]
    depends = ""
    if searching is not None:
        options = shell_line([f"--job-name={name}-search"]) + ("" if can_use_ray else " --nodes=1 --ntasks=1")
        ray_arguments = '"${ray[@]}" ' if can_use_ray else ""
        search = f"autotune-amp search {ray_arguments}{shell_line(searching)}"
        comment = "its measurements are saved, and the same command resumes"
        setup_lines = [_CLUSTER] if can_use_ray else []
        lines += [*_job_lines("searched=$(", options, search, 'kill -TERM "$running"', comment, setup_lines), ")"]
        started = f"autotune-amp run {shell_line([study])} -- {started}"
        # The cluster's name may follow the job ID.
        depends = ' --dependency="afterok:${searched%%;*}" --kill-on-invalid-dep=yes'
    options = f"{shell_line([f'--job-name={name}'])}{depends}"
    stop_tasks = 'scancel --signal=TERM "$SLURM_JOB_ID"'
    lines += _job_lines("", options, f"srun {started}", stop_tasks, "PrecisionController(on_signal=...) saves")
    return Export(to="slurm", text=SHEBANG + "\n".join([*lines, ""]))


def _job_lines(
    opening: str, options: str, command: str, stop_command: str, comment: str, setup_lines: Sequence[str] = ()
) -> list[str]:
    fixed_options = "--requeue --open-mode=append --signal=B:TERM@60"
    submit = f"{opening}sbatch --parsable \"$@\" {options} {fixed_options} <<'JOB'"
    return [
        submit,
        _HEAD.format(stop_command=stop_command, comment=comment),
        *setup_lines,
        f"{command} &",
        _TAIL,
        "JOB",
    ]
