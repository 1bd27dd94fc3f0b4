"""A whole search of ours on a recorded landscape: the real code of every step, on a clock of virtual seconds.

What it measures is played back, so that a search takes well under a second. Left out are what a landscape knows nothing
of: accumulation (searches are free to change the effective batch), other numbers of loader workers, the pins of
modules, and the difference between the user's own environment and the recommended one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import msgspec
import optuna
from landscape import Landscape
from replay import ReplayClock, ReplayRunner

from autotune_amp.core.outcome import Record
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.backend import Backend
from autotune_amp.search import choose, confirm, explore, gate, loss_scales
from autotune_amp.search import study as studies
from autotune_amp.search.building import shares_processes
from autotune_amp.search.choose import Decision
from autotune_amp.search.folder import StudyFolder
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.rerank import LOSS_SCALE
from autotune_amp.search.session import Session, exclusions
from autotune_amp.search.space import Space, build_space


class Replayed(NamedTuple):
    """A whole search, in virtual seconds since its first trial.

    `trace` is what would be recommended if it ended there, `records` every trial and check, each with the seconds at
    its end. `searched_seconds` is the end of the search phase, the checks and fallbacks included; `round_seconds` the
    end of each confirmation round. `decision` is None where nothing could be chosen.
    """

    trace: list[tuple[float, Setting]]
    records: list[tuple[float, Record]]
    searched_seconds: float
    round_seconds: list[float]
    decision: Decision | None
    space: Space


class _NoFolder(StudyFolder):
    """Keeps nothing: a replay is made again in a second."""

    def __init__(self) -> None:
        super().__init__("", "replay")

    def records(self, search_id: str | None = None) -> list[Record]:  # noqa: ARG002 - see StudyFolder
        return []

    def append(self, record: Record) -> None:
        """Nothing is kept."""


class _Ends(Progress):
    """Notes when each trial ended."""

    def __init__(self, clock: ReplayClock) -> None:
        self._clock = clock
        self.records: list[tuple[float, Record]] = []

    def trial_ended(self, record: Record, best: Record | None) -> None:  # noqa: ARG002 - see Progress
        self.records.append((self._clock.now, record))


def search_replay(
    landscape: Landscape,
    seed: int,
    budget_seconds: float = 110.0,
    wrap: Callable[[ReplayRunner], Any] = lambda runner: runner,
) -> Replayed:
    """Search `landscape` as `search.steps` does; `wrap` is laid round the runner."""
    header, clock = landscape.header, ReplayClock(budget_seconds)
    ends, space = _Ends(clock), space_of(landscape)
    session = Session(
        folder=_NoFolder(),
        search_id="replay-1",
        clock=clock,
        progress=ends,
        hardware=header.hardware,
        torch_state=header.torch_state,
        memory_limit_bytes=header.memory_limit_bytes,
        loss_scale=LOSS_SCALE,
        holds_heap=header.holds_heap,
        seed=seed,
        description=_described(landscape),
    )
    replayed = ReplayRunner(landscape, clock, seed)
    runner = cast("Backend", wrap(replayed))

    def in_fresh_process(_: dict[str, str]) -> AbstractContextManager[Backend]:
        replayed.is_started = False
        return nullcontext(runner)

    are_shared = shares_processes(header.hardware.device)
    if are_shared:
        clock.confirm_seconds = confirm.reserved_seconds(budget_seconds, header.start_seconds)
    study = _study(session, space, seed)
    explore.share_building(session, runner, space)
    explore.explore(session, runner, space, study, None)
    gate.pass_gate(session, runner, space, study, explore.search_spec)
    chosen = choose.finalists(session.records, space, session.scales, session.objective)
    if chosen is not None:
        for contender in filter(None, (chosen.winner, chosen.runner_up)):
            confirm.measure_fallbacks(session, runner, space, contender)
    searched_seconds = clock.now
    if chosen is not None:
        processes = confirm.Processes(in_fresh_process, header.start_seconds, are_shared)
        confirm.confirm(session, processes, chosen, header.environment)
    by_round = {record.round: seconds for seconds, record in ends.records if record.round is not None}
    decisions = [_decide(session, space, header.environment, number) for number in range(1, len(ends.records) + 1)]
    return Replayed(
        trace=[
            (seconds, candidate_of(decision))
            for (seconds, _), decision in zip(ends.records, decisions, strict=True)
            if decision is not None
        ],
        records=ends.records,
        searched_seconds=searched_seconds,
        round_seconds=list(by_round.values()),
        decision=decisions[-1] if decisions else None,
        space=space,
    )


def space_of(landscape: Landscape) -> Space:
    """The landscape's grid as the search has it."""
    header = landscape.header
    options = SearchOptions(
        precisions=header.precisions,
        batch_size=(min(header.batch_sizes), max(header.batch_sizes)),
        effective_batch_size="free",
        baseline=("fp32", header.todays_batch_size),
    )
    space = build_space(header.hardware, _described(landscape), options)
    return msgspec.structs.replace(space, accumulation_withheld="the landscape has no accumulation")


def candidate_of(decision: Decision) -> Setting:
    """The cell that was recommended."""
    return Setting(precision=decision.config.precision, batch_size=decision.config.batch_size)


def _described(landscape: Landscape) -> Any:
    return msgspec.structs.replace(landscape.header.description, num_workers=None)


def _study(session: Session, space: Space, seed: int) -> studies.Study:
    """As `Study.open` makes it, in memory: a commit to a file takes 20 ms."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = studies.TPESampler(seed=seed)  # type: ignore[attr-defined] # by its name there, where another may stand
    made = optuna.create_study(storage=optuna.storages.InMemoryStorage(), direction="maximize", sampler=sampler)
    return studies.Study("memory", made, space, session.judge)


def _decide(session: Session, space: Space, environment: dict[str, str], num_records: int) -> Decision | None:
    """What would be decided after so many records, None where nothing could."""
    records = session.records[:num_records]
    calibrated = {loss_scales.key_of(r.candidate) for r in records if r.purpose == "calibration"}
    scales = {key: found for key, found in session.scales.items() if key in calibrated}
    if choose.finalists(records, space, scales, session.objective) is None:
        return None
    return choose.decide(
        records,
        space,
        environment=environment,
        loss_scale=LOSS_SCALE,
        exclusions=exclusions(records, scales, space),
        scales=scales,
        description=session.description,
    )
