"""How a run ended, from what was heard and seen of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import said

from autotune_amp.command.messages import Captured, Hello, Refused, Stack, Unstepped
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.verdict import RunState, verdict
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure

DEADLINES = Deadlines(whole_seconds=100, first_step_seconds=50, step_seconds=10)


def of(heard: RunEvents, *, is_enough: bool = False, limit: int | None = None, **seen: Any) -> tuple[str, str]:
    """The kind and message of the failure, "" for both while it goes on."""
    fields: dict[str, Any] = {"seconds": 1.0, "seconds_since_step": 1.0, **seen}
    found = verdict(heard, RunState(**fields), DEADLINES, is_enough=is_enough, memory_limit_bytes=limit)
    return (found.kind, found.message) if isinstance(found, Failure) else (found or "", "")


def test_it_goes_on_until_it_is_measured() -> None:
    heard = said.trained([8])
    assert of(heard) == ("", "")
    assert of(heard, is_enough=True) == ("measured", "")
    assert of(heard, status=0) == ("measured", ""), "a training that ends after enough steps"
    kind, message = of(heard, limit=1 << 20, memory_bytes=1 << 30)
    assert kind == "oom"
    assert "1024 MiB" in message


NOTHING = said.heard([])
PYTHON, TORCH = said.heard([said.hello(1)]), said.heard([said.hello(1), said.torch(1)])


@pytest.mark.parametrize(
    ("heard", "about"), [(NOTHING, "env -i"), (PYTHON, "imported torch"), (TORCH, "resumed from a checkpoint")]
)
@pytest.mark.parametrize("seen", [{"status": 0}, {"seconds": 60.0}, {"seconds": 101.0}])
def test_no_step_has_three_reasons(heard: RunEvents, about: str, seen: dict[str, Any]) -> None:
    kind, message = of(heard, **seen)
    others = {"env -i", "imported torch", "resumed from a checkpoint"} - {about}
    assert about in message
    assert not any(other in message for other in others)
    assert kind == ("timeout" if heard.of(Hello) and "status" not in seen else "workload_error")


@pytest.mark.parametrize(("heard", "is_loading"), [(PYTHON, True), (TORCH, True), (said.trained([8]), False)])
def test_a_command_that_took_no_step_in_all_of_its_time_speaks_against_no_setting(
    heard: RunEvents, *, is_loading: bool
) -> None:
    seen = RunState(seconds=101.0, seconds_since_step=1.0)
    found = verdict(heard, seen, DEADLINES, is_enough=False, memory_limit_bytes=None)
    assert isinstance(found, Failure)
    assert (found.kind, found.is_loading) == ("timeout", is_loading)


GLOO = said.error(100, "RuntimeError", "gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:5", 0, 2)
LAUNCHER = said.error(1, "ChildFailedError", "train.py FAILED")


def test_the_rank_that_ran_out_of_memory_is_named_whatever_the_others_say() -> None:
    heard = said.trained([5, 5])
    cause = said.error(101, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: 1 bytes", 1, 2)
    for each in (GLOO, LAUNCHER, cause):
        heard.add(each)
    kind, message = of(heard)
    assert kind == "oom"
    assert message.startswith("rank 1: ")


def test_an_own_error_comes_before_what_is_said_of_others() -> None:
    heard = said.trained([5, 5])
    for message in (GLOO, LAUNCHER, said.error(101, "ValueError", "a fault of the script", 1, 2)):
        heard.add(message)
    assert of(heard) == ("workload_error", "rank 1: ValueError: a fault of the script")


PRINTED = """
  failed (exitcode: -15) local_rank: 0 (pid: 100) of binary: python
  failed (exitcode: -9) local_rank: 1 (pid: 101) of binary: python
