"""Search from loading the workload to the recommendation: open the workload, build the space, run stages, decide."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from msgspec.structs import replace

from autotune_amp.core.errors import AutotuneAmpError, ClusterLostError, InvalidRequestError, StudyError
from autotune_amp.core.hardware import Hardware, MachineLoad
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import (
    Fingerprint,
    NothingWorksError,
    Recommendation,
    SearchInterruptedError,
    SearchSummary,
)
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, size
from autotune_amp.distributed import alone
from autotune_amp.fingerprint import versions
from autotune_amp.hardware import host, identify, machine_load
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.processes.devices import Devices, find_gpus
from autotune_amp.processes.local import Backend, LoadingBackend, SlotLostError, WorkloadBackend
from autotune_amp.processes.on_ray.cluster import Cluster
from autotune_amp.processes.on_ray.slots import RayDevices
from autotune_amp.search.answer import explain
from autotune_amp.search.answer.decide import recommend
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.options import DEFAULT_BUDGET_SECONDS, SearchOptions
from autotune_amp.search.planner import MIN_ROUNDS, Budget, JobDefaults, Planner
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher, Runner, run_stages
from autotune_amp.search.source import OpenedWorkload, Source, held_bytes, open_workload
from autotune_amp.search.space import ASSUMED_BATCH_SIZE, Space, build_space
from autotune_amp.search.stages import Stage
from autotune_amp.search.stages.checks import Checks, LossScales, TrainedWeightsChecks
from autotune_amp.search.stages.confirm import ConfirmationRounds, LargerBatchTrials, OneRankTrial
from autotune_amp.search.stages.explore import exploration_stages, share_building, untried_seed
from autotune_amp.search.stages.fallbacks import Fallbacks
from autotune_amp.search.stages.variants import Variants
from autotune_amp.search.stages.workers import LoaderWorkers
from autotune_amp.search.storage import shared
from autotune_amp.search.storage.folder import StudyFolder
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.energy import require_counter
from autotune_amp.trial.memory import recommended_environment

_MIN_HELD_SHARE_TO_WARN = 0.05  # of the device's memory, held by the calling process


def run_search(
    source: Source,
    options: SearchOptions,
    progress: Progress,
    folder: StudyFolder,
    settings: dict[str, Any],
    cached: Recommendation | None,
    fingerprint: Fingerprint | None,
    saved_recommendation_for: Callable[[Fingerprint], Recommendation | None],
    *,
    is_fresh: bool,
) -> Recommendation:
    """Run a search in `folder` and return its recommendation.

    `fingerprint` is None if only a child process that imported the workload can compute it. `cached` is the folder's
    saved recommendation. `saved_recommendation_for` returns a saved recommendation for a fingerprint, or None; unless
    `is_fresh`, it is returned without searching.
    """
    search = _Search(source, options, progress, folder)
    try:
        with folder, closing(search.devices):
            recommendation = None if fingerprint is None or is_fresh else saved_recommendation_for(fingerprint)
            if recommendation is not None:
                return recommendation
            is_budget_set = options.budget_seconds != DEFAULT_BUDGET_SECONDS
            progress.started(folder.path.name, str(folder.path), options.budget_seconds if is_budget_set else None)
            with search.backend() as backend:
                source.keep_in(folder.path)
                search.watcher.phase("loading the workload")
                state = source.torch_state(backend.load(search.budget.left()))
                if fingerprint is None:
                    fingerprint = source.fingerprint_by_child(settings, search.devices.identity(), backend, state)
                    recommendation = None if is_fresh else saved_recommendation_for(fingerprint)
                    if recommendation is not None:
                        return recommendation
                finished = None if cached is None or cached.search.was_interrupted else cached
                for line in () if finished is None or is_fresh else finished.fingerprint.differences(fingerprint):
                    progress.note(f"Searching again: {line}.")
                search_id = folder.search_id(fingerprint, is_fresh=is_fresh)
                try:
                    return search.run(
                        backend,
                        fingerprint,
                        search_id,
                        uses_shared_setting=not is_fresh,
                        is_saved_if_interrupted=finished is None,
                    )
                except BaseException:  # a recommendation contains these lines itself
                    for line in source.leftovers():
                        progress.note(line)
                    raise
    except SlotLostError as lost:
        raise ClusterLostError(
            f"{lost.slot.name} was lost while it loaded the workload: {lost.reason}",
            "Run the same search again.",
        ) from None
    except KeyboardInterrupt:
        best = cached if cached is not None and cached.search.was_interrupted else None
        when = "there was a recommendation; the measured trials are kept" if folder.records() else "the first trial"
        raise SearchInterruptedError(
            f"Interrupted before {when}.",
            "Run the same search again.",
            best.excluded if best else (),
            best,
        ) from None


class _Search:
    """Search with its budget, folder, devices and watcher. Its steps are in `run`, `_search` and `_confirm`."""

    def __init__(self, source: Source, options: SearchOptions, progress: Progress, folder: StudyFolder) -> None:
        self.budget = Budget(options.budget_seconds)
        self.folder = folder
        self._meter = LoadMeter(identify(options.first_device).uuid)
        self._load_notes = host.load_notes()  # measured before the search adds load of its own
        self.watcher = ProgressWatcher(progress, self.budget, self._meter)
        self._source = source
        self._options = options
        self._progress = progress
        self._warnings: list[str] = []  # lines that the user should act on
        self._notes: list[str] = []
        self.devices = _devices(source, options, self.watcher, self._note)
        self._is_budget_spent = False

    def backend(self) -> WorkloadBackend:
        """Return the backend that runs the jobs before the confirmation."""
        backend = self.devices.backend()
        self.budget.num_slots = self.devices.num_slots
        return backend

    def run(
        self,
        backend: WorkloadBackend,
        fingerprint: Fingerprint,
        search_id: str,
        *,
        uses_shared_setting: bool,
        is_saved_if_interrupted: bool,
    ) -> Recommendation:
        """Open the workload, build the space, run the stages, decide and save; return the recommendation.

        With `uses_shared_setting`, a search without records first tries the best setting that the storage has for the
        same code. Unless `is_saved_if_interrupted`, the folder keeps the recommendation of an earlier search when this
        one is interrupted.
        """
        opened, load_before = self._open(backend)
        ledger = self._ledger(build_space(opened.hardware, opened.description, self._options), search_id)
        similar_best = self._shared_setting(fingerprint) if uses_shared_setting and not ledger.records else None
        planner = Planner(self._job_defaults(opened, backend, similar_best), self.budget)
        interruption = self._run_stages(backend, ledger, planner)
        if ledger.final_shortlist is None:
            raise self._error_without_choice(ledger, interruption)
        fingerprint = self._source.with_opened(fingerprint)
        edited = self._source.edited_files(fingerprint)
        if edited:
            self._warnings.append(
                f"{', '.join(edited[:3])} changed during the search, so that trials may have run both versions: search "
                "again with --fresh."
            )
        recommendation = recommend(
            ledger,
            options=self._options,
            environment=planner.confirming_environment(ledger),
            workload=opened.description,
            search=self._summary(ledger, planner, fingerprint, load_before, was_interrupted=interruption is not None),
            hardware=opened.hardware,
            fingerprint=fingerprint,
            versions=versions(),
            target=self._source.target,
            command_template=self._source.command_template,
        )
        if interruption is None or is_saved_if_interrupted:
            recommendation = self.folder.save(recommendation)
        if interruption is not None:
            trials, place = count(len(ledger.trials), "trial"), self.folder.recommendation_path
            kept = (
                "the best so far is in"
                if is_saved_if_interrupted
                else "the recommendation of an earlier search stays in"
            )
            raise SearchInterruptedError(
                f"{interruption} after {trials}; {kept} {place}.",
                "Run the same search again to continue it.",
                recommendation.excluded,
                recommendation if is_saved_if_interrupted else None,  # how to use it is said by its file
            )
        if not edited:
            self._store_for_others(recommendation)
        return recommendation

    def _run_stages(self, backend: WorkloadBackend, ledger: Ledger, planner: Planner) -> str | None:
        """Run all stages and return what interrupted them, or None."""
        try:
            try:
                self._search(backend, ledger, planner)
            finally:
                backend.close()  # its memory and threads would disturb the fresh processes
            self._confirm(ledger, planner)
        except KeyboardInterrupt:
            return "Interrupted"
        except ClusterLostError as error:
            return error.message.rstrip(".")
        return None

    def _search(self, backend: Backend, ledger: Ledger, planner: Planner) -> None:
        """Run the stages before the confirmation."""
        runner = Runner(backend, ledger, planner, self.watcher)
        storage, owner = self._options.storage or self.folder.path / "study.db", str(self.folder.path.resolve())
        if self._options.storage is not None:  # others may use the storage from a folder of the same name
            owner = f"{platform.node()}:{owner}"
        name, seed = self.folder.path.name, self._options.seed
        with Study.open(storage, name, ledger, owner=owner, seed=seed, note=self._progress.note) as study:
            self.watcher.phase("searching")
            if untried_seed(ledger, planner.job_defaults) is not None:
                for line in self._source.plan_lines(ledger.space, planner.job_defaults.description):
                    self._progress.note(line)
                self._progress.note(planner.forecast(ledger, may_fork="share_build" in backend.abilities))
            share_building(backend, planner, ledger, self._progress)
            for _ in run_stages(search_stages(study), runner):
                study.catch_up(ledger)
                if ledger.merits:
                    ledger.raise_if_unmeasured()
                if not runner.pending:
                    share_building(backend, planner, ledger, self._progress)
            is_out_of_time = not planner.has_time_for_trial(ledger, planner.exploration_seconds(ledger))
            is_open = untried_seed(ledger, planner.job_defaults) is not None
            max_trials = planner.job_defaults.max_trials
            has_trials_left = max_trials is None or len(ledger.trials) < max_trials
            self._is_budget_spent = is_out_of_time and (is_open or has_trials_left)
            study.catch_up(ledger, is_over=True)
            if not study.is_reachable:
                self._notes.append("The study's storage cannot be reached and lacks the latest trials.")

    def _confirm(self, ledger: Ledger, planner: Planner) -> None:
        """Run the stages that measure in fresh processes."""
        shortlist, job_defaults = ledger.final_shortlist, planner.job_defaults
        if shortlist is None:
            return

        self.watcher.phase("confirming in fresh processes")
        processes = self.devices.confirmation_backend(
            job_defaults.hardware.device,
            shares_processes=job_defaults.shares_processes,
            num_rounds=planner.num_rounds(ledger),
        )
        self.budget.num_slots = 1  # one run at a time
        with closing(processes) as backend:
            stages = confirmation_stages(shortlist, planner.confirming_environment(ledger), self._options)
            for _ in run_stages(stages, Runner(backend, ledger, planner, self.watcher)):
                pass

    def _load_warnings(self, load: MachineLoad) -> Sequence[str]:
        """Return warnings about the load by other processes; none if the search runs on other hosts."""
        if not self.devices.is_here:
            return ()
        warnings = machine_load.load_warnings(machine_load.evidence([load]), "search on an idle machine")
        return warnings if load.others_num_cores is not None else (*warnings, *self._load_notes)

    def _note(self, line: str) -> None:
        """Show a line now, and keep it for the recommendation."""
        self._progress.note(line)
        self._notes.append(line)

    def _open(self, backend: WorkloadBackend) -> tuple[OpenedWorkload, MachineLoad]:
        """Open the workload on every device; return it with the load by other processes in that time."""
        if self._options.objective == "energy" and "energy" not in backend.abilities:
            raise InvalidRequestError(
                "--objective is 'energy', but that of a trial of a command or of several ranks cannot be measured.",
                "Use --objective speed or memory.",
            )
        opened = open_workload(
            backend,
            self._source,
            self.devices.device,
            self.watcher,
            baseline_batch_size=self._options.baseline[1] if self._options.baseline else ASSUMED_BATCH_SIZE,
            is_batch_free=self._options.effective_batch_size is not None,
            cannot_be_built=self._cannot_be_built,
        )
        if opened.why_not_forked is not None:
            self._notes.append(f"Trials shared one process until it failed: {opened.why_not_forked}.")
        hardware, device = opened.hardware, device_of_caller(opened.hardware, self._options)
        held_bytes_by_caller = max(hardware.memory.held_by_caller, held_bytes(device) if self.devices.is_here else 0)
        hardware = replace(hardware, memory=replace(hardware.memory, held_by_caller=held_bytes_by_caller))
        self._progress.found_hardware(hardware)
        self._notes += hardware.notes
        self._warnings += alone(self._options.num_ranks, opened.description.trainer_ranks, hardware.device)
        if held_bytes_by_caller > _MIN_HELD_SHARE_TO_WARN * hardware.memory.total:
            self._warnings.append(
                f"The calling process holds {size(held_bytes_by_caller)} on {device}, which trials could not "
                "use. Create the data and the model inside functions that the trial calls, or move them off the GPU "
                "and call torch.cuda.empty_cache() before searching."
            )
        if self._options.objective == "energy":
            require_counter(hardware.identity.type, hardware.identity.uuid)
        for line in self.devices.notes:
            self._note(line)
        if self.devices.num_slots > 1:
            self.watcher.phase(f"loading the workload on {self.devices.num_slots} devices")
        backend.open_others(self.budget.left())
        load = self._meter.stop()
        for line in self._load_warnings(load):
            self._progress.note(line)  # the recommendation has the load in `search.load`
        return opened._replace(hardware=hardware), load

    def _shared_setting(self, fingerprint: Fingerprint) -> Setting | None:
        """Return the setting that the storage recommends for the same code and device with other options, or None."""
        if self._options.storage is None:
            return None
        try:
            shared_recommendation = next(iter(shared.shared_recommendations(self._options.storage, fingerprint)), None)
        except StudyError as error:
            self._progress.note(f"The storage's results for the same code cannot be used: {error.message}")
            return None
        if shared_recommendation is None:
            return None
        setting = Setting.of(shared_recommendation.recommendation.config)
        self._progress.note(
            f"Starting from what was measured {shared_recommendation.origin}, for the same code: {setting}."
        )
        return setting

    def _job_defaults(self, opened: OpenedWorkload, backend: Backend, similar_best: Setting | None) -> JobDefaults:
        hardware, description = opened.hardware, opened.description
        return JobDefaults(
            hardware=hardware,
            description=description,
            memory_limit_bytes=self._options.limit_bytes(
                description.available_bytes(hardware.memory.available, hardware.device)
            ),
            torch_state=opened.torch_state,
            environment=recommended_environment(hardware.device),
            seed=self._options.seed,
            ready_seconds=opened.ready_seconds,
            max_trials=self._options.max_trials,
            are_trials_fresh=self._source.command_template is not None,
            loads_together="load_together" in backend.abilities,
            num_together=backend.num_together if isinstance(backend, LoadingBackend) else 1,
            similar_best=similar_best,
        )

    def _summary(
        self, ledger: Ledger, planner: Planner, fingerprint: Fingerprint, load: MachineLoad, *, was_interrupted: bool
    ) -> SearchSummary:
        return SearchSummary(
            study=self.folder.path.name,
            num_trials=len(ledger.trials),
            num_failures=ledger.num_failures,
            seconds=self.budget.elapsed(),
            start_seconds=planner.job_defaults.start_seconds,
            was_interrupted=was_interrupted,
            search_id=ledger.search_id,
            is_budget_spent=self._is_budget_spent or was_interrupted,
            warnings=tuple(self._warnings),
            notes=(
                *self._notes,
                *self._source.notes(),
                *(f"This recommendation cannot be cached: {part}." for part in fingerprint.unknown),
            ),
            files=self._source.leftovers(),
            load=load if self.devices.is_here else None,
        )

    def _store_for_others(self, recommendation: Recommendation) -> None:
        """Store the recommendation in the shared storage if there is one; a failure is only noted."""
        if self._options.storage is None or recommendation.fingerprint.unknown:
            return
        try:
            shared.store_recommendation(self._options.storage, recommendation)
        except StudyError as error:
            self._progress.note(f"This recommendation was not stored for others: {error.message}")

    def _cannot_be_built(self, failure: Failure) -> NothingWorksError:
        reason = f"{failure.kind}: {failure.message}" + (f"\n{failure.details.rstrip()}" if failure.details else "")
        return NothingWorksError(
            f"The baseline, your training as it is now, does not run: {reason}",
            explain.next_step_for([failure]),
            (),
        )

    def _ledger(self, space: Space, search_id: str) -> Ledger:
        ledger = Ledger(
            space,
            self.folder.records(search_id),
            objective=self._options.objective,
            num_steps=self._options.horizon_steps(space.baseline.effective_batch_size * space.num_batches),
            has_fixed_samples=self._options.num_samples is not None,
            search_id=search_id,
            write=self.folder.append,
        )
        if ledger.records:
            self._progress.note(f"Continuing an earlier search with {len(ledger.trials)} measured trials.")
        return ledger

    def _error_without_choice(self, ledger: Ledger, interruption: str | None) -> AutotuneAmpError:
        excluded = explain.excluded_candidates(ledger, is_budget_spent=True)
        if interruption is not None:
            return SearchInterruptedError(
                f"{interruption} before anything was measured.", "Run the same search again.", excluded, None
            )
        step_seconds = self.watcher.last_step_seconds
        return explain.nothing_works_error(ledger, excluded, step_seconds is not None) or self.budget.too_small_error(
            step_seconds
        )


def device_of_caller(hardware: Hardware, options: SearchOptions) -> str:
    """Return the first device's name in the calling process. The process of each of several GPUs sees only its own."""
    return hardware.device if options.devices in (None, "all") else options.first_device


