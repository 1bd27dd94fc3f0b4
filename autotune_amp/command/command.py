"""Training command that is run for each trial, with the facts learned from its runs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from autotune_amp.command.leftovers import FOLDER, clear_up_after_killed, existing_outermost, leftover_notes, load_kept
from autotune_amp.command.messages import Error
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import TRIAL_DIR, CommandRun, CompletedRun
from autotune_amp.command.together import RunsTogether, is_crowded, num_fitting
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


class RunRequest(NamedTuple):
    """Request for a run, which can be a key.

    Values of `setting` fill the command's placeholders; those without a placeholder that differ from today's are set by
    the agent. `environment` is added to the caller's. Runs of the same setting differ in their `round`. The agent
    writes its files to the folder `output`, if given; `agent` is a JSON object with its further settings.
    """

    setting: Setting
    seed: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    round: int | None = None
    output: Path | None = None
    agent: str = "{}"

    @classmethod
    def of(
        cls,
        setting: Setting,
        *,
        seed: int = 0,
        environment: Mapping[str, str] | None = None,
        round: int | None = None,  # noqa: A002 - the field's name, as in `Trial`
        output: Path | None = None,
        **agent: Any,
    ) -> RunRequest:
        """Return the request with these variables and further settings of the agent."""
        variables = tuple(sorted((environment or {}).items()))
        return cls(setting, seed, variables, round, output, json.dumps(agent, sort_keys=True))


class Command:
    """Training command that is run once for each trial.

    The first run sets: `today`, the setting of the unchanged command; `maker`, the call that creates its training
    loader (see `where.maker`); `unsettable`, as in `Description`; `sample_dim`, the dimension of the model's inputs
    along which samples are counted if there is no DataLoader; `num_sharing`, the number of ranks among which a batch is
    divided. Files that runs create outside of their own folders are moved to the folder `aside`, except data, listed in
    `kept`, and files that cannot be moved, listed in `stuck`. `opened` is called with the files of code and settings
    that a run read. `environment` has the variables that hide other GPUs from all runs.
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
        self.environment: dict[str, str] = {}
        self.opened: Callable[[Sequence[str]], object] = lambda _: None
        self._kept_list: Path | None = None
        self._created_folders: set[str] = set()  # by runs; one that is left may have held files of another run
        self._together = RunsTogether(self._learn_files)

    def run(
        self,
        request: RunRequest,
        deadlines: Deadlines,
        is_enough: Callable[[RunEvents], bool],
        watcher: Watcher,
        memory_limit_bytes: int | None = None,
    ) -> CompletedRun:
        """Run the command once. Raises `RunnerError` if the agent itself failed in the command's process.

        A run that has been loaded by `load_together` goes on from there. One that fails while others are loaded beside
        it runs once more alone, since they may be the cause. If they were, no runs load together from then on.
        """

        until = math.inf if deadlines.whole_seconds is None else time.monotonic() + deadlines.whole_seconds

        def measured(started: CommandRun) -> CompletedRun:
            whole_seconds = None if until == math.inf else max(0.0, until - time.monotonic())
            limit_bytes = memory_limit_bytes
            if limit_bytes is not None:  # it is the host's, which the runs that wait use too
                limit_bytes = max(0, limit_bytes - self._together.held_bytes())
            with closing(started):
                completed = started.measure(
                    replace(deadlines, whole_seconds=whole_seconds), is_enough, watcher, limit_bytes
                )
            self._learn_files(started)
            self._learn_opened(completed)
            _raise_if_agent_failed(completed.events)
            return completed

        failure = self._together.unloaded.get(request)
        if failure is not None:
            self._together.close()
        loaded = self._together.take(request)
        num_held = len(self._together)
        is_alone = loaded is None and not num_held
        completed = measured(loaded or self._start(request))
        if not is_alone and _may_be_caused_by_others(completed, num_held):
            verdict = completed.verdict
            if until - time.monotonic() < (self._together.loading_seconds or 0.0):
                return completed if verdict == "measured" else completed._replace(verdict=_unclear(verdict))
            failure = verdict if isinstance(verdict, Failure) else None
            self._together.close()
            completed = measured(self._start(request))
            if failure is None:
                self._together.num_fitting = min(self._together.num_fitting, num_fitting(completed))
        if failure is not None and not isinstance(completed.verdict, Failure):
            self._together.num_fitting, self._together.failure = 1, failure
        elif is_alone:
            self._together.observe(completed)
        return completed

    @property
    def num_together(self) -> int:
        """Return how many runs of the command can load at the same time, as far as its runs have shown."""
        return self._together.num_fitting

    def load_together(self, requests: Sequence[RunRequest], watcher: Watcher, limit_seconds: float = math.inf) -> None:
        """Start the runs of the first requests, at most `num_together`, and wait until all have loaded, at most
        `limit_seconds`.

        Nothing is started if the first one has been loaded already, or if there is a single one to start. Runs that are
        loaded and not among the requests are ended.
        """
        wanted = requests[: self.num_together]
        if not wanted:
            self._together.close()
        elif len(wanted) > 1 and wanted[0] not in self._together:
            starts: dict[Hashable, Callable[[], CommandRun]] = {}
            starts |= {each: partial(self._start, each, is_held=True) for each in wanted}
            self._together.load(starts, watcher, limit_seconds)

    def _start(self, request: RunRequest, *, is_held: bool = False) -> CommandRun:
        setting, seed = request.setting, request.seed
        outside = {} if self.today is None else self.line.outside(setting, self.today)
        if "batch_size" in outside:
            outside["maker"] = self.maker
        folder = new_folder()
        trial_dir = str(folder / TRIAL_DIR)
        arguments, files = self.line.of_setting(setting, trial_dir, seed=seed, trial_dir=trial_dir, port=free_port())
        return CommandRun(
            arguments,
            environment={**os.environ, **TRIAL_ENVIRONMENT, **self.environment, **dict(request.environment)},
            agent={"seed": seed, "outside": outside, "sample_dim": self.sample_dim, **json.loads(request.agent)},
            folder=folder,
            files=files,
            kept=self.kept,
            output=request.output,
            memory=self._kept_list,
            aside=self.aside,
            is_held=is_held,
        )

    def _learn_opened(self, completed: CompletedRun) -> None:
        """Report the files of code and settings that a run read."""
        self.opened(
            [
                path
                for path in completed.opened
                if not {path, *map(str, Path(path).parents)}.intersection(completed.kept)
            ]
        )

    def _learn_files(self, ended: CommandRun) -> None:
        """Keep what a run tells about the files that it created.

        Folders that it created stay for the runs that wait, which may write into them; empty ones go with the last.
        """
        self.stuck = (*self.stuck, *ended.stuck)
        self.kept = existing_outermost({*self.kept, *ended.kept}.difference(self.stuck))
        self._created_folders.update(ended.created_folders)
        if len(self._together):
            for path in self._created_folders:
                with suppress(OSError):
                    Path(path).mkdir(parents=True, exist_ok=True)
            return
        for path in sorted(self._created_folders.difference(self.kept), reverse=True):  # the inner ones first
            with suppress(OSError):  # it has been moved, or is in use
                Path(path).rmdir()
        self._created_folders.clear()

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the user on how the runs were made."""
        failure = self._together.failure
        if failure is None:
            return ()
        steps = (failure.details or "").splitlines()  # several are a traceback
        step = f" {steps[0].partition('. ')[0].rstrip('.')}." if len(steps) == 1 else ""
        return (
            "A run failed beside others that loaded with it, and succeeded alone: later runs loaded alone. "
            f"It failed with: {failure.message.partition(chr(10))[0].rstrip('.')}.{step}",
        )

    def leftovers(self) -> tuple[str, ...]:
        """Return sentences for the user on the files that runs created, and where they are now."""
        kept = self.kept if self._kept_list is None else load_kept(self._kept_list)  # also those of an interrupted run
        return leftover_notes(self.aside, kept, self.stuck)

    def keep_in(self, folder: Path) -> None:
        """From now on, move the files that runs create to a subfolder of the study's `folder`. Load the list of data
        that earlier runs created. Files that a killed search left are moved now, so the study has to be locked.
        """
        self._kept_list, self.aside = folder / KEPT_LIST, folder.absolute() / FOLDER
        clear_up_after_killed(folder, self.aside, self._kept_list)
        self.kept = load_kept(self._kept_list)


def _may_be_caused_by_others(completed: CompletedRun, num_held: int) -> bool:
    """Whether the outcome of a run that trained while `num_held` others waited may differ from that of one alone."""
    verdict = completed.verdict
    if isinstance(verdict, Failure):
        return verdict.kind != "timeout" or not completed.events.num_steps
    return is_crowded(completed, num_held)


def _unclear(failure: Failure) -> Failure:
    """Return the failure of a run beside others for which there is no time to run alone: it says nothing about it."""
    message = f"it failed beside others that waited, and there is no time to run it alone: {failure.message}"
    return Failure(kind="timeout", message=message, details=failure.details, is_loading=True)


def _raise_if_agent_failed(events: RunEvents) -> None:
    """Raise `RunnerError` with the traceback if the agent failed in a process of the command."""
    error = next((error for error in events.of(Error) if error.is_of_agent), None)
    if error is not None:
        raise RunnerError(
            f"autotune_amp failed while it observed the command's steps: {error.message}\n{error.traceback}",
            "This is a defect of autotune_amp, not of the command: report it with these lines.",
        )
