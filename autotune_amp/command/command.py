"""Training command that is run for each trial, with the facts learned from its runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from autotune_amp.command.leftovers import FOLDER, leftover_notes, load_kept
from autotune_amp.command.messages import Error
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import TRIAL_DIR, CompletedRun, RunFiles, RunningCommand, started
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import RunnerError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.processes.local import TRIAL_ENVIRONMENT
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import new_folder

KEPT_LIST = "made.json"  # file of a study with the data that runs have created and that stay


@dataclass
class LiveRun:
    """Processes of a measured run of a command, which are paused and can switch to another setting (see
    `agent.outside.switching`).

    They were started by `filled` (see `CommandTemplate.of_setting`) in `environment`, and have run `setting` last.
    `max_batch_size` is the largest that they have run. Closing `stack` ends them.
    """

    running: RunningCommand
    stack: contextlib.ExitStack
    filled: object
    setting: Setting
    environment: Mapping[str, str]
    sample_dim: int
    max_batch_size: int = 0

    def __post_init__(self) -> None:
        self.max_batch_size = self.setting.batch_size

    def can_switch(
        self, line: CommandTemplate, setting: Setting, environment: Mapping[str, str], sample_dim: int
    ) -> bool:
        """Whether a run of `setting` would be started in the same way, and differ in precision and batch size only."""
        return (
            (_filled(line, setting), sample_dim) == (self.filled, self.sample_dim)
            and environment == self.environment
            and replace(self.setting, precision=setting.precision, batch_size=setting.batch_size) == setting
        )


def _filled(line: CommandTemplate, setting: Setting) -> object:
    """Return the command and files of a setting, without what differs from run to run."""
    return line.of_setting(setting, "", trial_dir="", port=0, seed=0)


def _can_go_on(completed: CompletedRun) -> bool:
    """Whether the processes of a measured run can switch to another setting: one rank, which still trains."""
    is_measured = not isinstance(completed.verdict, Failure) and completed.state.status is None
    return is_measured and completed.events.world == 1 and len(completed.events.ranks) == 1


class Command:
    """Training command that is run once for each trial.

    The first run sets: `today`, the setting of the unchanged command; `maker`, the call that creates its training
    loader (see `where.maker`); `unsettable`, as in `Description`; `sample_dim`, the dimension of the model's inputs
    along which samples are counted if there is no DataLoader; `num_sharing`, the number of ranks among which a batch is
    divided. Files that runs create outside of their own folders are moved to the folder `aside`, except data, listed in
    `kept`, and files that cannot be moved, listed in `stuck`. `opened` is called with the files of code and settings
    that a run read.
    """

    def __init__(self, line: CommandTemplate) -> None:
        self.line = line
        self.today: Setting | None = None
        self.maker: str | None = None
        self.unsettable: dict[str, str] = {}
        self.sample_dim = 0
        self.num_sharing = 1
        self.kept: tuple[str, ...] = ()
        self.stuck: tuple[str, ...] = ()
        self.aside: Path | None = None
        self.opened: Callable[[Sequence[str]], object] = lambda _: None
        self._kept_list: Path | None = None
        self._live: LiveRun | None = None

    def run(
        self,
        setting: Setting,
        deadlines: Deadlines,
        is_enough: Callable[[RunEvents], bool],
        watcher: Watcher,
        *,
        seed: int = 0,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
        output: Path | None = None,
        may_switch: bool = False,
        **agent: Any,
    ) -> CompletedRun:
        """Run the command once with `setting`: values fill its placeholders; those without a placeholder that differ
        from today's are set by the agent. `agent` are further settings of the agent. Raises `RunnerError` if the agent
        itself failed in the command's process.

        With `may_switch`, the processes of a run of the same command with other values set by the agent are asked to
        switch to `setting` if they wait, and those of a measured run wait for another setting: see `LiveRun`.
        """
        outside = {} if self.today is None else self.line.outside(setting, self.today)
        whole_environment = {**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})}
        may_switch = may_switch and sys.platform == "linux"  # elsewhere paused processes could outlive this one
        live = self._live if may_switch and self.maker is not None else None
        if live is not None and live.can_switch(self.line, setting, whole_environment, self.sample_dim):
            began, values = time.monotonic(), {"batch_size": setting.batch_size, **outside, "maker": self.maker}
            switched = self._switched(live, setting, values, deadlines, is_enough, watcher, memory_limit_bytes)
            if switched is not None:
                return switched
            if deadlines.whole_seconds is not None:
                left_seconds = max(0.0, deadlines.whole_seconds - (time.monotonic() - began))
                deadlines = replace(deadlines, whole_seconds=left_seconds)
        self.end_live()
        if "batch_size" in outside:
            outside["maker"] = self.maker
        folder = new_folder()
        trial_dir = str(folder / TRIAL_DIR)
        arguments, files = self.line.of_setting(setting, trial_dir, seed=seed, trial_dir=trial_dir, port=free_port())
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(
                started(
                    arguments,
                    environment=whole_environment,
                    agent={
                        "seed": seed,
                        "outside": outside,
                        "sample_dim": self.sample_dim,
                        **({"switches": True} if may_switch else {}),
                        **agent,
                    },
                    ended=self._add_files,
                    folder=folder,
                    files=files,
                    kept=self.kept,
                    watcher=watcher,
                    output=output,
                    memory=self._kept_list,
                    aside=self.aside,
                )
            )
            completed = running.wait_for_verdict(deadlines, is_enough, memory_limit_bytes)
            assert isinstance(completed, CompletedRun)  # nothing was to be switched
            _raise_if_agent_failed(completed.events)
            if may_switch and _can_go_on(completed):
                running.pause()
                self._live = LiveRun(
                    running, stack.pop_all(), _filled(self.line, setting), setting, whole_environment, self.sample_dim
                )
        return completed

    def end_live(self) -> None:
        """End the processes that wait for another setting, if there are any."""
        live, self._live = self._live, None
        if live is not None:
            live.stack.close()

    def _switched(
        self,
        live: LiveRun,
        setting: Setting,
        values: Mapping[str, Any],
        deadlines: Deadlines,
        is_enough: Callable[[RunEvents], bool],
        watcher: Watcher,
        memory_limit_bytes: int | None,
    ) -> CompletedRun | None:
        """Return the run of `setting` in the processes of a live run; None if it has to be started on its own.

        That is after every failure but two: a timeout, as no time is left, and too little memory for a batch larger
        than all that these processes ran. The processes wait again if `setting` was measured, else the caller ends
        them.
        """
        completed = live.running.switch(values, deadlines, is_enough, watcher, memory_limit_bytes)
        if isinstance(completed, Failure):
            return None
        if not isinstance(completed.verdict, Failure):
            if _can_go_on(completed):
                live.running.pause()
                live.setting, live.max_batch_size = setting, max(live.max_batch_size, setting.batch_size)
            else:
                self.end_live()
            return completed
        is_larger = setting.batch_size > live.max_batch_size
        if completed.verdict.kind == "timeout" or (completed.verdict.kind == "oom" and is_larger):
            self.end_live()
            return completed
        return None

    def _add_files(self, files: RunFiles) -> None:
        """Record the files of a run that has ended."""
        self.kept, self.stuck = files.kept, (*self.stuck, *files.stuck)
        self.opened(
            [path for path in files.opened if not {path, *map(str, Path(path).parents)}.intersection(files.kept)]
        )

    def leftovers(self) -> tuple[str, ...]:
        """Return sentences for the user on the files that runs created, and where they are now. Ends a live run."""
        self.end_live()
        kept = self.kept if self._kept_list is None else load_kept(self._kept_list)  # also those of an interrupted run
        return leftover_notes(self.aside, kept, self.stuck)

    def keep_in(self, folder: Path) -> None:
        """From now on, move the files that runs create to a subfolder of the study's `folder`. Load the list of data
        that earlier runs created.
        """
        self._kept_list, self.aside = folder / KEPT_LIST, folder.absolute() / FOLDER
        self.kept = load_kept(self._kept_list)


def _raise_if_agent_failed(events: RunEvents) -> None:
    """Raise `RunnerError` with the traceback if the agent failed in a process of the command."""
    error = next((error for error in events.of(Error) if error.is_of_agent), None)
    if error is not None:
        raise RunnerError(
            f"autotune_amp failed while it observed the command's steps: {error.message}\n{error.traceback}",
            "This is a defect of autotune_amp, not of the command: report it with these lines.",
        )