def search_stages(study: Study) -> tuple[Stage, ...]:
    """Return the stages of a search up to its confirmation, in order."""
    checks, scales, fallbacks = Checks(), LossScales(study), Fallbacks()
    workers, later = LoaderWorkers(checks), TrainedWeightsChecks(checks)
    # A faster setting may wait for data again, so the number of workers is raised before and after.
    on_the_winner = workers, Variants(checks), workers, later
    # A fallback that is faster than its contender becomes a contender itself, and is checked like any other.
    return *exploration_stages(), checks, scales, *on_the_winner, fallbacks, later, scales, fallbacks


def confirmation_stages(shortlist: Shortlist, environment: dict[str, str], options: SearchOptions) -> tuple[Stage, ...]:
    """Return the stages that measure in fresh processes, in order."""
    confirm = ConfirmationRounds(shortlist, environment)
    stages: tuple[Stage, ...] = (
        (OneRankTrial(environment, 2 * MIN_ROUNDS), confirm, OneRankTrial(environment, 0))
        if options.ranks > 1
        else (confirm,)
    )
    is_limited = options.batch_size is not None or options.max_trials is not None
    return stages if is_limited else (*stages, LargerBatchTrials(environment))


def _devices(
    source: Source, options: SearchOptions, watcher: ProgressWatcher, warn: Callable[[str], None]
) -> Devices | RayDevices:
    """Return the devices for a search with these options. `warn` is called for each node that cannot be used."""
    if options.ray is not None:
        source.is_elsewhere = True
        payload = source.payload_for_nodes()
        cluster = Cluster(
            options.ray,
            sends_directory=not (payload.target or "").startswith("autotune_amp."),
            excludes=[] if (out := os.path.relpath(options.out)).startswith(os.pardir) else [f"/{out}/"],
        )
        return RayDevices(cluster, options.device, options.ranks, payload, watcher.for_slot, warn)
    gpus = None if options.devices is None else find_gpus(options.devices)
    return Devices(options.first_device, source.backend, watcher.for_slot, gpus, options.ranks)
