"""Counts the tokens of a batch. It imports torch alone: the agent and all other parts of the package use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

MAX_DEPTH = 4  # nested containers in a batch that are searched for tensors; deeper ones are rare
# Names under which data collators pass the boundaries of packed sequences: the last one is the number of tokens.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens")


class TokenCount(NamedTuple):
    """Numbers of real tokens and of all positions, padding included.

    `num_tokens` is a tensor if the mask is on an accelerator: reading it would wait for the device.
    """

    num_tokens: Any
    num_positions: int

    def plus(self, other: TokenCount) -> TokenCount:
        """Return the sum of two counts."""
        return TokenCount(self.num_tokens + other.num_tokens, self.num_positions + other.num_positions)

    def read(self) -> TokenCount:
        """Return the count as plain integers, which waits for the device if the mask is on one."""
        return TokenCount(int(self.num_tokens), self.num_positions)


def count_tokens(batch: Any) -> TokenCount | None:
    """Return the tokens of a batch; None if no mapping or object in it has a tensor of token ids called ``input_ids``.

    Real tokens are those that the ``attention_mask`` marks; without one of the same shape, those within the
    ``seq_lengths`` or ``cu_seq_lens`` of packed sequences; without these every position, as with packed
    ``position_ids``. Integers without that name may be anything, and are not counted.
    """
    total: TokenCount | None = None
    try:
        for fields in _with_token_ids(batch):
            total = _count_of(fields) if total is None else total.plus(_count_of(fields))
    except Exception:  # a container of the user's own that cannot be read like a mapping
        return None
    return total


def is_padding_free(batch: Any) -> bool:
    """Whether a batch has all its sequences in one row of ``input_ids``, with their boundaries or positions."""
    try:
        return any(
            len(fields["input_ids"]) == 1 and any(name in fields for name in ("position_ids", *_BOUNDARIES))
            for fields in _with_token_ids(batch)
        )
    except Exception:  # a container of the user's own that cannot be read like a mapping
        return False


def _with_token_ids(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the mappings, and the attributes of objects, in a batch that hold token ids."""
    if depth > MAX_DEPTH or isinstance(value, (torch.Tensor, str, bytes, int, float)):
        return
    is_mapping = hasattr(value, "keys") and hasattr(value, "__getitem__")
    fields: Any = getattr(value, "__dict__", ())
    if is_mapping or hasattr(value, "_asdict"):
        fields = value if is_mapping else value._asdict()
    if "input_ids" in fields:
        ids = fields["input_ids"]
        if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            yield fields
    elif is_mapping or isinstance(value, (list, tuple)):
        for part in [fields[name] for name in fields.keys()] if is_mapping else value:  # noqa: SIM118 # any mapping
            yield from _with_token_ids(part, depth + 1)


def _count_of(fields: Any) -> TokenCount:
    ids = fields["input_ids"]
    mask = fields.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        num_tokens = torch.count_nonzero(mask)
        return TokenCount(int(num_tokens) if mask.device.type == "cpu" else num_tokens, ids.numel())
    for name in _BOUNDARIES:
        if name in fields and isinstance(fields[name], torch.Tensor):
            # A batch may have a row of boundaries for each sequence, padded with a negative number.
            ends = fields[name].reshape(-1, fields[name].shape[-1]).amax(-1).clamp(min=0).sum()
            return TokenCount(int(ends) if ends.device.type == "cpu" else ends, ids.numel())
    if "seq_lengths" in fields:
        return TokenCount(_sum(fields["seq_lengths"]), ids.numel())
    return TokenCount(ids.numel(), ids.numel())


def _sum(lengths: Any) -> Any:
    """Return the sum of the lengths in a tensor, or in lists of integers."""
    if isinstance(lengths, torch.Tensor):
        return int(lengths.sum()) if lengths.device.type == "cpu" else lengths.sum()
    return sum(map(_sum, lengths)) if isinstance(lengths, (list, tuple)) else int(lengths)
