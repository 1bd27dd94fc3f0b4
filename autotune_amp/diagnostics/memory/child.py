"""Child process of a memory profile: one step for the peak, and one in which every tensor is inspected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune_amp.core.job import Phase, Tell
from autotune_amp.core.outcome import Failure
from autotune_amp.diagnostics.memory.results import MemoryBreakdown, MemoryJob, ModuleActivations
from autotune_amp.dimensions.activation_checkpointing import ACTIVATION_CHECKPOINTING, repeated_blocks
from autotune_amp.numerics.accumulation import batch_tensors
from autotune_amp.precision.forward_wrapper import can_be_wrapped, modules_by_name
from autotune_amp.trial import data
from autotune_amp.trial.context import Context
from autotune_amp.trial.judge import failure_from_memory
from autotune_amp.trial.observed_steps import ObservedTraining, StepEvent
from autotune_amp.trial.step_profile.child import warm_up
from autotune_amp.trial.training import BaseTraining, make_training
from autotune_amp.trial.worker import prepare_process, run_guarded

MAX_INSPECTED_PASSES = (
    2  # forward passes of a step that are run: from the second on, gradients exist before the forward pass
)
MAX_HISTORY_ENTRIES = 100_000  # entries of a snapshot, as in PyTorch's own guide


def measure_memory(context: Context, spec: MemoryJob, tell: Tell) -> MemoryBreakdown | Failure:
    """Measure the memory of a training step by kind; return a `Failure` if it fails or exceeds its limit."""
    return run_guarded(context, spec.trial, lambda: _measure(context, spec, tell))


def _measure(context: Context, spec: MemoryJob, tell: Tell) -> MemoryBreakdown | Failure:
    memory, _ = prepare_process(context, spec.trial)
    model = context.model(torch.device(spec.device))
    with closing(make_training(context.workload, model, spec.trial)) as training:
        training.start_loading()
        retries = memory.num_allocator_retries()
        warm_up(training)  # from here on the optimizer holds its state
        tell(Phase("measuring memory"))
        with nullcontext() if spec.snapshot_file is None else snapshot(spec.snapshot_file):
            _run_step(training)
        memory.poll()
        peak_bytes, taken_bytes = memory.peak_bytes()
        has_flushed = memory.num_allocator_retries() > retries
        if failure := failure_from_memory(taken_bytes, spec.trial.memory_limit_bytes, has_flushed=has_flushed):
            return failure
        meter = StepMemoryMeter(training)
        with torch.compiler.set_stance("force_eager"):  # compiled code hides its modules
            _run_step(training, meter)
        return meter.breakdown(taken_bytes, None if training.device.type == "cpu" else peak_bytes)


def measure_command_memory(
    training: ObservedTraining, spec: MemoryJob
) -> Generator[StepEvent, None, MemoryBreakdown | Failure]:
    """Measure the memory of the next step of a training command by kind, in its own process.

    The peak is that of the steps so far. Return a `Failure` if it exceeds the limit.
    """
    taken_bytes = training.peak_bytes if training.reserved_bytes is None else training.reserved_bytes
    if failure := failure_from_memory(taken_bytes, spec.trial.memory_limit_bytes):
        return failure
    meter, is_new_pass = StepMemoryMeter(training), True

    def begin_pass(inputs: Sequence[Tensor]) -> None:
        nonlocal is_new_pass
        if is_new_pass:
            meter.begin_pass()
            is_new_pass = False
        meter.add_batch(tensor for tensor in inputs if not tensor.requires_grad)  # else another module's output

    def end_pass(_: Tensor) -> None:
        nonlocal is_new_pass
        is_new_pass = True

    with (
        torch.compiler.set_stance("force_eager"),
        meter.hooks(),
        training.calling(before_forward=begin_pass, before_backward=end_pass),
    ):
        yield "after step"
    return meter.breakdown(taken_bytes, None if training.reserved_bytes is None else training.peak_bytes)


def _run_step(training: BaseTraining, meter: StepMemoryMeter | None = None) -> None:
    """Run one optimizer step, inspected by `meter`; its last pass uses the largest batch, if that is known."""
    num_passes = min(training.spec.candidate.accumulation_steps, MAX_INSPECTED_PASSES)
    for number in range(1, num_passes + 1):
        batch = training.worst_batch() if number == num_passes else None
        if batch is None:
            batch = training.next_batch()
        if training.device.type != "cpu":
            batch = data.move_batch(batch, training.device)
        with nullcontext() if meter is None else meter.inspecting(batch):
            training.forward_backward(batch)
    training.update()


@contextmanager
def snapshot(path: str) -> Iterator[None]:
    """Record CUDA's allocations within the context, with stacks, in a file for https://pytorch.org/memory_viz."""
    # C++ stacks would start a symbolizer process for each library, which is never stopped.
    torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY_ENTRIES, stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]  # torch does not type it
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def storage_bytes(tensors_: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of these tensors, by address; for a sparse tensor those of its parts, for one
    that is distributed over ranks (FSDP2) those of this rank.
    """
    bytes_by_address: dict[int, int] = {}
    for tensor in map(_local_part, tensors_):
        if tensor.layout == torch.sparse_coo:
            bytes_by_address |= storage_bytes((tensor._indices(), tensor._values()))
        elif tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            bytes_by_address[storage.data_ptr()] = storage.nbytes()
    bytes_by_address.pop(0, None)  # storage without memory
    return bytes_by_address


def _local_part(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return every tensor in the state of these optimizers, at any depth."""
    return [
        tensor for optimizer in optimizers for state in optimizer.state.values() for _, tensor in batch_tensors(state)
    ]


class _SavedTensor:
    """Tensor saved by autograd for the backward pass; calls `on_release` when autograd frees it."""

    def __init__(self, tensor: Tensor, on_release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._on_release = on_release

    def __del__(self) -> None:
        self._on_release()


class StepMemoryMeter:
    """Measures the memory held during one optimizer step, by kind. The optimizers must have made their state before."""

    def __init__(self, training: BaseTraining | ObservedTraining) -> None:
        self._live = training.live
        self._device_type = training.device.type
        self._modules = modules_by_name(training.model)
        self._trainable = [p for p in training.model.parameters() if p.requires_grad]
        self._parameters = self._storage_bytes(training.model.parameters())
        self._buffers = _excluding(self._storage_bytes(training.model.buffers()), self._parameters)
        state = self._storage_bytes(state_tensors(self._live.optimizers))
        self._optimizer_state = _excluding(state, {**self._parameters, **self._buffers})
        self._batch: dict[int, int] = {}
        self._batch_tensors: dict[int, Tensor] = {}  # by id
        self._batch_bytes = 0
        self._gradients: dict[int, int] = {}  # per parameter, by its id
        self._casts = _CastTracker(self._parameters, self._storage_bytes(self._trainable).keys())
        self._saved_by: Counter[str] = Counter()
        self._module_stack: list[str] = []  # names of the running modules, the innermost last
        self._num_holders: Counter[int] = Counter()  # number of saved tensors that share a storage, by its address
        self._activations_bytes = 0  # saved and not yet freed
        self._current_gradients: dict[int, int] = {}
        self._peak_bytes = 0  # of activations and gradients together
        self._is_backward_next = False

    @contextmanager
    def inspecting(self, batch: Any) -> Iterator[None]:
        """Inspect the forward and backward pass in this context; `batch` is on the device."""
        self.begin_pass()
        self.add_batch([tensor for _, tensor in batch_tensors(batch)])
        with self.hooks():
            yield

    def begin_pass(self) -> None:
        """Begin a forward and backward pass: the activations that are reported are those of the latest one."""
        self._batch, self._batch_tensors = {}, {}
        self._saved_by.clear()

    def add_batch(self, tensors_: Iterable[Tensor]) -> None:
        """Count these tensors, if they are on the device, as a part of the batch of this pass."""
        self._batch_tensors |= {id(t): t for t in tensors_ if t.device.type == self._device_type}
        storages = self._storage_bytes(self._batch_tensors.values())
        self._batch = _excluding(storages, self._parameters)
        # The batch may be a view of a whole dataset.
        self._batch_bytes = min(sum(self._batch.values()), sum(map(_num_bytes, self._batch_tensors.values())))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inspect the passes in this context; each begins with `begin_pass`."""
        with ExitStack() as stack:
            # TorchScript modules accept no hooks: their memory counts for the module around them.
            for name, module in ((name, module) for name, module in self._modules.items() if can_be_wrapped(module)):
                enter = module.register_forward_pre_hook(partial(self._enter_module, name), prepend=True)
                # Recomputation by a checkpoint ends with an exception.
                leave = module.register_forward_hook(self._leave_module, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            parameter: Any  # torch does not type its hooks
            for parameter in self._trainable:
                stack.callback(parameter.register_post_accumulate_grad_hook(self._record_gradient).remove)
            stack.enter_context(self._casts)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            yield

    def breakdown(self, taken_bytes: int, allocated_bytes: int | None) -> MemoryBreakdown:
        """Return the memory by kind, together with the peak of a step that was not inspected."""
        gradients_bytes, activations_bytes = sum(self._gradients.values()), self._saved_by.total()
        order = {name: number for number, name in enumerate(self._modules)}
        saved_by = sorted(self._saved_by.items(), key=lambda item: order[item[0]])
        return MemoryBreakdown(
            taken_bytes=taken_bytes,
            allocated_bytes=allocated_bytes,
            parameters_bytes=sum(self._parameters.values()),
            buffers_bytes=sum(self._buffers.values()),
            gradients_bytes=gradients_bytes,
            optimizer_state_bytes=sum(self._optimizer_state.values()),
            batch_bytes=self._batch_bytes,
            cast_weights_bytes=sum(self._casts.num_bytes.values()),
            not_held_together_bytes=gradients_bytes + activations_bytes - self._peak_bytes,
            modules=tuple(ModuleActivations(name=name, num_bytes=num_bytes) for name, num_bytes in saved_by),
            optimizers=tuple(type(optimizer).__name__ for optimizer in self._live.optimizers),
            checkpointable_modules=self._checkpointable_modules(),
        )

    def _checkpointable_modules(self) -> tuple[str, ...]:
        variant, value = ACTIVATION_CHECKPOINTING, "blocks"
        if variant.is_applied(value, self._live) or variant.unsupported_reason(value, self._live):
            return ()
        blocks = {block for _, _, block in repeated_blocks(self._live)}
        return tuple(name for name, module in self._modules.items() if module in blocks)

    def _storage_bytes(self, tensors_: Iterable[Tensor]) -> dict[int, int]:
        return storage_bytes(tensor for tensor in tensors_ if tensor.device.type == self._device_type)

    def _enter_module(self, name: str, *_: object) -> None:
        self._module_stack.append(name)

    def _leave_module(self, *_: object) -> None:
        self._module_stack.pop()

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        is_forward = not _is_in_backward()
        self._is_backward_next |= is_forward
        storages = {
            k: n
            for k, n in self._storage_bytes((tensor,)).items()
            if not self._belongs_to_other_kind(k) and k not in self._casts
        }
        for key, num_bytes in storages.items():
            self._num_holders[key] += 1
            if self._num_holders[key] == 1:
                self._activations_bytes += num_bytes
                if is_forward:  # otherwise it is recomputed
                    self._saved_by[self._module_stack[-1] if self._module_stack else ""] += num_bytes
        if not is_forward:
            self._update_peak()
        return _SavedTensor(tensor, partial(self._on_release, storages))

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        if self._is_backward_next:  # first unpack of this pass: the gradients present are those of earlier passes
            self._is_backward_next = False
            self._current_gradients = {id(p): _num_bytes(p.grad) for p in self._trainable if p.grad is not None}
            self._update_peak()
        return saved.tensor

    def _on_release(self, storages: Mapping[int, int]) -> None:
        for key, num_bytes in storages.items():
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                self._activations_bytes -= num_bytes

    def _record_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:  # otherwise an optimizer inside the backward pass has consumed it
            num_bytes = _num_bytes(parameter.grad)
            self._gradients[id(parameter)] = self._current_gradients[id(parameter)] = num_bytes
            self._update_peak()

    def _update_peak(self) -> None:
        held_bytes = self._activations_bytes + sum(self._current_gradients.values())
        self._peak_bytes = max(self._peak_bytes, held_bytes)

    def _belongs_to_other_kind(self, key: int) -> bool:
        return any(key in part for part in (self._parameters, self._buffers, self._optimizer_state, self._batch))


class _CastTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Dispatch mode that finds copies of parameters in another dtype, such as autocast's. `num_bytes` has the sizes.

    Autocast keeps copies of trainable parameters; other parameters are copied at each use, and such a copy counts if it
    is saved for the backward pass (``in``).
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Collection[int], trainable: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.num_bytes: dict[Hashable, int] = {}
        self._parameters = parameters
        self._trainable = trainable
        self._copies: dict[int, tuple[Hashable, int]] = {}  # by address

    def __contains__(self, key: int) -> bool:
        if key not in self._copies:
            return False
        name, num_bytes = self._copies[key]
        self.num_bytes[name] = num_bytes
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = (
            func is torch.ops.aten._to_copy.default
            and result.dtype != args[0].dtype
            and result.device == args[0].device
        )
        source = next(iter(storage_bytes(args[:1])), 0) if is_cast else 0
        if source in self._parameters:
            ((key, num_bytes),) = storage_bytes((result,)).items()
            name = (source, result.dtype) if source in self._trainable else key
            self._copies[key] = name, num_bytes
            if source in self._trainable:
                self.num_bytes[name] = num_bytes
        elif self._copies:  # once a copy is freed, its address may be reused
            inputs = storage_bytes(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            for key in storage_bytes(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
                if key not in inputs:
                    self._copies.pop(key, None)
        return result


def _num_bytes(tensor: Tensor) -> int:
    own = _local_part(tensor)
    return sum(storage_bytes((own,)).values()) if own.layout == torch.sparse_coo else own.nbytes


def _excluding(storages: Mapping[int, int], excluded: Mapping[int, int]) -> dict[int, int]:
    return {key: num_bytes for key, num_bytes in storages.items() if key not in excluded}


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
