"""Fine-tune the model of make.py with a Transformers Trainer: `python train.py --form lora --output_dir out`, in the
folder that make.py filled. `full`, `lora` and `qlora` describe the same trainings as a `Workload`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

MAX_LENGTH = 128


@dataclass
class Options:
    """Which weights are trained, and with which attention."""

    form: str = field(default="full", metadata={"choices": ["full", "lora", "qlora"]})
    attention: str = "sdpa"


def make_trainer(options: Options, arguments: TrainingArguments) -> Trainer:
    """Return the Trainer of a form: all weights in bf16, adapters beside frozen bf16 weights, or beside 4-bit ones."""
    quantization = None
    if options.form == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = AutoModelForCausalLM.from_pretrained(
        "model", dtype=torch.bfloat16, attn_implementation=options.attention, quantization_config=quantization
    )
    if options.form == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=arguments.gradient_checkpointing)
    if options.form != "full":
        model = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    tokenizer = AutoTokenizer.from_pretrained("model")
    texts = load_dataset("json", data_files="data/train.jsonl", split="train")
    tokens = texts.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=MAX_LENGTH),
        batched=True,
        remove_columns=["text"],
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return Trainer(model, arguments, train_dataset=tokens, data_collator=collator)


def _workload(form: str) -> Any:
    from autotune_amp import Workload  # not where this file trains by hand

    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        bf16=True,
        learning_rate=1e-4,
        report_to=[],
    )
    return Workload.from_trainer(make_trainer(Options(form=form), arguments))


def full() -> Any:
    """Describe the training of all weights."""
    return _workload("full")


def lora() -> Any:
    """Describe the training of adapters beside frozen weights in bf16."""
    return _workload("lora")


def qlora() -> Any:
    """Describe the training of adapters beside frozen weights of 4 bit."""
    return _workload("qlora")


if __name__ == "__main__":
    make_trainer(*HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()).train()
