"""MemoryJob: a few steps of one training, whose memory is taken apart; and what is found. Plain data, no torch."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure
from autotune_amp.trial.jobs import Trial, as_failure


class ModuleActivations(msgspec.Struct, frozen=True, kw_only=True):
    """What the forward pass of one module, without those inside it, saved for the backward pass; "" is what was saved
    outside of every module, as by a loss function."""

    name: str
    num_bytes: int


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="memory"):
    """What holds the memory of an optimizer step, in bytes on the device of the training.

    Each storage counts once and whole, however many tensors are views of it. `gradients_bytes` are those of the step's
    parameters, `optimizer_state_bytes` every tensor in the state of the optimizers, `batch_bytes` the tensors of a
    batch, `cast_weights_bytes` the copies of parameters that autocast makes in the compute type. `modules`, in the
    order of the model, hold the activations: what the forward passes saved for the backward pass beside all of these.
    The backward pass frees activations while gradients appear: `not_held_together_bytes` is by how much the two are
    never there at once. `taken_bytes` is the peak of a step like it that was run without a look inside: what counts
    against a limit, on a CPU what the process took beyond what it held before, on an accelerator what the allocator
    reserved; of this `allocated_bytes` were in tensors at the most, None on a CPU. What is compiled runs without
    compiling while it is looked at. `optimizers` are the classes of the optimizers. `checkpointable_modules` are the
    repeated blocks that could be computed again in the backward pass, so that nothing inside of them would be saved.
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
        """Those of all modules."""
        return sum(module.num_bytes for module in self.modules)

    @property
    def rest_bytes(self) -> int:
        """What of the peak none of the parts accounts for: temporaries, workspaces of libraries, what the allocator
        holds in between; below 0 where a part was not resident as a whole."""
        held = self.parameters_bytes + self.buffers_bytes + self.gradients_bytes + self.optimizer_state_bytes
        held += self.batch_bytes + self.cast_weights_bytes + self.activations_bytes
        return self.taken_bytes - (held - self.not_held_together_bytes)


class MemoryJob(Job[MemoryBreakdown], frozen=True, kw_only=True):
    """Take the memory of the training that `trial` describes apart; its step is recorded by torch's own memory snapshot
    in `snapshot_file`, unless that is None."""

    answer: ClassVar[Any] = MemoryBreakdown
    work: ClassVar[str] = "autotune_amp.memory.child:take_apart"

    trial: Trial
    snapshot_file: str | None = None

    def after(
        self, problem: Failure | AutotuneAmpError, so_far: MemoryBreakdown | None
    ) -> MemoryBreakdown | Failure | Job[MemoryBreakdown]:
        """A precision that fails is one to be told of."""
        del so_far
        return as_failure(problem)
