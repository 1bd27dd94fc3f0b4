"""What searches rely on, whatever jobs run in: the tests of one backend are a subclass of `BackendContract`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from autotune_amp.core.outcome import Failure, FailureKind, Measurement
from autotune_amp.processes.local import Backend
from autotune_amp.trial.jobs import Check, Trial


class Made(NamedTuple):
    """A backend, and what is known of some jobs in it: a trial that works, one that fails, a check."""

    backend: Backend
    trial: Trial
    failing: Trial
    failure_kind: FailureKind
    check: Check


class BackendContract:
    """A subclass overrides `made`; and `new` where `made` is shared by several tests."""

    @pytest.fixture
    def made(self) -> Any:
        """A `Made` whose backend nobody changes."""
        raise NotImplementedError

    @pytest.fixture
    def new(self, made: Made) -> Any:
        """A `Made` of the test's own."""
        return made

    def test_a_trial_is_measured_at_its_setting(self, made: Made) -> None:
        handle = made.backend.submit(made.trial)
        found = handle.result()
        assert isinstance(found, Measurement), found
        samples = made.trial.candidate.effective_batch_size
        assert found.samples_per_second * found.step_seconds == pytest.approx(samples)
        assert len(found.raw_step_seconds) > 0
        assert handle.start_seconds is None or handle.start_seconds >= 0

    def test_a_failure_is_a_result_and_the_next_job_runs(self, made: Made) -> None:
        failed = made.backend.submit(made.failing).result()
        assert isinstance(failed, Failure)
        assert (failed.kind, bool(failed.message)) == (made.failure_kind, True)
        assert isinstance(made.backend.submit(made.trial).result(), Measurement)

    def test_a_check_answers_what_was_asked(self, made: Made) -> None:
        assert "fidelity" in made.backend.abilities
        found = made.backend.submit(made.check).result()
        assert isinstance(found, made.check.answer), found

    def test_a_job_s_device_is_one_of_its_slots(self, made: Made) -> None:
        made.backend.submit(made.trial).result()
        assert made.trial.device in [slot.device for slot in made.backend.slots]

    def test_a_build_is_shared_only_where_that_is_an_ability_and_by_no_kept_process(self, new: Made) -> None:
        backend = new.backend
        if "share_build" in backend.abilities:
            reason = backend.share_build(new.trial, 60.0)
            assert backend.is_build_shared == (reason is None)
            assert isinstance(backend.submit(new.trial).result(), Measurement)
        backend.keep()
        assert not backend.is_build_shared
        assert "share_build" not in backend.abilities
        assert isinstance(backend.submit(new.trial).result(), Measurement)
