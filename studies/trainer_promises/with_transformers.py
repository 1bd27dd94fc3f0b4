"""Six trainings with a Transformers Trainer, as their users have them: models from configurations, random weights.

``TRAININGS[name](folder, **changes)`` is the Trainer; `changes` are TrainingArguments that differ from today's. Imports
nothing of autotune_amp.
"""

import functools

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, NUM_SAMPLES, NUM_IMAGES = 1000, 4000, 2000


def sequences(lowest, highest, num_samples=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(lowest, highest + 1, (num_samples,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def images(size, num_samples=NUM_IMAGES):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(num_samples, 3, size, size, generator=generator)
    labels = torch.randint(10, (num_samples,), generator=generator)
    return [{"pixel_values": image, "labels": label} for image, label in zip(pixels, labels, strict=True)]


def padded(names, samples):
    """One batch: `names` say with what each column is padded."""
    columns = {name: [sample[name] for sample in samples] for name in names}
    batch = {
        name: nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=names[name])
        for name, rows in columns.items()
    }
    return batch | {"attention_mask": (batch["input_ids"] != 0).long()}


def bert():
    config = BertConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 512, "max_position_embeddings": 128, "num_labels": 4},
    )
    rows = [{"input_ids": ids, "labels": ids[0] % 4} for ids in sequences(64, 64)]
    return BertForSequenceClassification(config), rows, {"per_device_train_batch_size": 16}, {}


def gpt2():
    config = GPT2Config(
        **{"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 128, "n_layer": 3, "n_head": 4},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in sequences(96, 96)]
    today = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "logging_steps": 10}
    return GPT2LMHeadModel(config), rows, today | {"lr_scheduler_type": "cosine", "warmup_steps": 20}, {}


def t5():
    config = T5Config(
        **{"vocab_size": VOCABULARY, "d_model": 96, "d_kv": 24, "d_ff": 256, "num_layers": 2, "num_heads": 4},
        **{"decoder_start_token_id": 0, "pad_token_id": 0},
    )
    rows = [{"input_ids": ids, "labels": ids.flip(0)[:40]} for ids in sequences(8, 120)]
    collate = functools.partial(padded, {"input_ids": 0, "labels": -100})
    return T5ForConditionalGeneration(config), rows, {"per_device_train_batch_size": 16}, {"data_collator": collate}


def vit():
    config = ViTConfig(
        **{"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192},
        **{"image_size": 32, "patch_size": 4, "num_labels": 10},
    )
    return ViTForImageClassification(config), images(32), {"per_device_train_batch_size": 32}, {}


def distilbert():
    config = DistilBertConfig(
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 128, "n_layers": 2, "n_heads": 4, "dim": 128},
        **{"hidden_dim": 256, "num_labels": 5},
    )
    rows = [{"input_ids": ids, "labels": ids % 5} for ids in sequences(16, 64)]
    collate = functools.partial(padded, {"input_ids": 0, "labels": -100})
    today = {"per_device_train_batch_size": 16, "logging_steps": 1, "optim": "sgd", "warmup_steps": 50}
    return DistilBertForTokenClassification(config), rows, today, {"data_collator": collate}


def resnet():
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config), images(32), {"per_device_train_batch_size": 32}, {}


def made(make, folder, **changes):
    """The Trainer over what `make` makes."""
    torch.manual_seed(0)
    model, rows, today, more = make()
    kinds = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if make is t5 else (Trainer, TrainingArguments)
    plain = {"save_strategy": "no", "report_to": "none", "num_train_epochs": 3.0}
    args = kinds[1](str(folder), **plain | today | changes)
    return kinds[0](model, args, train_dataset=rows, **more)


MAKERS = (bert, gpt2, t5, vit, distilbert, resnet)
TRAININGS = {make.__name__: functools.partial(made, make) for make in MAKERS}
