"""Training command with the facts learned from its runs: today's setting, what can be set, and the files that it
leaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune_amp.command.leftovers import FOLDER, leftover_notes, remembered
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import TRIAL_DIR, CompletedRun, run
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.job import Deadlines
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.processes.local import TRIAL_ENVIRONMENT
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import new_folder


class Command:
    """Launch line that is run many times.

    Set once the command was observed: `today`, the setting that it runs; `maker`, the place that makes its training
    loader; `unsettable`, as in `Description`; `sample_dim`, the dimension of the model's inputs along which samples are
    counted if there is no DataLoader; `num_sharing`, the number of ranks that divide the batch size among them. Files
    that runs leave outside of their own folders are moved to the folder `aside`, except data, whose paths are in
    `kept`, and those that cannot be moved, in `stuck`. `opened` is called with the files of code and settings that a
    run read.
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
        self._memory: Path | None = None

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
        """Run the command once, filled with `setting`. A value without a placeholder that differs from today's is set
        from outside.
        """
        outside = {} if self.today is None else self.line.outside(setting, self.today)
        if "batch_size" in outside:
            outside["maker"] = self.maker
        folder = new_folder()
        trial_dir = str(folder / TRIAL_DIR)
        arguments, files = self.line.of_setting(setting, trial_dir, seed=seed, trial_dir=trial_dir, port=free_port())
        ran = run(
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
            memory=self._memory,
            aside=self.aside,
        )
        self.kept, self.stuck = ran.kept, (*self.stuck, *ran.stuck)
        self.opened([path for path in ran.opened if not {path, *map(str, Path(path).parents)}.intersection(ran.kept)])
        return ran

    def leftovers(self) -> tuple[str, ...]:
        """Return sentences about the files that runs left, and where they are now."""
        kept = self.kept if self._memory is None else remembered(self._memory)  # of a run that was interrupted too
        return leftover_notes(self.aside, kept, self.stuck)

    def keep_in(self, folder: Path) -> None:
        """Move files that runs leave into a study's `folder` from now on, and load the list of the data that earlier
        runs made.
        """
        self._memory, self.aside = folder / "made.json", folder.absolute() / FOLDER
        self.kept = remembered(self._memory)
