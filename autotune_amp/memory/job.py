"""MemoryJob: measures the memory of a training step by kind; and its result. Plain data, no torch."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure
from autotune_amp.trial.jobs import Trial, as_failure


class ModuleActivations(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes saved for the backward pass by the forward pass of one module, without its submodules.

    "" stands for tensors saved outside of all modules, as by a loss function.
    """

    name: str
    num_bytes: int


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="memory"):
    """Memory of an optimizer step by kind, in bytes on its device.

    Each storage counts once and whole, however many tensors are views of it. `gradients_bytes` are those of the step's
    parameters, `optimizer_state_bytes` every tensor in the state of the optimizers, `batch_bytes` the tensors of a
    batch, `cast_weights_bytes` the copies of parameters that autocast makes in the compute type. `modules`, in the
    order of the model, hold the activations: other tensors that the forward passes saved for the backward pass. The
    backward pass frees activations while gradients appear: `not_held_together_bytes` is the sum of both less their
    largest sum at one time. `taken_bytes` is the peak of an equal step that was not inspected: the memory that counts
    against a limit, on a CPU the growth of the process, on an accelerator the memory reserved by the allocator; of this
    `allocated_bytes` were in tensors at most, None on a CPU. Compiled models run without compiling during the
    inspection. `optimizers` are the classes of the optimizers. `checkpointable_modules` are the repeated blocks that
    could be recomputed in the backward pass, so that nothing inside them would be saved.
    """

    taken_bytes: int
    allocated_bytes: int | None
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    batch_bytes: int
    cast_weights_bytes: int
    not_held_together_bytes: int
    modules: tuple[ModuleActivations, ...]
    optimizers: tuple[str, ...] = ()
    checkpointable_modules: tuple[str, ...] = ()

    @property
    def activations_bytes(self) -> int:
        """Return the activations of all modules in bytes."""
        return sum(module.num_bytes for module in self.modules)

    @property
    def rest_bytes(self) -> int:
        """Return the part of the peak in bytes that belongs to no kind; below 0 if a part was not fully resident.

        It consists of temporaries, workspaces of libraries, and memory cached by the allocator.
        """
        held = self.parameters_bytes + self.buffers_bytes + self.gradients_bytes + self.optimizer_state_bytes
        held += self.batch_bytes + self.cast_weights_bytes + self.activations_bytes
        return self.taken_bytes - (held - self.not_held_together_bytes)


class MemoryJob(Job[MemoryBreakdown], frozen=True, kw_only=True):
    """Job that measures the memory of the training step described by `trial`.

    torch's own memory snapshot of the step is written to `snapshot_file`, unless that is None.
    """

    answer: ClassVar[Any] = MemoryBreakdown
    work: ClassVar[str] = "autotune_amp.memory.child:take_apart"

    trial: Trial
    snapshot_file: str | None = None

    def after(
        self, problem: Failure | AutotuneAmpError, so_far: MemoryBreakdown | None
    ) -> MemoryBreakdown | Failure | Job[MemoryBreakdown]:
        """Return a `Failure` for the precision, which the profile reports."""
        del so_far
        return as_failure(problem)
