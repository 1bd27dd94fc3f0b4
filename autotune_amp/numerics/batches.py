"""Batches of whatever type the user's code takes: the tensors inside, and the same type again with fewer samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with where it stands: a name, as ``labels``, where the batch names its parts, else ``batch[1]``."""
    if isinstance(batch, Tensor):
        yield name, batch
        return
    prefix = "" if name == "batch" else f"{name}."
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors(value, f"{prefix}{key}")
    elif isinstance(batch, (list, tuple)):
        fields = getattr(batch, "_fields", None)
        for index, value in enumerate(batch):
            yield from tensors(value, f"{prefix}{fields[index]}" if fields else f"{name}[{index}]")
    elif _has_attributes(batch):
        for attribute, value in vars(batch).items():
            yield from tensors(value, f"{prefix}{attribute}")


def first_dimensions(batch: Any) -> set[int]:
    """Those of its tensors, 0 for one without dimensions: a batch can be cut where there is exactly one, not 0."""
    return {tensor.shape[0] if tensor.dim() else 0 for _, tensor in tensors(batch)}


def cut(batch: Any, size: int) -> list[Any]:
    """`batch`, all of whose tensors have the same first dimension, in pieces of `size` samples, the last with the rest.

    What is no tensor is in every piece, but for a list with an entry for each sample.
    """
    (num_samples,) = first_dimensions(batch)
    return [_rebuilt(batch, slice(start, start + size), num_samples) for start in range(0, num_samples, size)]


def _rebuilt(batch: Any, part: slice, num_samples: int) -> Any:
    def of(value: Any) -> Any:
        return _rebuilt(value, part, num_samples)

    if isinstance(batch, Tensor):
        return batch[part]
    if next(tensors(batch), None) is None:
        return batch[part] if isinstance(batch, (list, tuple)) and len(batch) == num_samples else batch
    children, spec = pytree.tree_flatten(batch, is_leaf=lambda value: value is not batch)
    if not spec.is_leaf():  # a builtin container, or a type that was registered as one
        return pytree.tree_unflatten([of(child) for child in children], spec)
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return {key: of(value) for key, value in batch.items()}
    made: Any = copy.copy(batch)
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            made[key] = of(value)
        return made
    for name, value in vars(batch).items():
        object.__setattr__(made, name, of(value))  # also of a frozen dataclass
    return made


def _has_attributes(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) or (hasattr(batch, "__dict__") and not callable(batch))
