"""What `scale` is given: a tensor, or tensors in iterables of any depth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def listed(outputs: Any) -> Any:
    """`outputs` with lists in place of iterators, which can be read only once. Raises `ValueError` as GradScaler."""
    if isinstance(outputs, Tensor):
        return outputs
    if not isinstance(outputs, Iterable):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    return (type(outputs) if isinstance(outputs, (list, tuple)) else list)(map(listed, outputs))


def tensors(outputs: Any) -> Iterable[Tensor]:
    """The tensors in what `listed` gave."""
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from tensors(output)
