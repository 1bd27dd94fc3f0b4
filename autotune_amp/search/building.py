"""Building a large model costs: where that is much of a trial, it is built once and shared."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

from autotune_amp.core.outcome import Measurement
from autotune_amp.search.confirm import Processes, run_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from autotune_amp.core.setting import Setting
    from autotune_amp.isolation.backend import Backend
    from autotune_amp.isolation.local import Isolation
    from autotune_amp.search.session import Session
    from autotune_amp.trial.jobs import Trial

WORTH_SHARING = 0.2  # of a trial
MIN_SHARED_SECONDS = 0.5  # less is not worth a model that lies in memory and a process that may fail to share it
LONG_BUILD_SECONDS = 5.0
BYTES_PER_PARAMETER = 4
# In the process that trials are forked from one thread builds, where a trial may have used several.
_SLACK_RATIO, _SLACK_SECONDS = 4.0, 5.0


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


def setup_seconds(session: Session) -> float:
    """What a trial that builds its own model takes before its first step."""
    known = session.description
    return 0.0 if known is None else known.build_seconds + known.context_seconds


def share_where_it_pays(session: Session, runner: Backend, spec: Trial, left_seconds: float) -> None:
    """Share building among the trials to come if it is more than `WORTH_SHARING` of one, and say so.

    Before the first measurement it is, where it would be even in a trial that measures for all of
    `spec.measure_seconds`. Where time or memory is too short for a model more, every trial goes on building its own.
    """
    if "share_build" not in runner.abilities or runner.is_build_shared:
        return
    measured = _own_builds(session)
    costs = measured or _foreseen(session, spec)
    if costs is None or costs.way is None or left_seconds <= 2 * costs.building:
        return
    text = f"Building the workload takes {costs.building + costs.context:.1f} s"
    text += f", {100 * costs.share:.0f} % of a trial: " if measured else ": "
    if costs.way == "kept":
        session.progress.note(text + "one process is kept for the trials until one fails.")
        runner.keep()
    elif _has_room(session, num_copies=1):
        session.progress.note(text + "it is built once and shared by the trials.")
        reason = runner.share_build(spec, _deadline_seconds(costs.building, left_seconds))
        if reason is not None:
            session.progress.note(f"It cannot be shared by forking, so one process is kept instead: {reason}.")
            runner.keep()


def shares_processes(device: str) -> bool:
    """Whether the runs of a round may share a process: not where the state of the heap is part of what is measured.

    On an accelerator the allocator's cache is emptied between them, and no variables are recommended that would set
    their environments apart.
    """
    return device != "cpu"


@contextmanager
def confirming_runners(
    session: Session,
    make: Callable[[Isolation, dict[str, str]], Backend],
    winner: Setting,
    environment: dict[str, str],
    start_seconds: float,
    *,
    can_share: bool,
) -> Iterator[Processes]:
    """Where the confirmation's runs run; a fresh process takes `start_seconds` before its first step.

    Those of a round share one where `shares_processes` says so, else each has one of its own. Where these spend more
    than `WORTH_SHARING` on building and time and memory allow, one fresh template for each environment builds once,
    and each run is its child.
    """
    are_shared = shares_processes(session.hardware.device)
    with ExitStack() as stack:
        templates: dict[tuple[tuple[str, str], ...], Backend] = {}
        if can_share and not are_shared and _pays_in_confirmation(session, winner, environment, start_seconds):
            templates = _templates(stack, session, make, winner, environment, start_seconds)

        def runner_for(variables: dict[str, str]) -> AbstractContextManager[Backend]:
            if templates:
                return nullcontext(templates[_key(variables)])
            return make("kept" if are_shared else "fresh", variables)

        if templates:
            assert session.description is not None
            yield Processes(runner_for, session.description.context_seconds)
        else:
            yield Processes(runner_for, start_seconds, are_shared)


def _templates(
    stack: ExitStack,
    session: Session,
    make: Callable[[Isolation, dict[str, str]], Backend],
    winner: Setting,
    environment: dict[str, str],
    start_seconds: float,
) -> dict[tuple[tuple[str, str], ...], Backend]:
    """A template that has built the model for each environment; none if one of them cannot be forked from."""
    templates = {_key(variables): make("forked", variables) for variables in _environments(environment)}
    session.progress.note("Building is much of a fresh process: the confirmation shares models that are built once.")
    with ExitStack() as unfinished:
        for runner in templates.values():
            unfinished.enter_context(runner)
            reason = runner.share_build(session.spec(winner), _deadline_seconds(start_seconds, session.clock.left()))
            if reason is not None:
                session.progress.note(f"They cannot be shared: {reason}.")
                return {}
        stack.push(unfinished.pop_all())
    return templates


def _pays_in_confirmation(session: Session, winner: Setting, environment: dict[str, str], start_seconds: float) -> bool:
    known = session.description
    if known is None:
        return False
    num_templates = len(_environments(environment))
    left = min(session.clock.confirm_seconds, session.clock.left())
    process_seconds = start_seconds + run_seconds(session, winner)
    return (
        known.build_seconds > max(MIN_SHARED_SECONDS, WORTH_SHARING * process_seconds)
        and num_templates * start_seconds <= left / 2
        and _has_room(session, num_copies=num_templates)
    )


def _deadline_seconds(expected_seconds: float, left_seconds: float) -> float:
    return min(left_seconds, _SLACK_RATIO * expected_seconds + _SLACK_SECONDS)


def _environments(environment: dict[str, str]) -> list[dict[str, str]]:
    """That of the recommendation and the user's own."""
    return [environment, {}] if environment else [{}]


def _key(variables: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(variables.items()))


def _own_builds(session: Session) -> Costs | None:
    """The costs of the last search trial that built its own model."""
    for record in reversed(session.records):
        found = record.outcome
        if record.purpose == "search" and isinstance(found, Measurement) and not found.is_build_shared:
            rest = found.first_step_seconds + found.num_steps * found.step_seconds
            return Costs(found.build_seconds, found.context_seconds, rest)
    return None


def _foreseen(session: Session, spec: Trial) -> Costs | None:
    """The same of a trial that measures for as long as it may."""
    known = session.description
    if known is None or spec.measure_seconds is None:
        return None
    return Costs(known.build_seconds, known.context_seconds, spec.measure_seconds)


def _has_room(session: Session, *, num_copies: int) -> bool:
    """Whether the memory that trials leave free holds so many models more: a template's own lie in the CPU's memory."""
    if session.hardware.device != "cpu" or session.description is None:
        return True
    free = session.hardware.memory.available - session.memory_limit_bytes
    return num_copies * BYTES_PER_PARAMETER * session.description.num_parameters <= free
