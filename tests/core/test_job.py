"""What a process tells of its jobs, as the parent reads it."""

from __future__ import annotations

import pytest

from autotune_amp.core.errors import AutotuneAmpError, RunnerError, WorkloadError
from autotune_amp.core.job import RequestError


@pytest.mark.parametrize(("kind", "expected"), [("WorkloadError", WorkloadError), ("UsersOwnError", RunnerError)])
def test_an_error_in_a_process_is_of_its_class_where_that_is_known(kind: str, expected: type[AutotuneAmpError]) -> None:
    error = RequestError(kind, "It failed.", "Fix it.").exception()
    assert (type(error), error.message, error.next_step) == (expected, "It failed.", "Fix it.")
