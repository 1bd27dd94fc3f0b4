"""A whole search of ours on a recorded landscape: the real code of every step, on a clock of virtual seconds.

What it measures is played back, so that a search takes well under a second. Left out are the pins of modules and the
difference between the user's own environment and the recommended one, and the outlook beyond the effective batch
size; of recorded landscapes, which know nothing of them, accumulation, loader workers and further dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from replay import Ground, ReplayBackend, ReplayBudget, SlotBackends

from autotune_amp.core.outcome import Record
from autotune_amp.core.recommendation import Decision, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.processes.devices import ConfirmationBackend
from autotune_amp.processes.local import Slot
from autotune_amp.search.answer.decide import decide
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.planner import JobDefaults, Planner
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher, Runner, run_stages
from autotune_amp.search.search import search_stages
from autotune_amp.search.stages.confirm import ConfirmationRounds
from autotune_amp.search.stages.explore import share_building
from autotune_amp.search.storage import study as studies


@dataclass(frozen=True)
class Replayed:
    """A whole search, in virtual seconds since its first trial.

    `records` are every trial and check, each with the seconds at its end. `searched_seconds` is the end of the search
    phase, the checks and fallbacks included; `round_seconds` the end of each confirmation round.
    """

    ledger: Ledger
    landscape: Ground
    records: list[tuple[float, Record]]
    searched_seconds: float
    round_seconds: list[float]
    environment: dict[str, str]  # of the confirmation

    @cached_property
    def decision(self) -> Decision | None:
        """None where nothing could be chosen."""
        return self._decide(len(self.records))

    @cached_property
    def searched(self) -> Decision | None:
        """What would have been decided without a confirmation."""
        return self._decide(sum(seconds <= self.searched_seconds for seconds, _ in self.records))

    @cached_property
    def trace(self) -> list[tuple[float, Setting]]:
        """What would be recommended if it ended there."""
        decisions = [self._decide(number) for number in range(1, len(self.records) + 1)]
        return [
            (seconds, setting_of(decision))
            for (seconds, _), decision in zip(self.records, decisions, strict=True)
            if decision is not None
        ]

    def _decide(self, num_records: int) -> Decision | None:
        before, header = self.ledger.with_only(self.ledger.records[:num_records]), self.landscape.header
        if before.final_shortlist is None:
            return None
        summary = SearchSummary(study="replay", num_trials=len(before.trials), num_failures=0, seconds=0.0)
        return decide(before, environment=self.environment, search=summary, description=header.description)


class _Ends(Progress):
    """Notes when each trial ended."""

    def __init__(self, budget: ReplayBudget) -> None:
        self._budget = budget
        self.records: list[tuple[float, Record]] = []

    def trial_ended(self, record: Record, best: Record | None) -> None:
        self.records.append((self._budget.now, record))


def search_replay(
    landscape: Ground,
    seed: int,
    budget_seconds: float = SearchOptions().budget_seconds,
    num_slots: int = 1,
) -> Replayed:
    """Search `landscape` as `search.search` does, on so many devices alike."""
    header, budget = landscape.header, ReplayBudget(budget_seconds, num_slots)
    described = header.description
    job_defaults = JobDefaults(
        hardware=header.hardware,
        memory_limit_bytes=header.memory_limit_bytes,
        torch_state=header.torch_state,
        environment=header.environment,
        seed=seed,
        description=described,
        ready_seconds=header.start_seconds - described.build_seconds - described.context_seconds,
    )
    slots = [Slot("cuda", f"slot {number}", is_here=False) for number in range(num_slots)]  # each with its own memory
    backends = {slot: ReplayBackend(landscape, budget, seed + number) for number, slot in enumerate(slots)}
    fresh = {
        slot: ConfirmationBackend(_always(backends[slot]), slot, shares_processes=job_defaults.shares_processes)
        for slot in slots
    }
    return play_search(landscape, job_defaults, budget, SlotBackends(backends), SlotBackends(fresh), seed)


def play_search(
    landscape: Ground, job_defaults: JobDefaults, budget: ReplayBudget, backend: Any, fresh: Any, seed: int
) -> Replayed:
    """Run the stages of a search on a `backend`, then those of its confirmation on `fresh` processes."""
    ends, ledger = _Ends(budget), Ledger(landscape.space(), search_id="replay-1")
    watcher = ProgressWatcher(ends, budget)
    planner, study = Planner(job_defaults, budget), _study(ledger, seed)
    runner = Runner(backend, ledger, planner, watcher)
    for _ in run_stages(search_stages(study), runner):
        study.catch_up(ledger)
        if not runner.pending:
            share_building(backend, planner, ledger, ends)
    backend.close()
    searched_seconds = budget.now
    environment = planner.confirming_environment(ledger)
    if ledger.final_shortlist is not None:
        budget.num_slots = 1
        stage = ConfirmationRounds(ledger.final_shortlist, environment)
        for _ in run_stages([stage], Runner(fresh, ledger, planner, watcher)):
            pass
    by_round = {record.round: seconds for seconds, record in ends.records if record.round is not None}
    return Replayed(ledger, landscape, ends.records, searched_seconds, list(by_round.values()), environment)


def _always(backend: ReplayBackend) -> Callable[..., Any]:
    return lambda *_: backend


def setting_of(decision: Decision) -> Setting:
    """The setting that was recommended."""
    return Setting.of(decision.config)


def _study(ledger: Ledger, seed: int) -> studies.Study:
    """As `Study.open` makes it, in memory: a commit to a file takes 20 ms."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = studies.TPESampler(seed=seed)  # type: ignore[attr-defined] # by its name there, where another may stand
    made = optuna.create_study(storage=optuna.storages.InMemoryStorage(), direction="maximize", sampler=sampler)
    return studies.Study("memory", lambda: made, ledger)
