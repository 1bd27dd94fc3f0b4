"""Building a large model costs: where that is much of a trial, it is built once and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import Backend, Handle, Isolation
from autotune_amp.search.budget import Budget
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.progress import Progress
from autotune_amp.search.stages.confirm import run_seconds
from autotune_amp.search.stages.trials import Conditions
from autotune_amp.trial.jobs import Trial

WORTH_SHARING = 0.2  # of a trial
MIN_SHARED_SECONDS = 0.5  # less is not worth a model that lies in memory and a process that may fail to share it
LONG_BUILD_SECONDS = 5.0
BYTES_PER_PARAMETER = 4
# In the process that trials are forked from one thread builds, where a trial may have used several.
_SLACK_RATIO, _SLACK_SECONDS = 4.0, 5.0

_Variables: TypeAlias = tuple[tuple[str, str], ...]
MakeBackend: TypeAlias = Callable[[Isolation, dict[str, str]], Backend]


class Costs(NamedTuple):
    """Seconds of a process that builds its own model: building, starting the accelerator, and all the rest."""

    building: float
    context: float
    rest: float

    @property
    def share(self) -> float:
        """The part that sharing may save."""
        return (self.building + self.context) / (self.building + self.context + self.rest)

    @property
    def way(self) -> Literal["fork", "kept"] | None:
        """How to share: one template builds for its forks, or one worker is kept, which alone saves the context too."""
        if self.share <= WORTH_SHARING or max(self.building, self.context) < MIN_SHARED_SECONDS:
            return None
        return "fork" if self.building >= self.context else "kept"


def share_where_it_pays(
    backend: Backend, conditions: Conditions, ledger: Ledger, trial: Trial, left_seconds: float, progress: Progress
) -> None:
    """Share building among the trials to come if it is more than `WORTH_SHARING` of one, and say so.

    Before the first measurement it is, where it would be even in a trial that measures for all of
    `trial.measure_seconds`. Where time or memory is too short for a model more, every trial goes on building its own.
    """
    if "share_build" not in backend.abilities or backend.is_build_shared:
        return
    known = conditions.description
    measured = _own_builds(ledger)
    costs = measured
    if costs is None and known is not None and trial.measure_seconds is not None:
        costs = Costs(known.build_seconds, known.context_seconds, trial.measure_seconds)
    if costs is None or costs.way is None or left_seconds <= 2 * costs.building:
        return
    text = f"Building the workload takes {costs.building + costs.context:.1f} s"
    text += f", {100 * costs.share:.0f} % of a trial: " if measured else ": "
    if costs.way == "kept":
        progress.note(text + "one process is kept for the trials until one fails.")
        backend.keep()
    elif _has_room(conditions, num_copies=1):
        progress.note(text + "it is built once and shared by the trials.")
        reason = backend.share_build(trial, _deadline_seconds(costs.building, left_seconds))
        if reason is not None:
            progress.note(f"It cannot be shared by forking, so one process is kept instead: {reason}.")
            backend.keep()


def shares_processes(device: str) -> bool:
    """Whether the runs of a round may share a process: not where the state of the heap is part of what is measured.

    On an accelerator the allocator's cache is emptied between them, and no variables are recommended that would set
    their environments apart.
    """
    return device != "cpu"


class ConfirmingProcesses:
    """Where the confirmation's trials run, each in its environment; a process takes `start_seconds` to its first step.

    The trials of a round share a process where they `are_shared`, else each has one of its own, or a fork of one of the
    `templates`, which have built the model once for their environment.
    """

    def __init__(
        self, make: MakeBackend, start_seconds: float, templates: dict[_Variables, Backend], *, are_shared: bool
    ) -> None:
        self.start_seconds = start_seconds
        self.are_shared = are_shared
        self._make = make
        self._templates = templates
        self._round: int | None = None
        self._current: Backend | None = None

    def submit(self, job: Trial) -> Handle[Any]:
        """Start a trial."""
        if self._templates:
            return self._templates[_key(job.environment)].submit(job)
        if self._current is None or not self.are_shared or job.round != self._round:
            self.close()
            self._current = self._make("kept" if self.are_shared else "fresh", job.environment)
        self._round = job.round
        return self._current.submit(job)

    def close(self) -> None:
        """End the process that is open."""
        if self._current is not None:
            self._current.close()
            self._current = None


@contextmanager
def confirming_processes(
    make: MakeBackend,
    conditions: Conditions,
    ledger: Ledger,
    budget: Budget,
    winner: Setting,
    environment: dict[str, str],
    start_seconds: float,
    progress: Progress,
    *,
    can_share: bool,
) -> Iterator[ConfirmingProcesses]:
    """Where the confirmation runs; a fresh process takes `start_seconds` before its first step.

    The runs of a round share one where `shares_processes` says so, else each has one of its own. Where these spend more
    than `WORTH_SHARING` on building and time and memory allow, one fresh template for each environment builds once.
    """
    are_shared = shares_processes(conditions.hardware.device)
    known = conditions.description
    with ExitStack() as stack:
        templates: dict[_Variables, Backend] = {}
        environments = [environment, {}] if environment else [{}]
        least_seconds = max(MIN_SHARED_SECONDS, WORTH_SHARING * (start_seconds + run_seconds(ledger, winner)))
        is_worth_it = can_share and not are_shared and known is not None and known.build_seconds > least_seconds
        is_in_time = len(environments) * start_seconds <= min(budget.confirm_seconds, budget.left()) / 2
        if is_worth_it and is_in_time and _has_room(conditions, num_copies=len(environments)):
            progress.note("Building is much of a fresh process: the confirmation shares models that are built once.")
            trial = conditions.trial(ledger, winner)
            templates, reason = _templates(stack, make, environments, trial, start_seconds, budget)
            if reason is not None:
                progress.note(f"They cannot be shared: {reason}.")
        if templates and known is not None:
            start_seconds = known.context_seconds
        processes = ConfirmingProcesses(make, start_seconds, templates, are_shared=are_shared)
        stack.callback(processes.close)
        yield processes


def _templates(
    stack: ExitStack,
    make: MakeBackend,
    environments: list[dict[str, str]],
    trial: Trial,
    start_seconds: float,
    budget: Budget,
) -> tuple[dict[_Variables, Backend], str | None]:
    """A template that has built the model for each environment; none, and why, if one of them cannot be forked from."""
    templates = {_key(variables): make("forked", variables) for variables in environments}
    with ExitStack() as unfinished:
        for backend in templates.values():
            unfinished.enter_context(backend)
            reason = backend.share_build(trial, _deadline_seconds(start_seconds, budget.left()))
            if reason is not None:
                return {}, reason
        stack.push(unfinished.pop_all())
    return templates, None


def _deadline_seconds(expected_seconds: float, left_seconds: float) -> float:
    return min(left_seconds, _SLACK_RATIO * expected_seconds + _SLACK_SECONDS)


def _key(variables: dict[str, str]) -> _Variables:
    return tuple(sorted(variables.items()))


def _own_builds(ledger: Ledger) -> Costs | None:
    """The costs of the last search trial that built its own model."""
    for record in reversed(ledger.records):
        found = record.outcome
        if record.purpose == "search" and isinstance(found, Measurement) and not found.is_build_shared:
            rest = found.first_step_seconds + found.num_steps * found.step_seconds
            return Costs(found.build_seconds, found.context_seconds, rest)
    return None


def _has_room(conditions: Conditions, *, num_copies: int) -> bool:
    """Whether the memory that trials leave free holds so many models more: a template's own lie in the CPU's memory."""
    if conditions.hardware.device != "cpu" or conditions.description is None:
        return True
    free = conditions.hardware.memory.available - conditions.memory_limit_bytes
    return num_copies * BYTES_PER_PARAMETER * conditions.description.num_parameters <= free
