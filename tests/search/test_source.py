"""What trials take over from the process that calls the search, and from the child that called the user's function."""

from __future__ import annotations

import pytest
import torch

from autotune_amp import workloads
from autotune_amp.precision import torch_state
from autotune_amp.search.source import live_source


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_trials_of_a_live_function_have_the_flags_that_it_sets(*, is_elsewhere: bool) -> None:
    source = live_source(workloads.workload)
    source.is_elsewhere = is_elsewhere
    child = torch_state.capture() | {"cuda.matmul.fp32_precision": "tf32", "num_threads": 1000}
    with torch.autocast("cpu"):
        caller, found = torch_state.capture(), source.torch_state(child)
    num_threads = 1000 if is_elsewhere else torch.get_num_threads()
    assert found == caller | {"cuda.matmul.fp32_precision": "tf32", "num_threads": num_threads}
