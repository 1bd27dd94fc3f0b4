"""A search and the training run after it as two Slurm jobs, in one shell script that submits both.

The search job repeats the search whose recommendation is exported; once it has its own, the second job starts the
training run with `autotune-amp run`. A minute before its time limit a job saves and is requeued: a search resumes where
it was, on the same GPU, and your training run from the checkpoint that its `PrecisionController(on_signal=...)` saves.
The search's `--storage` is left out, since the URL may hold a password: add it. If the job has several nodes
(`--nodes=4`) the search uses all of them through Ray, if its options allow it. Tested with programs that imitate
Slurm's commands.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune_amp.core.command_template import EXAMPLE_VALUES
from autotune_amp.core.text import shell_line
from autotune_amp.integrations.export import SHEBANG, Export, origin_comment

_TRAINING = ("python", "train.py")  # in place of an unknown training command, for the user to replace

# First and last lines of a job script; the job's command runs between them, in the background. At the time limit
# Slurm sends SIGTERM to the job's shell only (B:), which forwards it with `stop_command`. The trap ends `wait` but not
# the process that it waits for, hence the second `wait`. srun itself must not get the signal: it would kill its tasks
# at once. `requeue Incomplete` does not restart a cancelled job.
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
# A Ray cluster on all nodes of the job, which ends with it; its head is on the node that runs this script. Once all
# nodes have joined, Ray runs `on_head` there.
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
    unfilled_in_files: Sequence[tuple[str, str]] = (),
    can_use_ray: bool = False,
) -> Export:
    """Return a shell script that submits the jobs, as an export.

    searching: the arguments of `autotune-amp search`, without `--storage`. None if the training script calls the search
        itself: then there is only the training job.
    training: the training command, with its placeholders such as {batch_size=4}; None if it is unknown.
    name: the training job's name; the search job's ends in "-search".
    study: the folder in which the search saves its recommendation, for `autotune-amp run`.
    origin: a line on the recommendation that is exported, for the script's first comment.
    unfilled_in_files: names of placeholders that the training run needs a value for, each with its settings file.
    can_use_ray: the search runs on all nodes of its job, if there are several.
    """
    training_command = shell_line(training or _TRAINING)
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
        lines.append(f"# Replace {training_command} with your training command.")
    elif (folder := EXAMPLE_VALUES["trial_dir"]) in training_command:
        lines.append(f"# Replace {folder} with the folder that your training run writes.")
    lines += [
        f"# In {file} replace {{{name}}} by {{{name}=VALUE}}, with the value for your training run."
        for name, file in unfilled_in_files
    ]
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
        training_command = f"autotune-amp run {shell_line([study])} -- {training_command}"
        # The cluster's name may follow the job ID.
        depends = ' --dependency="afterok:${searched%%;*}" --kill-on-invalid-dep=yes'
    options = f"{shell_line([f'--job-name={name}'])}{depends}"
    stop_tasks = 'scancel --signal=TERM "$SLURM_JOB_ID"'
    lines += _job_lines("", options, f"srun {training_command}", stop_tasks, "PrecisionController(on_signal=...) saves")
    return Export(to="slurm", text=SHEBANG + "\n".join([*lines, ""]))


def _job_lines(
    opening: str, options: str, command: str, stop_command: str, comment: str, setup_lines: Sequence[str] = ()
) -> list[str]:
    """Return the lines that submit one job: `sbatch` with the job's script as a here-document.

    opening: shell code before `sbatch`, such as the start of an assignment.
    options: the options of `sbatch` for this job.
    command: the shell command that the job runs, after `setup_lines`.
    stop_command: the shell command that makes `command` save and end.
    comment: what is saved then, for a comment in the script.
    """
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
