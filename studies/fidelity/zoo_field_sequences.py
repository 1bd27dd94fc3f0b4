"""Translation, speech, time series and tables, and language models beside the classics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from case import Case
from samples import features, fixed, labelled
from torch import Tensor, nn
from zoo_field_classics import (
    CLASSES,
    LENGTH,
    NO_ENDS,
    VOCAB,
    adamw,
    cross_entropy,
    library,
    llama_config,
    masked_token,
    next_token,
)
from zoo_healthy import squared_error

from autotune_amp import Workload


class Translator(nn.Module):
    """The first transformer's base: six layers of 512 on each side, normalised after each part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 512)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, 512))
        self.body = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
        self.head = nn.Linear(512, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=target.device)
        h = self.body(
            self.tokens(source) + self.positions[: source.shape[1]],
            self.tokens(target) + self.positions[:length],
            tgt_mask=mask, tgt_is_causal=True,
        )  # fmt: skip
        out: Tensor = self.head(h)
        return out


def translation_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    return F.cross_entropy(model(ids.flip(1), ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class SpeechToLetters(nn.Module):
    """DeepSpeech's shape: convolutions over mel bands, three layers of a GRU both ways, and CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.bands = nn.Sequential(nn.Conv1d(80, 256, 5, 2, 2), nn.BatchNorm1d(256), nn.ReLU())
        self.gru = nn.GRU(256, 256, num_layers=3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 29)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.bands(x).mT)[0])
        return out


def ctc_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, letters = batch
    out = model(x).float().log_softmax(2).transpose(0, 1)
    lengths = [torch.full((len(x),), size, dtype=torch.long) for size in (out.shape[0], letters.shape[1])]
    return F.ctc_loss(out, letters, *lengths)


def spoken(n: int) -> tuple[Tensor, Tensor]:
    letters = torch.randint(1, 29, (n, 12))
    sounds = fixed(29, 80, seed=53)[letters].repeat_interleave(10, 1)
    return (sounds + torch.randn_like(sounds)).mT, letters


class DilatedConvolutions(nn.Module):
    """TCN: eight residual blocks of causal convolutions with weight normalisation, each twice as far apart."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.head = nn.Conv1d(1, width, 1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(norm(nn.Conv1d(width, width, 3, dilation=2**level)) for _ in range(2)) for level in range(8)
        )
        self.tail = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(x[:, None])
        for level, block in enumerate(self.blocks):
            kept = h
            for convolution in block:
                h = F.relu(convolution(F.pad(h, (2 * 2**level, 0))))
            h = kept + h
        out: Tensor = self.tail(h)[:, 0]
        return out


def series(n: int) -> tuple[Tensor, Tensor]:
    time = torch.arange(257) / 8
    period, phase = 1 + 3 * torch.rand(n, 1), 6 * torch.rand(n, 1)
    wave = torch.sin(time / period + phase) + 0.2 * torch.randn(n, 257)
    return wave[:, :-1], wave[:, 1:]


class TableTransformer(nn.Module):
    """FT-Transformer: a token for each column, three layers of attention over them."""

    def __init__(self, num_columns: int = 64, width: int = 192) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_columns, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(num_columns + 1, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(width, 8, 256, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        columns = F.pad(x[:, :, None] * self.weight, (0, 0, 1, 0)) + self.bias
        out: Tensor = self.head(self.body(columns)[:, 0])
        return out


class Recommender(nn.Module):
    """DLRM: embeddings of 26 categories and a perceptron over numbers, and the products of all pairs of them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.categories = nn.ModuleList(nn.Embedding(1000, width) for _ in range(26))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(351 + width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        h = self.bottom(numbers)
        all_of = torch.stack([h, *(one(ids[:, i]) for i, one in enumerate(self.categories))], 1)
        rows, columns = torch.tril_indices(27, 27, -1, device=h.device)
        out: Tensor = self.top(torch.cat([h, (all_of @ all_of.mT)[:, rows, columns]], 1))
        return out


def clicks(n: int) -> tuple[Tensor, Tensor, Tensor]:
    numbers, outputs = features(16 * n, 13, 1)
    return numbers, torch.randint(1000, (16 * n, 26)), (outputs > 0).float()


def click_loss(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    numbers, ids, clicked = batch
    return F.binary_cross_entropy_with_logits(model(numbers, ids), clicked)


def table(n: int) -> tuple[Tensor, Tensor]:
    return labelled(16 * n, 64, CLASSES)


SEQUENCES = [
    Case("transformer_base", lambda: Workload(Translator, translation_loss, next_token, adamw)),
    Case("deepspeech_ctc", lambda: Workload(SpeechToLetters, ctc_loss, spoken, adamw)),
    Case("tcn", lambda: Workload(DilatedConvolutions, squared_error, series, adamw)),
    Case("ft_transformer", lambda: Workload(TableTransformer, cross_entropy, table, adamw)),
    Case("dlrm", lambda: Workload(Recommender, click_loss, clicks, adamw)),
    library("qwen3_160m", hf.Qwen3ForCausalLM, llama_config(hf.Qwen3Config, head_dim=64), next_token),
    library(
        "opt_125m",
        hf.OPTForCausalLM,
        lambda: hf.OPTConfig(vocab_size=VOCAB, **NO_ENDS | {"pad_token_id": 0}),
        next_token,
    ),
    library(
        "bart_base",
        hf.BartForConditionalGeneration,
        lambda: hf.BartConfig(
            vocab_size=VOCAB, d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072,
            decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12, pad_token_id=0,
            bos_token_id=None, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None,
        ),
        next_token,
    ),
    library(
        "albert_base",
        hf.AlbertForMaskedLM,
        lambda: hf.AlbertConfig(
            vocab_size=VOCAB, hidden_size=768, num_attention_heads=12, intermediate_size=3072, **NO_ENDS
        ),
        masked_token,
    ),
    library("electra_small", hf.ElectraForMaskedLM, lambda: hf.ElectraConfig(vocab_size=VOCAB), masked_token),
    library(
        "deberta_v3_small",
        hf.DebertaV2ForMaskedLM,
        lambda: hf.DebertaV2Config(
            vocab_size=VOCAB, hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072,
            relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
            pos_att_type=["p2c", "c2p"], position_biased_input=False,
        ),
        masked_token,
    ),
]  # fmt: skip
