"""The scripts: where each is from, what it trains on, and what its user types."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import made

EXAMPLES = "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8"
NANOGPT = "karpathy/nanoGPT@3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
MINGPT = "karpathy/minGPT@37baab71b9abea1b76ab957409a1cc2fbfba8a26"
ACCELERATE = "huggingface/accelerate@16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
LIGHTNING = "Lightning-AI/pytorch-lightning@7f0c3436cd3f6ad3753125672024fc415cbcb414"
TIMM = "huggingface/pytorch-image-models@aa4b5850c1543fa488abf260f18390eda46cf85d"

SFT = (
    "-m trl.scripts.sft --model_name_or_path model --dataset_name lines --output_dir out --use_cpu --report_to none"
    " --max_length 64 --per_device_train_batch_size {batch_size=8} --gradient_accumulation_steps {accumulation_steps=1}"
)


class Case(NamedTuple):
    """`source` is REPOSITORY@COMMIT or an installed package; `paths` of it are copied into the case's folder, and
    `command` runs in `folder` of that. `options` go to `autotune-amp search`, and `in_process` to that of the same
    training as a Workload, None where in_process.py has none."""

    source: str
    paths: tuple[str, ...]
    folder: str
    command: str
    make: Callable[[Path], None]
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    in_process: tuple[str, ...] | None = None


def _nothing(_: Path) -> None:
    """Its data is made by the script."""


def _nlp(folder: Path) -> None:
    made.bert(folder / "bert-base-cased")
    made.sentence_pairs(folder)


def _sft(folder: Path) -> None:
    made.llama(folder / "model")
    made.chat_lines(folder / "lines")


def _lightning(folder: Path) -> None:
    made.mnist(folder / "data")  # which its demos ask for first
    made.mnist(folder.parent.parent / "Datasets")


def _characters(folder: Path) -> None:
    (folder / "input.txt").write_text("O God, O God!\n" + made.text(5000))


CASES = {
    "mnist": Case(
        EXAMPLES,
        ("mnist/main.py",),
        "mnist",
        "python main.py --no-accel --batch-size {batch_size=64}",
        lambda folder: made.mnist(folder.parent / "data"),
        in_process=(),
    ),
    "mnist_rnn": Case(
        EXAMPLES,
        ("mnist_rnn/main.py",),
        "mnist_rnn",
        "python main.py --batch-size {batch_size=64} --seed {seed}",
        lambda folder: made.mnist(folder.parent / "data"),
        in_process=(),
    ),
    "vae": Case(
        EXAMPLES,
        ("vae",),
        "vae",
        "python main.py --no-accel",
        lambda folder: made.mnist(folder.parent / "data"),
        in_process=(),
    ),
    "dcgan": Case(
        EXAMPLES,
        ("dcgan/main.py",),
        "dcgan",
        "python main.py --dataset fake --ngf 8 --ndf 8 --workers 0 --manualSeed {seed} --outf {trial_dir}"
        " --batchSize {batch_size=16}",
        _nothing,
    ),
    "word_language_model": Case(
        EXAMPLES,
        ("word_language_model/main.py", "word_language_model/model.py", "word_language_model/data.py"),
        "word_language_model",
        "python main.py --data corpus --use-optimizer --lr 0.001 --batch_size {batch_size=20}",
        lambda folder: made.corpus(folder / "corpus"),
    ),
    "nanogpt": Case(
        NANOGPT,
        ("train.py", "model.py", "configurator.py", "config"),
        ".",
        "python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=5 --block_size=64"
        " --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --batch_size={batch_size=12}"
        " --gradient_accumulation_steps={accumulation_steps=1}",
        lambda folder: made.characters(folder / "data" / "shakespeare_char"),
        in_process=("--baseline", "fp32:12", "--effective-batch-size", "12"),
    ),
    "mingpt": Case(
        MINGPT,
        ("mingpt", "projects/chargpt"),
        "projects/chargpt",
        "python chargpt.py --model.model_type=gpt-nano --system.seed={seed} --trainer.batch_size={batch_size=64}"
        " --trainer.num_workers={num_workers=0}",
        _characters,
        environment=(("PYTHONPATH", "../.."),),
    ),
    "accelerate_nlp": Case(
        ACCELERATE,
        ("examples/nlp_example.py",),
        "examples",
        "python -m accelerate.commands.launch --cpu"
        " --num_processes 1 nlp_example.py --cpu --mixed_precision {precision=no}",
        _nlp,
        options=("--value", "fp32=no"),
    ),
    "trl_sft": Case(
        "trl",
        (),
        ".",
        f"python {SFT} --bf16 {{precision=fp32:bf16=True|fp32=False}}",
        _sft,
    ),
    "trl_sft_torchrun": Case(
        "trl",
        (),
        ".",
        f"python -m torch.distributed.run --nproc_per_node 2 --master_port {{port}} {SFT} --ddp_backend gloo",
        _sft,
    ),
    "lightning_autoencoder": Case(
        LIGHTNING,
        ("examples/pytorch/basics/autoencoder.py",),
        "examples/pytorch/basics",
        "python autoencoder.py --trainer.accelerator=cpu --trainer.precision={precision=32-true}"
        " --data.batch_size={batch_size=32}",
        _lightning,
        options=("--value", "fp32=32-true", "--value", "bf16=bf16-mixed"),
    ),
    "fabric_image_classifier": Case(
        LIGHTNING,
        ("examples/fabric/image_classifier/train_fabric.py",),
        "examples/fabric/image_classifier",
        "python -m lightning.fabric.cli train_fabric.py --accelerator=cpu"
        " --devices=2 --main-port={port} --precision={precision=32-true}"
        " --batch-size {batch_size=32}",
        lambda folder: made.mnist(folder.parent.parent.parent / "Datasets"),
        options=("--value", "fp32=32-true", "--value", "bf16=bf16-mixed"),
    ),
    "timm": Case(
        TIMM,
        ("train.py", "timm"),
        ".",
        "python train.py --data-dir images --model resnet10t --num-classes 4 --img-size 64"
        " --device cpu --workers 1 --seed {seed} --batch-size {batch_size=16}"
        " '{precision:bf16=--amp --amp-dtype bfloat16|fp32=}'",
        lambda folder: made.images(folder / "images"),
    ),
}
