"""The steps of a search: load, probe, describe, explore, check, confirm, decide, save."""

from __future__ import annotations

from typing import Any

from autotune_amp.core.config import PRECISIONS
from autotune_amp.core.hardware import Hardware, MachineLoad
from autotune_amp.core.job import Found, Job
from autotune_amp.core.outcome import Description, Failure
from autotune_amp.core.recommendation import (
    Exclusion,
    Fingerprint,
    NothingWorksError,
    Recommendation,
    SearchInterruptedError,
    SearchSummary,
)
from autotune_amp.core.text import size
from autotune_amp.distributed.ranks import alone
from autotune_amp.fingerprint import versions
from autotune_amp.hardware import identify
from autotune_amp.hardware.host import load_notes
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.backend import Backend
from autotune_amp.isolation.local import Isolation, LocalBackend, Payload
from autotune_amp.search import busy
from autotune_amp.search.accumulate import judge
from autotune_amp.search.building import LONG_BUILD_SECONDS, confirming_runners, shares_processes
from autotune_amp.search.choose import finalists, why_out
from autotune_amp.search.confirm import confirm, measure_fallbacks, reserved_seconds
from autotune_amp.search.endings import nothing_to_choose, too_small
from autotune_amp.search.explain import excluded as explain_excluded
from autotune_amp.search.explore import MIN_TRIAL_SECONDS, explore, left_to_explore, search_spec, share_building
from autotune_amp.search.flow import cached_answer
from autotune_amp.search.folder import StudyFolder
from autotune_amp.search.gate import pass_gate
from autotune_amp.search.loaders import try_workers
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.origin import Origin
from autotune_amp.search.progress import Progress
from autotune_amp.search.rerank import LOSS_SCALE, recommend
from autotune_amp.search.session import Clock, ProgressWatcher, Session, with_held_memory
from autotune_amp.search.space import ASSUMED_BATCH_SIZE, Space, build_space
from autotune_amp.search.study import Study
from autotune_amp.trial.energy import require_counter
from autotune_amp.trial.heap import recommended_environment
from autotune_amp.trial.jobs import Describe, Probe

_HELD_SHARE_WORTH_A_WORD = 0.05


def run_steps(
    origin: Origin,
    options: SearchOptions,
    progress: Progress,
    folder: StudyFolder,
    settings: dict[str, Any],
    cached: Recommendation | None,
    fingerprint: Fingerprint | None,
    *,
    is_fresh: bool,
) -> Recommendation:
    """Search in `folder`; `fingerprint` is None where a child has to import the workload before it can be known."""
    steps = _Steps(origin, options, progress, folder)
    try:
        payload = origin.payload()
        with folder, LocalBackend(payload, None, steps.watcher) as runner:
            progress.started(folder.path.name, str(folder.path), options.budget_seconds)
            state = steps.load(runner)
            if fingerprint is None:
                fingerprint = origin.fingerprint_by_child(settings, identify(options.device), runner, state)
                answer = None if is_fresh else cached_answer(cached, fingerprint, options, folder, progress)
                if answer is not None:
                    return answer
            if cached is not None and not is_fresh:
                _say_why(progress, cached, fingerprint)
            search_id = folder.search_id(fingerprint.digest, is_fresh=is_fresh)
            return steps.run(runner, payload, fingerprint, search_id)
    except KeyboardInterrupt:
        best = cached if cached is not None and cached.search.was_interrupted else None
        raise SearchInterruptedError(
            "Interrupted before the first trial; what an earlier call measured is kept.",
            "Run the same command again.",
            best.excluded if best else (),
            best,
        ) from None


