"""Pins, overrides and observers in compiled models: the graphs, and what they compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from swap_samples import Model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from autotune_amp.core.precisions import Precision
from autotune_amp.precision.forward_wrapper import ForwardObserver, observe, override, pin_fp32, unpin
from autotune_amp.precision.torch_state import autocast


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # importing inductor
def test_compiled_graphs_and_numerics_stay_as_they_were(backend: str, x: Tensor) -> None:
    children = psutil.Process().children()
    original = Model(num_blocks=3)
    counts, results, maxima = [], [], []
    for attached in ("never", "before compiling", "after compiling"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model, observer = copy.deepcopy(original), ForwardObserver(6, "cpu")

        def attach(model: Model = model, observer: ForwardObserver = observer) -> None:
            for i, block in enumerate(model.blocks):
                observe(block, observer, 2 * i)
                observe(model.linear(i), observer, 2 * i + 1)

        if attached == "before compiling":
            attach()
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with torch._inductor.config.patch(compile_threads=1), autocast("bf16", "cpu"):
            if attached == "after compiling":
                compiled(x)
                assert counter.frame_count == 1
                attach()
                counter.frame_count = 0
            for is_sampling in (False, True, False):
                observer.is_sampling = is_sampling  # the graph must not look at it
                (out,) = compiled(x)
                out.square().sum().backward()
        counts.append(counter.frame_count)
        results.append([out, *(p.grad for p in model.parameters())])
        maxima.append(observer.read())
    assert counts == [1, 1, 1]
    for result in results[1:]:
        assert all(map(torch.equal, results[0], result))
    assert (maxima[0] == 0).all()
    assert (maxima[1] > 0).all()
    assert torch.equal(maxima[1], maxima[2])
    assert psutil.Process().children() == children


@pytest.mark.parametrize("is_pinned_before", [False, True])
def test_a_pin_is_in_the_graph_recompiles_once_and_its_end_is_free(is_pinned_before: bool, x: Tensor) -> None:
    model = Model()
    if is_pinned_before:
        pin_fp32(model.linear(0), "cpu")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with autocast("bf16", "cpu"):
        first = compiled(x)[0]
        for pins in (not is_pinned_before, is_pinned_before):
            if pins:
                pin_fp32(model.linear(0), "cpu")
            else:
                unpin(model.linear(0))
            assert torch.equal(compiled(x)[0], model(x)[0])
            assert torch.equal(compiled(x)[0], first) == (pins == is_pinned_before)
    assert counter.frame_count == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_each_new_precision_compiles_once_and_comes_back_for_free(in_place: bool, x: Tensor) -> None:
    model, eager = Model(), Model()
    eager.load_state_dict(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = model
    if in_place:
        model.compile(backend=counter, fullgraph=True)
    else:
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    counts, outputs = [], []
    precisions: list[Precision] = ["fp16", "bf16", "fp32", "fp16", "bf16", "fp32"]
    for precision in precisions:
        override(compiled, precision, "cpu")
        with autocast("fp16", "cpu"):
            outputs.append(compiled(x)[0])
        with autocast(precision, "cpu"):
            assert torch.equal(outputs[-1], eager(x)[0])
        counts.append(counter.frame_count)
    assert counts == [1, 2, 3, 3, 3, 3]
    assert not torch.equal(outputs[0], outputs[1])
