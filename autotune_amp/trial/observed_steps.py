"""Jobs on the training steps of a command, in its own process: the command's agent observes the steps and calls this.

The function named by `Job.command_work` is a generator function with the arguments (`ObservedTraining`, job). Each
`yield` lets the script run on: `yield "after step"` to the end of its next optimizer step, `yield "before step"` to the
end of the backward pass before it. Its return value is the result of the job. If the script raises an error meanwhile,
the `yield` raises it, and a generator that catches it still returns a result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from autotune_amp.core.job import Job, find_job, import_attribute
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.numerics.accumulation import batch_tensors

StepEvent: TypeAlias = Literal["before step", "after step"]
# Annotation of the code that an optimizer step runs in its closure; in a trace it lies inside the optimizer's.
CLOSURE_MARK = "autotune_amp closure"


class ObservedTraining:
    """Training of a command, as its agent observes it after the warm-up steps.

    `peak_bytes` is the peak of the memory so far: on a CPU that of the whole process, on an accelerator that of tensors
    and, as `reserved_bytes`, that of the allocator. `regions` are the autocast regions of the latest step
    (``device:dtype``, ``device:off`` for a disabled one). `num_ranks` processes train together, of which this is the
    first.
    """

    def __init__(self, observer: Any, *, memory: Mapping[str, int], regions: Sequence[str], num_ranks: int) -> None:
        self._passes, self._loaders = observer.passes, observer.loaders
        self.regions = tuple(regions)
        self.num_ranks = num_ranks
        self.peak_bytes = memory.get("peak_memory_bytes") or 0
        self.reserved_bytes = memory.get("reserved_memory_bytes")
        self.optimizers: list[torch.optim.Optimizer] = observer.live_optimizers()
        self.device: torch.device = observer.device
        running: list[nn.Module] = observer.live_modules()
        inner = {module for each in running for module in each.modules() if module is not each}
        self.outermost_modules = [module for module in running if module not in inner]

    @cached_property
    def model(self) -> nn.Module:
        """Return the module that the script calls; of several, a container in which each has the name of its class."""
        if len(self.outermost_modules) == 1:
            return self.outermost_modules[0]
        container = nn.Module()
        for module in self.outermost_modules:
            name = type(module).__name__
            num = sum(type(other) is type(module) for other in container._modules.values())
            container._modules[f"{name}_{num + 1}" if num else name] = module
        return container

    @property
    def live(self) -> LiveTraining:
        """Return the modules and optimizers."""
        return LiveTraining(models=self.outermost_modules, optimizers=self.optimizers, device=self.device)

    @contextmanager
    def calling(
        self,
        *,
        before_forward: Callable[[Sequence[Tensor]], object] = lambda _: None,
        before_backward: Callable[[Tensor], object] = lambda _: None,
    ) -> Iterator[None]:
        """Call these functions within the context: with the tensors of the batch before the forward pass of each
        outermost module, and with the unscaled loss before each backward pass.

        The tensors are the module's inputs and, if one of them is of the latest batch of a DataLoader, the others of
        that batch.
        """

        def call_before_forward(_: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            loaded = [tensor for _, tensor in batch_tensors(self._loaders.latest)]
            is_used = any(tensor is other for tensor in inputs for other in loaded)
            before_forward([*inputs, *loaded] if is_used else inputs)

        with ExitStack() as stack:
            for module in self.outermost_modules:
                stack.callback(module.register_forward_pre_hook(call_before_forward, with_kwargs=True).remove)
            self._passes.on_loss.append(before_backward)
            stack.callback(self._passes.on_loss.remove, before_backward)
            yield

    def num_samples(self, batch: Sequence[Tensor]) -> int:
        """Return the number of samples in a batch: the size of its first tensor with enough dimensions, 1 without."""
        dim = self._passes.sample_dim
        return next((tensor.shape[dim] for tensor in batch if tensor.dim() > dim), 1)


class DiagnosedSteps:
    """Runs the job in `settings` (its `kind` and `fields`) on the steps of a training, from event to event.

    `send` receives the result as a JSON document and does not return.
    """

    def __init__(
        self, settings: Mapping[str, Any], observer: Any, *, send: Callable[[str], object], **observed: Any
    ) -> None:
        job: Job[Any] = find_job(settings["kind"], settings["fields"])
        assert job.command_work is not None
        training = ObservedTraining(observer, **observed)
        self._work: Generator[StepEvent, None, Any] = import_attribute(job.command_work)(training, job)
        self._send = send
        self._report_error, sys.excepthook = sys.excepthook, self._raise_in_work
        self._awaited: StepEvent | None = None
        self._go_on(lambda: next(self._work))

    def resume(self, event: StepEvent) -> None:
        """Continue the job if it waits for this event."""
        if event == self._awaited:
            self._go_on(lambda: next(self._work))

    def in_closure(self) -> AbstractContextManager[object]:
        """Return the context in which an optimizer step runs its closure, which the profiler sees."""
        return record_function(CLOSURE_MARK)

    def _go_on(self, proceed: Callable[[], StepEvent]) -> None:
        self._awaited = None
        try:
            self._awaited = proceed()
        except StopIteration as end:
            self._send(msgspec.json.encode(end.value).decode())

    def _raise_in_work(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Handle an exception that ends the script: raise it where the job waits, or report it as if there was none."""
        if isinstance(error, Exception) and self._awaited is not None:
            try:
                self._go_on(lambda: self._work.throw(error))
            except Exception as other:  # the job did not catch it
                error = other
        self._report_error(kind, error, trace)
