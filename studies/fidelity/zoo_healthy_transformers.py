"""Healthy workloads built from the `transformers` library's own model classes, with small random configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from case import Case
from samples import images, tokens
from torch import Tensor

from autotune_amp import Workload

VOCAB, LENGTH, WIDTH = 64, 16, 32
MASK = VOCAB - 1
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the library's model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def _workload(kind: Any, config: Any, data: Any, name: str) -> Workload:
    return Workload(model=lambda: kind(config), loss=own_loss, data=data, optimizer=adamw, name=name)


def _next_token(n: int) -> dict[str, Tensor]:
    ids = tokens(n, LENGTH, VOCAB)
    return {"input_ids": ids, "labels": ids}


def _padded_next_token(n: int) -> dict[str, Tensor]:
    ids = tokens(n, LENGTH, VOCAB)
    kept = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (n, 1))
    return {"input_ids": ids, "attention_mask": kept.long(), "labels": ids.masked_fill(~kept, -100)}


def _masked_token(n: int) -> dict[str, Tensor]:
    ids = tokens(n, LENGTH, VOCAB - 1)
    masked = torch.rand(n, LENGTH) < 0.2
    masked[:, 0] = True
    return {"input_ids": ids.masked_fill(masked, MASK), "labels": ids.masked_fill(~masked, -100)}


def _sequence_class(n: int) -> dict[str, Tensor]:
    """Which quarter of the vocabulary a sequence is made of."""
    labels = torch.randint(4, (n,))
    return {"input_ids": labels[:, None] * (VOCAB // 4) + torch.randint(VOCAB // 4, (n, LENGTH)), "labels": labels}


def gpt2() -> Workload:
    config = hf.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, **NO_ENDS)
    return _workload(hf.GPT2LMHeadModel, config, _next_token, "gpt2")


def llama() -> Workload:
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return _workload(hf.LlamaForCausalLM, config, _padded_next_token, "llama")


def opt() -> Workload:
    config = hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, word_embed_proj_dim=WIDTH, tie_word_embeddings=True,
    )  # fmt: skip
    return _workload(hf.OPTForCausalLM, config, _padded_next_token, "opt")


def falcon() -> Workload:
    config = hf.FalconConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, alibi=False,
        hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    return _workload(hf.FalconForCausalLM, config, _next_token, "falcon")


def mixtral() -> Workload:
    config = hf.MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        max_position_embeddings=LENGTH, router_jitter_noise=0.0, experts_implementation="eager",
    )  # fmt: skip
    return _workload(hf.MixtralForCausalLM, config, _next_token, "mixtral")


def mamba() -> Workload:
    config = hf.MambaConfig(vocab_size=VOCAB, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, use_mambapy=False)

    def short(n: int) -> dict[str, Tensor]:
        ids = tokens(n, LENGTH // 2, VOCAB)
        return {"input_ids": ids, "labels": ids}

    return _workload(hf.MambaForCausalLM, config, short, "mamba")


def t5() -> Workload:
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )

    def reversed_sequence(n: int) -> dict[str, Tensor]:
        ids = tokens(n, LENGTH, VOCAB)
        return {"input_ids": ids, "labels": ids.flip(1)}

    return _workload(hf.T5ForConditionalGeneration, config, reversed_sequence, "t5")


def _bert_config() -> Any:
    return hf.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=4,
    )  # fmt: skip


def bert_masked() -> Workload:
    return _workload(hf.BertForMaskedLM, _bert_config(), _masked_token, "bert_masked")


def bert_classes() -> Workload:
    return _workload(hf.BertForSequenceClassification, _bert_config(), _sequence_class, "bert_classes")


def distilbert() -> Workload:
    config = hf.DistilBertConfig(
        vocab_size=VOCAB, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=LENGTH
    )

    def answer_span(n: int) -> dict[str, Tensor]:
        ids = torch.randint(2, VOCAB, (n, LENGTH))
        start = torch.randint(LENGTH - 4, (n,))
        rows = torch.arange(n)
        ids[rows, start], ids[rows, start + 3] = 0, 1
        return {"input_ids": ids, "start_positions": start, "end_positions": start + 3}

    return _workload(hf.DistilBertForQuestionAnswering, config, answer_span, "distilbert")


def electra() -> Workload:
    config = hf.ElectraConfig(
        vocab_size=VOCAB, embedding_size=16, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH,
    )  # fmt: skip

    def replaced_tokens(n: int) -> dict[str, Tensor]:
        ids = tokens(n, LENGTH, VOCAB // 2, noise=0.0)
        replaced = torch.rand(n, LENGTH) < 0.15
        fakes = torch.randint(VOCAB // 2, VOCAB, (n, LENGTH))
        return {"input_ids": torch.where(replaced, fakes, ids), "labels": replaced.long()}

    return _workload(hf.ElectraForPreTraining, config, replaced_tokens, "electra")


def _pictures(size: int) -> Any:
    def make_batch(n: int) -> dict[str, Tensor]:
        pixels, labels = images(n, size, 10)
        return {"pixel_values": pixels, "labels": labels}

    return make_batch


def vit() -> Workload:
    config = hf.ViTConfig(
        image_size=16, patch_size=4, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, hidden_dropout_prob=0.1, num_labels=10,
    )  # fmt: skip
    return _workload(hf.ViTForImageClassification, config, _pictures(16), "vit")


def resnet() -> Workload:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10)
    return _workload(hf.ResNetForImageClassification, config, _pictures(16), "resnet")


def convnext() -> Workload:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.1, num_labels=10)
    return _workload(hf.ConvNextForImageClassification, config, _pictures(32), "convnext")


def clip() -> Workload:
    tower = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.CLIPConfig(
        text_config={
            **tower,
            "vocab_size": VOCAB,
            "max_position_embeddings": LENGTH,
            "eos_token_id": VOCAB - 1,
            "bos_token_id": None,
        },
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )

    def pairs(n: int) -> dict[str, Tensor]:
        pixels, labels = images(n, 16, 10)
        ids = labels[:, None] * 6 + torch.randint(6, (n, LENGTH))
        ids[:, -1] = VOCAB - 1
        return {"input_ids": ids, "pixel_values": pixels}

    def contrastive_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch, return_loss=True).loss
        return loss

    return Workload(lambda: hf.CLIPModel(config), contrastive_loss, pairs, adamw, "clip")


def whisper() -> Workload:
    config = hf.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=LENGTH, max_target_positions=8, decoder_start_token_id=0, pad_token_id=0,
        bos_token_id=0, eos_token_id=1, dropout=0.1,
    )  # fmt: skip

    def spoken(n: int) -> dict[str, Tensor]:
        spectrum, label = images(n, LENGTH, 10, channels=1)
        text = torch.stack([label, label + 10, label + 20, label + 30], 1)
        return {"input_features": spectrum.reshape(n, 8, 2 * LENGTH), "labels": text}

    return _workload(hf.WhisperForConditionalGeneration, config, spoken, "whisper")


TRANSFORMERS: tuple[Case, ...] = (
    Case("gpt2", gpt2),
    Case("llama", llama, note="grouped-query attention, padded batches"),
    Case("opt", opt, note="tied weights, padded batches"),
    Case("falcon", falcon),
    Case("mixtral", mixtral, note="mixture of experts with the router's auxiliary loss"),
    Case("mamba", mamba, note="state-space scan in plain torch"),
    Case("t5", t5),
    Case("bert_masked", bert_masked),
    Case("bert_classes", bert_classes),
    Case("distilbert", distilbert, note="question answering: two losses of one head"),
    Case("electra", electra, note="replaced-token detection"),
    Case("vit", vit),
    Case("resnet", resnet, note="BatchNorm"),
    Case("convnext", convnext, note="layer scale 1e-6, stochastic depth"),
    Case("clip", clip, note="in-batch negatives"),
    Case("whisper", whisper),
)
