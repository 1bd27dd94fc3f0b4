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
MAKEMORE = "karpathy/makemore@988aa59e4d8fefa526d06f3b453ad116258398d4"
LLAMA2C = "karpathy/llama2.c@350e04fe35433e6d2941dce5a1f53308f87058eb"
X_TRANSFORMERS = "lucidrains/x-transformers@9252ed7838021ee61e6c5be0930b3a9a88efdf06"
UNET = "milesial/Pytorch-UNet@21d7850f2af30a9695bbeea75f3136aa538cfc4a"
GAN = "eriklindernoren/PyTorch-GAN@36d3c77e5ff20ebe0aeefd322326a134a279b93e"
CLEANRL = "vwxyzjn/cleanrl@fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
PEFT = "huggingface/peft@5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
SENTENCES = "huggingface/sentence-transformers@cad211983f36ce458e9b3360f3e11b29fc54cbd8"

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


def _olora(folder: Path) -> None:
    made.llama(folder / "model")
    made.instructions(folder / "instructions")


def _sentences(folder: Path) -> None:
    made.bert(folder / "bert")
    made.scored_pairs(folder / "sentence-transformers" / "stsb")


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
    "makemore": Case(
        MAKEMORE,
        ("makemore.py", "names.txt"),
        ".",
        "python makemore.py --work-dir {trial_dir} --seed {seed} --num-workers {num_workers=1}"
        " --batch-size {batch_size=32}",
        _nothing,
    ),
    "llama2c": Case(
        LLAMA2C,
        ("train.py", "model.py", "configurator.py", "tinystories.py", "export.py", "tokenizer.py"),
        ".",
        "python train.py --device=cpu --compile=False --vocab_source=custom --vocab_size=512 --dim=128 --n_layers=4"
        " --n_heads=4 --n_kv_heads=4 --max_seq_len=64 --eval_iters=5 --out_dir={trial_dir}"
        " --batch_size={batch_size=16} --gradient_accumulation_steps={accumulation_steps=2}",
        lambda folder: made.shards(folder / "data" / "tok512"),
    ),
    "x_transformers_copy": Case(X_TRANSFORMERS, ("train_copy.py",), ".", "python train_copy.py", _nothing),
    "x_transformers_enwik8": Case(
        X_TRANSFORMERS,
        ("train_enwik8.py",),
        ".",
        "python train_enwik8.py --seq_len 64 --cpu True --batch_size {batch_size=4}"
        " --gradient_accumulate_every {accumulation_steps=4}",
        lambda folder: made.compressed_text(folder / "data" / "enwik8.gz"),
    ),
    "unet": Case(
        UNET,
        ("train.py", "evaluate.py", "unet", "utils"),
        ".",
        "python train.py --scale 0.5 --batch-size {batch_size=4} '{precision:bf16=--amp|fp32=}'",
        lambda folder: made.images_and_masks(folder / "data"),
        environment=(("WANDB_MODE", "disabled"),),
    ),
    "wgan_gp": Case(
        GAN,
        ("implementations/wgan_gp",),
        "implementations/wgan_gp",
        "python wgan_gp.py --n_epochs 5 --batch_size {batch_size=64}",
        lambda folder: made.mnist(folder.parent.parent / "data" / "mnist"),
    ),
    "siamese": Case(
        EXAMPLES,
        ("siamese_network/main.py",),
        "siamese_network",
        "python main.py --no-accel --seed {seed} --batch-size {batch_size=16}",
        lambda folder: made.mnist(folder.parent / "data"),
    ),
    "super_resolution": Case(
        EXAMPLES,
        ("super_resolution",),
        "super_resolution",
        "python main.py --upscale_factor 4 --nEpochs 100 --threads {num_workers=1} --batchSize {batch_size=4}",
        lambda folder: made.photographs(folder / "dataset" / "BSDS300" / "images"),
    ),
    "time_sequence": Case(
        EXAMPLES,
        ("time_sequence_prediction/train.py", "time_sequence_prediction/generate_sine_wave.py"),
        "time_sequence_prediction",
        "python train.py --steps 60",
        lambda folder: made.sine_waves(folder / "traindata.pt"),
        environment=(("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),),  # written for torch before 2.6
    ),
    "forward_forward": Case(
        EXAMPLES,
        ("mnist_forward_forward/main.py",),
        "mnist_forward_forward",
        "python main.py --no_accel --train_size {batch_size=2000} --epochs 300",
        lambda folder: made.mnist(folder / "data"),
    ),
    "hogwild": Case(
        EXAMPLES,
        ("mnist_hogwild",),
        "mnist_hogwild",
        "python main.py --num-processes 2 --seed {seed} --batch-size {batch_size=64}",
        lambda folder: made.mnist(folder.parent / "data"),
    ),
    "imagenet": Case(
        EXAMPLES,
        ("imagenet/main.py",),
        "imagenet",
        "python main.py --dummy --arch resnet18 --workers 1 --seed {seed} --batch-size {batch_size=8}",
        _nothing,
    ),
    "ppo": Case(
        CLEANRL,
        ("cleanrl/ppo.py", "cleanrl_utils"),
        "cleanrl",
        "python ppo.py --no-cuda --seed {seed} --num-minibatches 4",
        _nothing,
    ),
    "olora": Case(
        PEFT,
        ("examples/olora_finetuning/olora_finetuning.py",),
        "examples/olora_finetuning",
        "python olora_finetuning.py --base_model model --data_path instructions --device_map cpu --dtype float32"
        " --seed {seed} --output_dir {trial_dir} --batch_size {batch_size=8}",
        _olora,
    ),
    "sentence_similarity": Case(
        SENTENCES,
        ("examples/sentence_transformer/training/sts/training_stsbenchmark.py",),
        "examples/sentence_transformer/training/sts",
        "python training_stsbenchmark.py bert",
        _sentences,
    ),
}
