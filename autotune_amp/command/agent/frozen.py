"""Recorder of gradients in place of optimizer steps, to compare two precisions on the same weights and batches.

A run in fp32 and one in the low precision write the same entries of the same gradients, with digests of weights and
batch that show these to be equal. Weights that the script keeps in half precision are converted to fp32 in the
reference run; those that DeepSpeed converts to half precision only in the other run are rounded in both.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Any

import torch

from . import where
from .batches import first_tensor
from .channel import Channel
from .imports import after_import
from .outside.hooks import in_fp32
from .passes import before_update, is_packed, parameters_of

_HALF = (torch.bfloat16, torch.float16)


class GradientRecorder:
    """Recorder that replaces optimizer steps: weights never change, and the gradients of the first `num_steps` steps
    are written to files in `folder`, in float32. Of more than `max_entries` entries, every n-th is written.
    """

    def __init__(self, channel: Channel, observer: Any, folder: str, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._observer = observer
        self._folder = folder
        self._num_steps = settings["num_steps"]
        self._max_entries = settings["max_entries"]
        self._gradients: list[tuple[Any, Any]] = []  # parameters of the running step, and their gradients
        self._num_of_step: dict[tuple[int, int], int] = {}  # recorded gradients by optimizer and step
        observer.loaders.keeps_latest = observer.passes.keeps_latest = True
        self._rounding = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.get("precision", ""))
        after_import("deepspeed.runtime.engine", channel.shield(self._round_before_deepspeed))
        if settings.get("in_fp32"):
            self._converted: dict[int, Any] = {}  # modules by id; keeping a reference keeps each id unique
            observer.passes.on_outermost.append(self._convert_to_fp32)
            self._convert_before_ddp()

    def _convert_before_ddp(self) -> None:
        """Convert a module to fp32 before DistributedDataParallel wraps it, since its buckets keep the parameters'
        dtypes.
        """
        owner: Any = torch.nn.parallel.DistributedDataParallel
        original, convert_to_fp32 = owner.__init__, self._channel.shield(self._convert_to_fp32)

        @functools.wraps(original)
        def __init__(parallel: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            convert_to_fp32(module)
            original(parallel, module, *args, **kwargs)

        owner.__init__ = __init__

    def _round_before_deepspeed(self, engine_module: Any) -> None:
        """Round the weights that DeepSpeed is given to the low precision, to which its own config converts them."""
        owner = engine_module.DeepSpeedEngine
        original, round_weights = owner.__init__, self._channel.shield(self._round_weights)

        @functools.wraps(original)
        def __init__(engine: Any, args: Any, model: Any, *others: Any, **kwargs: Any) -> None:
            round_weights(model)
            original(engine, args, model, *others, **kwargs)

        owner.__init__ = __init__

    def _round_weights(self, module: Any) -> None:
        for tensor in module.parameters():
            if self._rounding is not None and tensor.dtype == torch.float32 and not is_packed(tensor):
                tensor.data = tensor.data.to(self._rounding).float()

    def _convert_to_fp32(self, module: Any) -> None:
        """Convert a module's weights, inputs and computations from half precision to fp32, the weights in place."""
        for tensor in (*module.parameters(), *module.buffers()):
            is_managed = hasattr(tensor, "to_local")  # a DTensor, whose storage FSDP manages
            if _is_half(tensor) and not is_managed:
                tensor.data = tensor.data.float()
        if id(module) not in self._converted:
            for layer in module.modules():  # quantized layers of bitsandbytes, which cast their inputs
                if getattr(layer, "compute_dtype", None) in _HALF:
                    layer.compute_dtype = torch.float32
            self._converted[id(module)] = module
            module.register_forward_pre_hook(lambda _, *args: in_fp32(args), with_kwargs=True)

    def record_in_place_of_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Record the gradients in place of an optimizer step; see `passes.before_update`."""
        record_gradients = self._channel.shield(self._record_gradients)
        return before_update(args, kwargs, lambda: record_gradients(optimizer))

    def _record_gradients(self, optimizer: Any) -> None:
        parameters = parameters_of(optimizer)
        number = self._observer.num_steps
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        # GradScaler calls a fused optimizer for skipped steps too.
        is_skipped = found_inf is not None and bool(found_inf)
        if number < self._num_steps and not is_skipped:
            index, rank = self._observer.index_of(optimizer), where.rank()["rank"]
            part = self._num_of_step.get((index, number), 0)  # DeepSpeed steps each group of parameters by itself
            self._num_of_step[index, number] = part + 1
            path = os.path.join(self._folder, f"gradient_{rank}_{index}_{number}_{part}.float32")
            sizes = self._write(path, parameters, 1.0 if scale is None else 1.0 / float(scale))
            batch = first_tensor(self._observer.loaders.latest)
            if batch is None:  # without a DataLoader
                batch = self._observer.passes.latest
            self._channel.send(
                "gradient",
                optimizer=index,
                number=number,
                part=part,
                path=path,
                sizes=sizes,
                weights=_digest(parameters),
                batch=None if batch is None else _digest([batch]),
                has_low_weights=self._has_low_weights(parameters),
                **where.rank(),
            )
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None  # optimizers leave parameters without a gradient unchanged

    def restore_gradients(self) -> None:
        """Give the parameters their gradients back after the step, as a script may read them."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def _has_low_weights(self, trained: list[Any]) -> bool:
        used = (parameter for module in self._observer.live_modules() for parameter in module.parameters())
        return any(map(_is_half, (*trained, *used)))

    def _write(self, path: str, parameters: list[Any], factor: float) -> list[int]:
        total = sum(parameter.numel() for parameter in parameters)
        distance = max(1, -(-total // self._max_entries))
        sizes = []
        with open(path, "wb") as file:
            for parameter in parameters:
                entries = (
                    torch.zeros_like(_local_part(parameter)) if parameter.grad is None else _local_part(parameter.grad)
                )
                sampled = _dense_real(entries.detach()).flatten()[::distance].float().cpu() * factor
                file.write(sampled.numpy().tobytes())
                sizes.append(sampled.numel())
        return sizes


def _is_half(tensor: Any) -> bool:
    return tensor.dtype in _HALF and not is_packed(tensor)


def _local_part(tensor: Any) -> Any:
    """Return this rank's part of a tensor that is distributed over ranks; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _dense_real(tensor: Any) -> Any:
    """Return a tensor as dense and real: sparse made dense, complex numbers as pairs."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _digest(tensors: list[Any]) -> str:
    """Return a digest of the tensors' entries; equal for a half-precision tensor and its conversion to fp32."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        entries = _dense_real(_local_part(tensor.detach()))
        entries = (entries.float() if entries.dtype in _HALF else entries).cpu().contiguous().flatten()
        digest.update(entries.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
