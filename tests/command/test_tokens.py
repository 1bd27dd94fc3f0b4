"""Tokens of a batch: what is padding, what is packed, and what may be no token at all."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import said
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from autotune_amp.command.agent.tokens import TokenCount, count_tokens, is_padding_free
from autotune_amp.command.measure import measurement
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Trial

Lengths = list[int]
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


class Pair(NamedTuple):
    text: Any
    image: torch.Tensor


class Held:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def padded(sizes: Lengths, *, masked: bool = True) -> dict[str, Any]:
    ids = pad_sequence([torch.ones(size, dtype=torch.long) for size in sizes], batch_first=True)
    return {"input_ids": ids, "labels": ids, **({"attention_mask": ids.clone()} if masked else {})}


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": torch.ones(1, 9), "position_ids": torch.ones(1, 9)}, False),  # no token ids
        ({"input_ids": torch.ones(1, 9).long(), "position_ids": torch.ones(1, 9)}, True),
        ({"input_ids": torch.ones(1, 9).long(), "cu_seq_lens_q": torch.tensor([0, 9])}, True),
        ({"input_ids": torch.ones(1, 9).long(), "attention_mask": torch.ones(1, 9)}, False),
        ({"input_ids": torch.ones(2, 9).long(), "position_ids": torch.ones(2, 9)}, False),
        (torch.ones(1, 9).long(), False),
    ],
)
def test_which_batch_has_its_sequences_in_one_row(batch: Any, expected: bool) -> None:
    assert is_padding_free(batch) is expected


def packed(sizes: Lengths, **boundaries: Any) -> dict[str, Any]:
    ids = torch.ones(1, sum(sizes) + 3, dtype=torch.long)  # padded to a multiple of something
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(size) for size in sizes])[None], **boundaries}


HOLDERS = (
    lambda batch: batch,
    UserDict,  # as a tokenizer's BatchEncoding
    lambda batch: Held(**batch),
    lambda batch: {"model": {"inputs": batch}, "weights": torch.ones(2)},
    lambda batch: (batch, torch.ones(3)),
    lambda batch: Pair(batch, torch.ones(2, 3)),
)


@given(lengths, st.sampled_from(HOLDERS))
def test_padding_is_told_from_tokens_wherever_the_mask_is(sizes: Lengths, holder: Any) -> None:
    expected = TokenCount(sum(sizes), len(sizes) * max(sizes))
    assert count_tokens(holder(padded(sizes))) == expected
    assert count_tokens([holder(padded(sizes)), holder(padded(sizes))]) == expected.plus(expected)


@given(lengths)
def test_packed_sequences_count_to_their_last_boundary(sizes: Lengths) -> None:
    boundaries = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
    for fields in ({"cu_seq_lens_q": boundaries}, {"seq_lengths": [sizes]}, {"seq_lengths": torch.tensor(sizes)}):
        assert count_tokens(packed(sizes, **fields)) == TokenCount(sum(sizes), sum(sizes) + 3)


@pytest.mark.parametrize(
    ("rows", "num_tokens"), [([[0, 3, 8], [0, 2, 8]], 16), ([[0, 5, -1], [0, 2, 4]], 9), ([[-1]], 0)]
)
def test_boundaries_in_rows_count_each_row_up_to_its_padding(rows: list[list[int]], num_tokens: int) -> None:
    fields = {"input_ids": torch.ones(2, 8, dtype=torch.long), "cu_seqlens": torch.tensor(rows)}
    assert count_tokens(fields) == TokenCount(num_tokens, 16)


def test_without_a_mask_of_their_shape_all_positions_are_tokens() -> None:
    assert count_tokens(padded([2, 5], masked=False)) == TokenCount(10, 10)
    square = torch.zeros(2, 1, 5, 5)  # added to the scores of attention
    assert count_tokens(padded([2, 5], masked=False) | {"attention_mask": square}) == TokenCount(10, 10)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(4, 8, dtype=torch.long), torch.ones(4, 8, dtype=torch.long)),
        {"x": torch.ones(4, 8, dtype=torch.long), "labels": torch.ones(4, 8, dtype=torch.long)},
        {"input_ids": torch.ones(4, 8)},  # embeddings under another name
        {"input_ids": [[1, 2], [3]]},
        [torch.ones(2), 1.0, "text"],
        None,
    ],
)
def test_what_may_be_anything_is_not_counted(batch: object) -> None:
    assert count_tokens(batch) is None


class Unreadable(UserDict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise RuntimeError("the file is closed")


def test_a_container_that_cannot_be_read_is_not_counted() -> None:
    assert count_tokens(Unreadable(x=1)) is None


def test_transformers_collators_are_counted() -> None:
    from transformers import BatchEncoding, DataCollatorWithFlattening

    assert count_tokens(BatchEncoding(padded([3, 4]))) == TokenCount(7, 8)
    rows = [{"input_ids": [1] * size, "labels": [1] * size} for size in (3, 5, 2)]
    collator: Any = DataCollatorWithFlattening
    assert count_tokens(collator(return_flash_attn_kwargs=True)(rows)) == TokenCount(10, 10)


def measured(heard: Any) -> Measurement:
    trial = Trial(device="cpu", candidate=Setting(precision="fp32", batch_size=8), num_steps=(4, 16), seed=0)
    found = measurement(heard, trial, 0.0, 0)
    assert isinstance(found, Measurement)
    return found


def test_a_commands_tokens_are_those_of_all_ranks_over_the_measured_steps() -> None:
    heard = said.trained([0, 0])
    for pid in (100, 101):
        heard.add(said.optimizer(pid, pid - 100, 2))
        for number in range(1, 11):  # the first step, which is no part of it, has another length
            tokens = 1000 + 60 * number if number > 1 else 500
            heard.add(said.step(pid, number, tokens_by_loader={"0": (tokens, 80 * number + 1000)}))
    found = measured(heard)
    assert found.tokens_per_second == pytest.approx(2 * 60 / said.STEP_SECONDS)
    assert found.num_first_tokens == 1000 + 60 * 8
    assert found.padded_share == pytest.approx(0.25)


def test_without_a_loader_tokens_are_those_that_entered_the_model() -> None:
    heard = said.heard([said.optimizer(100)])
    for number in range(1, 11):
        fields: dict[str, Any] = {"num_samples": {}, "num_batches": 0}
        if number <= 3:  # later forwards are not watched
            fields |= {"forwards": (("Model", 4, "float32"),), "tokens": (30, 40)}
        heard.add(said.step(100, number, **fields))
    found = measured(heard)
    assert found.samples_per_second == pytest.approx(4 / said.STEP_SECONDS)
    assert found.tokens_per_second == pytest.approx(30 / said.STEP_SECONDS)
    assert found.num_first_tokens == 30 * 3, "of the steps whose forwards are recorded"


def test_a_command_without_token_ids_has_no_tokens() -> None:
    found = measured(said.trained([10]))
    assert (found.tokens_per_second, found.padded_share) == (None, None)


def test_masks_that_mark_nothing_are_no_tokens() -> None:
    heard = said.heard([said.loader(100), said.optimizer(100)])
    for number in range(1, 11):
        heard.add(said.step(100, number, tokens_by_loader={"0": (0, 80 * number)}))
    assert measured(heard).tokens_per_second is None
