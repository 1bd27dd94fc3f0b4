"""Make what the trainings need, offline: `python make.py FOLDER` writes a Llama with random bf16 weights and its
byte-level tokenizer to FOLDER/model, and texts of many lengths to FOLDER/data/train.jsonl.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Hidden and intermediate size, layers, heads, heads of keys: "1b" has 1.1 billion parameters, as TinyLlama.
SIZES = {"tiny": (64, 176, 2, 4, 2), "1b": (2048, 5632, 22, 32, 4)}
NUM_TEXTS = 4000
WORDS = [f"word{number}" for number in range(500)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, and tokens for padding, begin and end."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=2048, **special)


def make_model(size: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of a size with random weights in bf16."""
    hidden_size, intermediate_size, num_layers, num_heads, num_key_value_heads = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    """Write the model folder and the texts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(options.folder / "model")
    make_model(options.size, tokenizer).save_pretrained(options.folder / "model")
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(3, 18))) for _ in range(NUM_TEXTS)]
    data = options.folder / "data"
    data.mkdir(exist_ok=True)
    (data / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


if __name__ == "__main__":
    main()
