"""What is said of failures that what was heard or printed explains."""

from __future__ import annotations

import pytest
import said

from autotune_amp.command.messages import Refused
from autotune_amp.command.verdict import UNOBSERVED_SECONDS, RunState, verdict, with_advice
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure

TORCHRUN_FAILED = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED (EADDRINUSE)
"""


@pytest.mark.parametrize("num_ooms", [0, 2])
def test_a_script_that_catches_its_running_out_of_memory(num_ooms: int) -> None:
    steps = (said.step(7, number, num_ooms=num_ooms * (number == 2)) for number in (1, 2, 3))
    heard = said.heard([said.optimizer(7, rank=1, world=2), *steps])
    seen = RunState(seconds=1.0, seconds_since_step=0.0)
    found = verdict(heard, seen, Deadlines(), is_enough=True, memory_limit_bytes=None)
    if num_ooms:
        assert isinstance(found, Failure)
        assert found.kind == "oom"
        assert "rank 1" in found.message
    else:
        assert found == "measured"


def test_a_refused_upload_is_no_file() -> None:
    refused_path = "https://huggingface.co/me/model"
    heard = said.heard([Refused(pid=1, time=0.0, what="an upload", path=refused_path, line="train.py:3")])
    seen = RunState(seconds=1.0, seconds_since_step=0.0)
    found = verdict(heard, seen, Deadlines(), is_enough=True, memory_limit_bytes=None)
    assert isinstance(found, Failure)
    assert refused_path in found.message
    assert "train.py:3" in found.message
    assert "{trial_dir}" not in (found.details or "")


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_python_that_says_nothing_is_not_waited_for(says_hello: bool) -> None:
    seen = RunState(seconds=30.0, seconds_since_step=0.0, unobserved_seconds=UNOBSERVED_SECONDS + 1)
    heard = said.heard([said.hello(3)] if says_hello else [])
    found = verdict(heard, seen, Deadlines(), is_enough=False, memory_limit_bytes=None)
    assert (found is None) is says_hello


def test_the_error_that_was_printed_and_the_next_step() -> None:
    found = with_advice(Failure(kind="crash", message="the command exited with status 1", details=TORCHRUN_FAILED))
    assert "ChildFailedError" not in found.message
    assert "DistNetworkError" in found.message
    assert "{port}" in (found.details or "").partition("\n")[0]
    assert TORCHRUN_FAILED.strip() in (found.details or "")


def test_what_says_nothing_more_stays_as_it_is() -> None:
    failure = Failure(kind="timeout", message="no step for 3 s", details="Error: of an earlier try")
    assert with_advice(failure) == failure


def test_a_gpu_that_device_hides_from_the_command_is_told() -> None:
    found = with_advice(Failure(kind="workload_error", message="AcceleratorError: CUDA error: invalid device ordinal"))
    assert "--device" in (found.details or "")
