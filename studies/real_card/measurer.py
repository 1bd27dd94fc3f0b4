"""Times one setting of a training run in plain PyTorch. by_hand.py describes the method."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from trainings import Batch, Training

GROUP_STEPS = NUM_BATCHES = 4
MAX_WARMUP_SECONDS, MEASURED_SECONDS, UNBROKEN_SECONDS = 1.5, 1.0, 0.3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """One way to train. `compile_mode` is None for eager, or a mode of torch.compile."""

    precision: str
    batch_size: int
    is_fused: bool = False
    is_channels_last: bool = False
    is_benchmark: bool = False
    compile_mode: str | None = None

    @property
    def label(self) -> str:
        flags = {
            "channels_last": self.is_channels_last,
            "fused": self.is_fused,
            "benchmark": self.is_benchmark,
            "compile": self.compile_mode == "default",
            "compile reduce-overhead": self.compile_mode == "reduce-overhead",
        }
        return "+".join([self.precision, *(name for name, is_on in flags.items() if is_on)])


class Measurer:
    """Runs settings on one device, one after the other in this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batches: dict[tuple[str, int], list[Batch]] = {}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def batches_of(self, training: Training, batch_size: int) -> list[Batch]:
        key = training.name, batch_size
        if key not in self.batches:
            made = [training.make_batch(batch_size, index) for index in range(NUM_BATCHES)]
            if self.device.type == "cuda":
                made = [tuple(tensor.pin_memory() for tensor in batch) for batch in made]
            self.batches[key] = made
        return self.batches[key]

    def prepare(self, setting: Setting) -> None:
        """Set the global switches and free what the setting before left behind."""
        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high" if setting.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = setting.is_benchmark
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self, prefix: str) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        return {
            f"{prefix}peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            f"{prefix}peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def step_of(
        self, training: Training, setting: Setting, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Callable[[int], torch.Tensor], Callable[[], None]]:
        """Return the two halves of a step: forward and backward with the batch of an index, and the update."""
        kind, dtype = self.device.type, DTYPES.get(setting.precision)
        batches = self.batches_of(training, setting.batch_size)
        scaler = torch.amp.GradScaler(kind, enabled=setting.precision == "fp16")

        def place(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.to(self.device, non_blocking=True)
            is_image = setting.is_channels_last and tensor.dim() == 4
            return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor

        def forward_backward(index: int) -> torch.Tensor:
            batch = tuple(place(tensor) for tensor in batches[index % NUM_BATCHES])
            with torch.autocast(kind, dtype) if dtype else contextlib.nullcontext():
                loss = training.loss(model, batch)
            scaler.scale(loss).backward()
            return loss.detach()

        def update() -> None:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return forward_backward, update

    def measure(self, training: Training, setting: Setting) -> dict[str, Any]:
        """Build, warm up until the groups' times stop falling, and time whole groups and one unbroken run."""
        if self.device.type == "cpu" and setting.precision == "fp16" and training.has_convolutions:
            raise NotImplementedError("A CPU takes minutes for fp16 convolutions.")
        memory_before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        began = time.perf_counter()
        with self.device:
            model = training.model().train()
        if setting.is_channels_last:
            model = model.to(memory_format=torch.channels_last)
        optimizer = training.optimizer(model.parameters(), **({"fused": True} if setting.is_fused else {}))
        self.synchronize()
        build_seconds = time.perf_counter() - began
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if setting.compile_mode:
            model = torch.compile(model, mode=None if setting.compile_mode == "default" else setting.compile_mode)
        forward_backward, update = self.step_of(training, setting, model, optimizer)
        self.synchronize()

        began = time.perf_counter()
        forward_backward(0)
        self.synchronize()
        forward_backward_seconds = time.perf_counter() - began
        update()
        self.synchronize()
        first_step_seconds = time.perf_counter() - began
        index = 1

        def run(num_steps: int) -> tuple[float, torch.Tensor]:
            """Return the seconds of some steps, which end with a synchronisation, and the last loss."""
            nonlocal index
            began = time.perf_counter()
            for _ in range(num_steps):
                loss = forward_backward(index)
                update()
                index += 1
            self.synchronize()
            return time.perf_counter() - began, loss

        groups: list[float] = []
        while not is_warm(groups, is_compiled=setting.compile_mode is not None):
            groups.append(run(GROUP_STEPS)[0])
        num_warmup_groups = len(groups)
        whole_memory = self.memory("")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        while sum(groups[num_warmup_groups:]) < MEASURED_SECONDS or len(groups) < num_warmup_groups + 2:
            seconds, loss = run(GROUP_STEPS)
            groups.append(seconds)
        step_seconds = statistics.median(groups[num_warmup_groups:]) / GROUP_STEPS
        unbroken_steps = max(1, round(UNBROKEN_SECONDS / step_seconds / GROUP_STEPS)) * GROUP_STEPS
        unbroken_seconds = None
        if step_seconds < 0.01:
            seconds, loss = run(unbroken_steps)  # the loss before may lie in a CUDA graph's memory, written over by now
            unbroken_seconds = seconds / unbroken_steps
        steady = [place for place, group in enumerate(groups) if group <= 1.05 * step_seconds * GROUP_STEPS]
        return {
            "samples_per_second": round(setting.batch_size / step_seconds, 2),
            "unbroken_samples_per_second": unbroken_seconds and round(setting.batch_size / unbroken_seconds, 2),
            "step_ms": round(1000 * step_seconds, 4),
            "num_parameters": num_parameters,
            "is_loss_finite": bool(loss.isfinite()),
            "loss": float(loss) if loss.isfinite() else None,
            **whole_memory,
            **self.memory("steady_"),
            "memory_before_bytes": memory_before,
            "build_seconds": round(build_seconds, 4),
            "first_step_seconds": round(first_step_seconds, 4),
            "compile_seconds": round(forward_backward_seconds, 4) if setting.compile_mode else None,
            # 0: the compiler left all to eager, as it does with an LSTM
            "num_compiled_graphs": count_graphs() if setting.compile_mode else None,
            "num_warmup_groups": num_warmup_groups,
            "num_steps_before_within_5_percent": 1 + steady[0] * GROUP_STEPS,
            "group_step_ms": [round(1000 * group / GROUP_STEPS, 3) for group in groups],
        }

    def outcome(self, training: Training, setting: Setting) -> dict[str, Any]:
        """Return the measurement of a setting, or its failure."""
        key = {"training": training.name, "setting": setting.label, "batch_size": setting.batch_size}
        self.prepare(setting)
        began = time.perf_counter()
        try:
            found = self.measure(training, setting)
        except Exception as error:
            is_oom = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            kind = "oom" if is_oom else type(error).__name__
            found = {"failure": {"kind": kind, "message": str(error)[:1000]}, **self.memory("")}
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        return {**key, **asdict(setting), **found, "seconds": round(time.perf_counter() - began, 3)}

    def is_usable(self) -> bool:
        """Whether the device still answers: an illegal memory access ends every later call of the process."""
        try:
            self.synchronize()
        except Exception:
            return False
        return True


def count_graphs() -> int:
    """Return how many graphs torch.compile has made since its counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def is_warm(groups: list[float], is_compiled: bool) -> bool:
    """Whether the last two groups are no more than 2 % faster than the best before, or the warm-up's time is over."""
    if sum(groups) >= MAX_WARMUP_SECONDS and len(groups) >= (4 if is_compiled else 1):
        return True
    return len(groups) >= 4 and min(groups[-2:]) > 0.98 * min(groups[:-2])