class _Steps:
    """The steps of one search, in order; each leaves what the next needs."""

    def __init__(self, origin: Origin, options: SearchOptions, progress: Progress, folder: StudyFolder) -> None:
        self.clock = Clock(options.budget_seconds)
        self.folder = folder
        self._meter = LoadMeter(identify(options.device).uuid)
        self._load_notes = load_notes()  # before our own work is part of it
        self.watcher = ProgressWatcher(progress, self.clock, self._meter)
        self._origin = origin
        self._options = options
        self._progress = progress
        self._warnings: list[str] = []
        self._start_seconds = 0.0
        self._is_spent = False
        self._load: MachineLoad | None = None

    def load(self, runner: LocalBackend) -> dict[str, Any]:
        """Start the process that holds the workload; returns the torch state that trials take over."""
        self._progress.phase("loading the workload")
        return self._origin.torch_state(runner.load(self.clock.left()))

    def run(self, runner: LocalBackend, payload: Payload, fingerprint: Fingerprint, search_id: str) -> Recommendation:
        """Probe, describe, explore, check, confirm, decide and save."""
        state = self._open(runner)
        hardware = self._probe(runner, state)
        if self._options.objective == "energy":
            require_counter(hardware.identity.type, hardware.identity.uuid)
        description = self._describe(runner, state, hardware)
        self._look_around()
        space = build_space(hardware, description, self._options)
        # What a fresh process pays before its first step: importing torch, loading, calling, building, the accelerator.
        self._start_seconds += description.build_seconds + description.context_seconds
        if shares_processes(hardware.device):
            self.clock.confirm_seconds = reserved_seconds(self.clock.budget_seconds, self._start_seconds)
        environment = recommended_environment(hardware.device)
        session = Session(
            folder=self.folder,
            search_id=search_id,
            clock=self.clock,
            progress=self._progress,
            hardware=hardware,
            torch_state=state,
            memory_limit_bytes=int(self._options.memory_fraction * hardware.memory.available),
            loss_scale=LOSS_SCALE,
            holds_heap=bool(environment),
            seed=self._options.seed,
            num_steps=self._options.horizon_steps(space.baseline.effective_batch_size),
            description=description,
            objective=self._options.objective,
            meter=self._meter,
        )
        if session.records:
            self._progress.note(f"Going on with {len(session.trials)} trials that were measured before.")
        was_interrupted = False
        try:
            share_building(session, runner, space)
            space = judge(session, runner, space)
            self._explore(session, runner, space, search_id)
            self._confirm(session, runner, payload, space, environment)
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            runner.close()
        if finalists(session.records, space, session.scales) is None:
            raise nothing_to_choose(
                session.records,
                explain_excluded(session.records, space, session.exclusions(space), is_budget_spent=True),
                self.clock,
                self.watcher.last_step_seconds,
                why_out(session.records, session.scales),
                was_interrupted=was_interrupted,
            )
        recommendation = self._decide(session, space, environment, description, fingerprint, search_id, was_interrupted)
        self.folder.save(recommendation)
        if was_interrupted:
            raise SearchInterruptedError(
                f"Interrupted after {len(session.trials)} trials; the best so far is in "
                f"{self.folder.recommendation_path}.",
                "Run the same command again to go on.",
                recommendation.excluded,
                recommendation,
            )
        return recommendation

    def _open(self, runner: LocalBackend) -> dict[str, Any]:
        num_threads = self._origin.num_threads()
        found, reason = runner.open(self._options.device, num_threads, self.clock.left())
        self._start_seconds = self.clock.elapsed()
        if reason is not None:
            self._warnings.append(f"Trials shared one process until it failed: {reason}.")
        return self._origin.torch_state(found)

    def _probe(self, runner: Backend, state: dict[str, Any]) -> Hardware:
        self._progress.phase("probing the device")
        job = Probe(device=self._options.device, torch_state=state, deadline_seconds=self._left())
        hardware = self._ask(runner, job)
        if isinstance(hardware, Failure):
            raise NothingWorksError(f"The probe failed: {hardware.message.rstrip('.')}.", "Try --device cpu.", ())
        held = max(hardware.memory.held_by_caller, self._origin.held_bytes(hardware.device))
        hardware = with_held_memory(hardware, held)
        self._progress.found_hardware(hardware)
        self._warnings += [*hardware.notes, *alone(self._options.num_ranks, hardware.device)]
        if held > _HELD_SHARE_WORTH_A_WORD * hardware.memory.total:
            way_out = (
                "make the data and the model inside functions that the trial calls"
                if hardware.device == "cpu"
                else "move the model to the CPU with model.to('cpu') and call torch.cuda.empty_cache()"
            )
            self._warnings.append(
                f"The calling process holds {size(held)} on {hardware.device}, which trials had to do without: "
                f"{way_out} before searching."
            )
        return hardware

    def _describe(self, runner: Backend, state: dict[str, Any], hardware: Hardware) -> Description:
        self._progress.phase("building the workload once")
        baseline_batch_size = self._options.baseline[1] if self._options.baseline else ASSUMED_BATCH_SIZE
        answer = self._ask(
            runner,
            Describe(
                device=hardware.device,
                torch_state=state,
                has_tf32=hardware.has_tf32,
                baseline_batch_size=baseline_batch_size,
                deadline_seconds=self._left(),
            ),
        )
        if not isinstance(answer, Failure):
            if answer.build_seconds > LONG_BUILD_SECONDS:
                self._progress.note(f"Building the workload took {answer.build_seconds:.1f} s.")
            return answer
        reason = f"{answer.kind}: {answer.message}" + (f"\n{answer.details.rstrip()}" if answer.details else "")
        asked = self._options.precisions or PRECISIONS
        raise NothingWorksError(
            f"The workload cannot be built, so no candidate can run: {reason}",
            "Mend what the traceback shows; the model, data and optimizer must work on their own.",
            tuple(Exclusion(precision=precision, batch_size=None, reason=reason) for precision in asked),
        )

    def _look_around(self) -> None:
        """Say what others did on the machine while the workload was loaded and probed."""
        self._load = self._meter.stop()
        said = busy.before_first_trial(self._load)
        if self._load.others_num_cores is None:
            said += self._load_notes
        for line in said:
            self._progress.note(line)
        self._warnings += said

    def _left(self) -> float:
        return max(0.0, self.clock.left())

    def _ask(self, runner: Backend, job: Job[Found]) -> Found | Failure:
        answer = runner.submit(job).result()
        if isinstance(answer, Failure) and answer.kind == "timeout":
            raise too_small(self.clock, self.watcher.last_step_seconds)
        return answer

    def _explore(self, session: Session, runner: Backend, space: Space, search_id: str) -> None:
        storage = self._options.storage or self.folder.path / "study.db"
        with Study.open(
            storage,
            self.folder.path.name,
            space,
            search_id=search_id,
            owner=str(self.folder.path.resolve()),
            judge=session.judge,
            seed=self._options.seed,
            records=session.records,
        ) as study:
            self._progress.phase("searching")
            explore(session, runner, space, study, self._options.max_trials)
            self._is_spent = left_to_explore(session, space) <= MIN_TRIAL_SECONDS
            pass_gate(session, runner, space, study, search_spec)
            try_workers(session, runner, space, study, self._options.max_trials)

    def _confirm(
        self, session: Session, runner: Backend, payload: Payload, space: Space, environment: dict[str, str]
    ) -> None:
        chosen = finalists(session.records, space, session.scales, session.objective)
        if chosen is None:
            return
        for contender in filter(None, (chosen.winner, chosen.runner_up)):  # the confirmation may turn them round
            measure_fallbacks(session, runner, space, contender)
        runner.close()  # its memory and threads are not there in the user's own run either
        self._progress.phase("confirming in fresh processes")

        def make(isolation: Isolation, variables: dict[str, str]) -> Backend:
            return LocalBackend(payload, isolation, self.watcher, variables)

        is_forking = "share_build" in runner.abilities
        with confirming_runners(
            session, make, chosen.winner, environment, self._start_seconds, can_share=is_forking
        ) as processes:
            confirm(session, processes, chosen, environment)

    def _decide(
        self,
        session: Session,
        space: Space,
        environment: dict[str, str],
        description: Description,
        fingerprint: Fingerprint,
        search_id: str,
        was_interrupted: bool,
    ) -> Recommendation:
        unknown = [f"This answer cannot be cached: {part}." for part in fingerprint.unknown]
        return recommend(
            session.records,
            space,
            options=self._options,
            scales=session.scales,
            environment=environment,
            hardware=session.hardware,
            workload=description,
            search=SearchSummary(
                study=self.folder.path.name,
                num_trials=len(session.trials),
                num_failures=sum(isinstance(r.outcome, Failure) for r in session.trials),
                seconds=self.clock.elapsed(),
                was_interrupted=was_interrupted,
                search_id=search_id,
                is_budget_spent=self._is_spent or was_interrupted,
                warnings=(*self._warnings, *unknown),
                load=self._load,
            ),
            fingerprint=fingerprint,
            versions=versions(),
        )


def _say_why(progress: Progress, cached: Recommendation, fingerprint: Fingerprint) -> None:
    """What changed since the recommendation that is there."""
    if not cached.search.was_interrupted:
        for line in cached.fingerprint.differences(fingerprint):
            progress.note(f"Searching again: {line}.")
