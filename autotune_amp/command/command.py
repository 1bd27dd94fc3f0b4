"""Training command that is run for each trial, with the facts learned from its runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from autotune_amp.command.leftovers import FOLDER, leftover_notes, load_kept
from autotune_amp.command.messages import Error, Switchable
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import TRIAL_DIR, CompletedRun, RunningCommand
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
class HeldRun:
    """Measured run of a command whose training waits for other values (see `agent.outside.switching`).

    `start` is what it was started with, apart from the values that can be switched, and `settings` those that it has
    run, each once: a second measurement in the same process would not show how processes differ.
    """

    running: RunningCommand
    start: tuple[object, ...]
    settings: list[Setting]
    is_on_cpu: bool = False


class Command:
    """Training command that is run once for each trial, or for several trials if its training can switch.

    The first run sets: `today`, the setting of the unchanged command; `maker`, the call that creates its training
    loader (see `where.maker`); `unsettable`, as in `Description`; `sample_dim`, the dimension of the model's inputs
    along which samples are counted if there is no DataLoader; `num_sharing`, the number of ranks among which a batch is
    divided; `switch_problem`, the reason why its training cannot go over to other values, None if it can. Files that
    runs create outside of their own folders are moved to the folder `aside`, except data, listed in `kept`, and files
    that cannot be moved, listed in `stuck`. `opened` is called with the files of code and settings that a run read.
    """

    def __init__(self, line: CommandTemplate) -> None:
        self.line = line
        self.today: Setting | None = None
        self.maker: str | None = None
        self.unsettable: dict[str, str] = {}
        self.sample_dim = 0
        self.num_sharing = 1
        self.switch_problem: str | None = None
        self._held: HeldRun | None = None
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
        may_hold: bool = False,
        **agent: Any,
    ) -> CompletedRun:
        """Run the command once with `setting`: values fill its placeholders; those without a placeholder that differ
        from today's are set by the agent. `agent` are further settings of the agent. Raises `RunnerError` if the agent
        itself failed in the command's process.

        With `may_hold`, the training waits for `switch` once it is measured, if it can switch. The next run ends it.
        """
        self.end_held()
        may_hold = may_hold and self.switch_problem is None and bool(self._fields_without_placeholder)
        folder = new_folder()
        trial_dir = str(folder / TRIAL_DIR)
        arguments, files = self.line.of_setting(setting, trial_dir, seed=seed, trial_dir=trial_dir, port=free_port())
        running = RunningCommand.start(
            arguments,
            environment={**os.environ, **TRIAL_ENVIRONMENT, **(environment or {})},
            agent={
                "seed": seed,
                "outside": self._outside(setting),
                "sample_dim": self.sample_dim,
                **({"switches": True} if may_hold else {}),
                **agent,
            },
            folder=folder,
            files=files,
            kept=self.kept,
            watcher=watcher,
            output=output,
            memory=self._kept_list,
            aside=self.aside,
        )
        self._held = HeldRun(running, self._start(setting, seed, environment), [setting])
        return self._hold_or_end(
            lambda: running.wait_for_verdict(deadlines, is_enough, memory_limit_bytes), may_hold=may_hold
        )

    def switch(
        self,
        setting: Setting,
        deadlines: Deadlines,
        is_enough: Callable[[RunEvents], bool],
        watcher: Watcher,
        *,
        seed: int = 0,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> CompletedRun | None:
        """Run `setting` in the process of the run before, if its training waits and a start would differ in a precision
        or batch size set by the agent only; else return None.

        On a CPU, memory that malloc has kept from a larger batch would make a smaller one faster: that needs a start.
        """
        held = self._held
        if held is None or held.start != self._start(setting, seed, environment) or setting in held.settings:
            return None
        if held.is_on_cpu and setting.batch_size < self.largest_held_batch:
            return None
        held.settings.append(setting)
        size = None if "batch_size" in self.line.placeholders else setting.batch_size
        return self._hold_or_end(
            lambda: held.running.switch(
                size, self._outside(setting), deadlines, is_enough, watcher, memory_limit_bytes
            ),
            may_hold=True,
        )

    @property
    def largest_held_batch(self) -> int:
        """Return the largest batch size that the waiting run has had, 0 if no run waits."""
        return 0 if self._held is None else max(setting.batch_size for setting in self._held.settings)

    @property
    def switched_fields(self) -> tuple[str, ...]:
        """Return the fields of a setting that a running training can switch; none if it cannot."""
        if self.switch_problem is not None:
            return ()
        return tuple(sorted(self._fields_without_placeholder - self.unsettable.keys()))

    @property
    def _fields_without_placeholder(self) -> set[str]:
        return {"precision", "batch_size"} - self.line.placeholders.keys()

    def set_today(self, today: Setting, maker: str | None) -> None:
        """Record the setting of the unchanged command, with which the latest run was made, and its loader's maker."""
        self.today, self.maker = today, maker
        if self._held is not None:
            self._held.settings = [today]

    def _start(self, setting: Setting, seed: int, environment: Mapping[str, str] | None) -> tuple[object, ...]:
        """Return what a start of `setting` depends on, apart from the values that can be switched.

        TF32 is never switched: the script may have set its flags after the agent did.
        """
        other = replace(setting, precision="fp32", batch_size=1)
        sets_tf32 = (
            self.today is not None
            and setting.precision != self.today.precision
            and ("tf32" in (setting.precision, self.today.precision) and setting.precision in ("fp32", "tf32"))
        )
        filled = self.line.of_setting(setting, "", trial_dir="", port=0, seed=seed)
        return filled, other, sets_tf32, seed, self.sample_dim, environment or {}

    def _outside(self, setting: Setting) -> dict[str, Any]:
        """Return the values of `setting` that the agent sets, and the call that makes the loader of its batch size."""
        outside = {} if self.today is None else self.line.outside(setting, self.today)
        return {**outside, "maker": self.maker} if "batch_size" in outside else outside

    def _hold_or_end(self, wait: Callable[[], CompletedRun], *, may_hold: bool) -> CompletedRun:
        """Return the completed run that `wait` returns; its training is held for `switch` if it can be, else ended."""
        assert self._held is not None
        can_hold = False
        try:
            completed = wait()
            _raise_if_agent_failed(completed.events)
            can_hold = may_hold and self._can_hold(completed)
        finally:
            if not can_hold:
                self.end_held()
        if can_hold:
            devices = {
                each for rank in completed.events.ranks.values() for o in rank.optimizers.values() for each in o.devices
            }
            self._held.is_on_cpu = devices == {"cpu"}
            self._held.running.hold()
        return completed

    def _can_hold(self, completed: CompletedRun) -> bool:
        """Whether the training of a measured run can go over to other values; records why it cannot."""
        events = completed.events
        if isinstance(completed.verdict, Failure) or completed.state.status is not None:
            return False
        answer = next((message for message in events.of(Switchable) if message.pid in events.ranks), None)
        if events.world > 1:
            self.switch_problem = "it has several ranks"
        elif answer is None:
            self.switch_problem = "it trains without a DataLoader of torch"
        else:
            self.switch_problem = answer.problem
        return self.switch_problem is None

    def end_held(self) -> None:
        """End the run whose training waits, if there is one, and record its files."""
        held, self._held = self._held, None
        if held is not None:
            files = held.running.end()
            self.kept, self.stuck = files.kept, (*self.stuck, *files.stuck)
            self.opened(
                [path for path in files.opened if not {path, *map(str, Path(path).parents)}.intersection(files.kept)]
            )

    def leftovers(self) -> tuple[str, ...]:
        """End a run that waits, and return sentences for the user on the files that runs created and where they are."""
        self.end_held()
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