"""


@pytest.mark.parametrize("errors", [[], [GLOO], [LAUNCHER], [GLOO, LAUNCHER]])
def test_a_rank_that_was_killed_is_named(errors: list[Any]) -> None:
    heard = said.trained([5, 5])
    heard.add(said.closed(101))
    for each in errors:
        heard.add(each)
    heard.add(said.closed(100))
    kind, message = of(heard, status=1, printed=PRINTED)
    assert kind == "crash"
    assert re.search(r"rank 1 .*SIGKILL", message)


def test_what_torch_multiprocessing_raises_is_the_error_of_its_process() -> None:
    heard = said.trained([5])
    text = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\nValueError: wrong\n"
    )
    heard.add(said.error(1, "ProcessRaisedException", text))
    assert of(heard, status=1) == ("workload_error", "rank 1: ValueError: wrong")


def test_an_error_of_a_helper_that_the_script_survives_ends_nothing() -> None:
    heard = said.trained([8])
    heard.add(said.error(7, "ImportError", "no module named flash_attn"))
    assert of(heard) == ("", "")
    assert of(heard, is_enough=True) == ("measured", "")
    assert of(heard, status=0) == ("measured", "")
    assert of(heard, seconds=101.0)[0] == "timeout"
    assert of(heard, status=1) == ("workload_error", "ImportError: no module named flash_attn")
    unstepped = said.heard([said.hello(7), said.torch(7), said.error(7, "KeyError", "the moon")])
    assert of(unstepped, seconds=101.0) == ("workload_error", "KeyError: the moon")


def test_a_rank_that_hangs_is_named_with_its_stack_first() -> None:
    heard = said.trained([5, 5])
    heard.add(Stack(pid=100, time=0.0, text="waiting", at=("/x/torch/autograd/graph.py",)))
    heard.add(Stack(pid=101, time=0.0, text="sleeping", at=("train.py",)))
    assert of(heard, seconds_since_step=9.0) == ("", "")
    found = verdict(
        heard, RunState(seconds=20.0, seconds_since_step=11.0), DEADLINES, is_enough=False, memory_limit_bytes=None
    )
    assert isinstance(found, Failure)
    assert found.kind == "timeout"
    assert "rank 1 hangs" in found.message
    assert found.details is not None
    assert found.details.index("sleeping") < found.details.index("waiting")


def test_where_all_ranks_hang_alike_none_is_named() -> None:
    heard = said.trained([2, 2])
    for pid in (100, 101):
        heard.add(Stack(pid=pid, time=0.0, text="sleeping", at=("train.py",)))
    kind, message = of(heard, seconds=101.0)
    assert kind == "timeout"
    assert "rank" not in message


def test_a_rank_that_is_not_heard_is_counted() -> None:
    heard = said.trained([5, 0])
    assert "1 of 2 ranks" in of(heard, seconds=60.0)[1]
    assert "1 of 2 ranks" in of(heard, status=0)[1]


def test_other_ends_of_a_command() -> None:
    heard = said.trained([2])
    assert of(heard, status=-11) == ("crash", "the command died of SIGSEGV (segmentation fault)")
    assert of(heard, status=3) == ("crash", "the command exited with status 3")
    assert of(heard, status=0)[0] == "workload_error"
    assert of(heard, status=1, printed="... std::bad_alloc")[0] == "oom"
    heard.add(Refused(pid=100, time=0.0, what="open", path="/data/model.pt", line="train.py:3"))
    kind, message = of(heard, is_enough=True)
    assert kind == "workload_error"
    assert "/data/model.pt" in message
    assert "train.py:3" in message


def test_passes_without_a_step_of_torchs_are_told_before_the_time_is_up() -> None:
    unstepped = Unstepped(pid=1, time=1.0, num_backward=512)
    kind, message = of(said.heard([said.hello(1), said.torch(1), unstepped]))
    assert kind == "workload_error"
    assert "512" in message
    trained = said.trained([8])
    trained.add(unstepped)  # of another process
    assert of(trained) == ("", "")


@pytest.mark.parametrize("status", [None, 0])
def test_steps_that_are_replayed_from_a_graph_are_not_waited_for(status: int | None) -> None:
    heard = said.trained([3])
    heard.add(Captured(pid=100, time=2.0))
    kind, message = of(heard, status=status)
    assert kind == "workload_error"
    assert "CUDA graph" in message
    assert of(heard, is_enough=True) == ("measured", "")
