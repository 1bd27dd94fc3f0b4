"""Training command that is run for each trial, with the facts learned from its runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune_amp.command.leftovers import FOLDER, leftover_notes, load_kept
from autotune_amp.command.messages import Error
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import TRIAL_DIR, CompletedRun, run
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import RunnerError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.processes.local import TRIAL_ENVIRONMENT
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import new_folder

KEPT_LIST = "made.json"  # file of a study with the data that runs have created and that stay


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
        **agent: Any,
    ) -> CompletedRun:
        """Run the command once with `setting`: values fill its placeholders; those without a placeholder that differ
        from today's are set by the agent. `agent` are further settings of the agent. Raises `RunnerError` if the agent
        itself failed in the command's process.
        """
        outside = {} if self.today is None else self.line.outside(setting, self.today)
        if "batch_size" in outside:
            outside["maker"] = self.maker
        folder = new_folder()
        trial_dir = str(folder / TRIAL_DIR)
        arguments, files = self.line.of_setting(setting, trial_dir, seed=seed, trial_dir=trial_dir, port=free_port())
        completed = run(
            arguments,
            environment={**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
            agent={"seed": seed, "outside": outside, "sample_dim": self.sample_dim, **agent},
            folder=folder,
            files=files,
            kept=self.kept,
            deadlines=deadlines,
            is_enough=is_enough,
            watcher=watcher,
            memory_limit_bytes=memory_limit_bytes,
            output=output,
            memory=self._kept_list,
            aside=self.aside,
        )
        _raise_if_agent_failed(completed.events)
        self.kept, self.stuck = completed.kept, (*self.stuck, *completed.stuck)
        self.opened(
            [
                path
                for path in completed.opened
                if not {path, *map(str, Path(path).parents)}.intersection(completed.kept)
            ]
        )
        return completed

    def leftovers(self) -> tuple[str, ...]:
        """Return sentences for the user on the files that runs created, and where they are now."""
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
