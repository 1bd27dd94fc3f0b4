"""What the scripts train on: random images, text and weights in the form that each expects; nothing is downloaded."""

import json
import pickle
import random
import shutil
from pathlib import Path

import numpy as np

WORDS = [f"word{number}" for number in range(500)]


def mnist(folder: Path) -> None:
    """MNIST's own files with random images, in `folder`/MNIST/raw."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for split, num in (("train", 60000), ("t10k", 10000)):
        images, labels = rng.integers(0, 256, (num, 28, 28), np.uint8), rng.integers(0, 10, num, np.uint8)
        _idx(raw / f"{split}-images-idx3-ubyte", images, 3)
        _idx(raw / f"{split}-labels-idx1-ubyte", labels, 1)


def _idx(path: Path, values: np.ndarray, num_dimensions: int) -> None:
    header = bytes([0, 0, 8, num_dimensions]) + np.array(values.shape, ">i4").tobytes()
    path.write_bytes(header + values.tobytes())
    path.with_name(path.name + ".gz").touch()  # torchvision asks for the archive's name in some versions


def corpus(folder: Path) -> None:
    """Lines of words for the word language model."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, num in (("train", 20000), ("valid", 500), ("test", 500)):
        (folder / f"{split}.txt").write_text(text(num))


def text(num_lines: int) -> str:
    chance = random.Random(0)
    return "\n".join(" ".join(chance.choices(WORDS, k=12)) for _ in range(num_lines)) + "\n"


def characters(folder: Path) -> None:
    """nanoGPT's train.bin, val.bin and meta.pkl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for split, num in (("train", 1_000_000), ("val", 100_000)):
        rng.integers(0, 65, num).astype(np.uint16).tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def images(folder: Path, size: int = 64, num_classes: int = 4, num_each: int = 300) -> None:
    """An ImageFolder with train and val."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(num_classes):
            of_class = folder / split / f"class{label}"
            of_class.mkdir(parents=True, exist_ok=True)
            for number in range(num_each if split == "train" else 20):
                Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(of_class / f"{number}.png")


def tokenizer(folder: Path, special: dict[str, str]) -> None:
    """A tokenizer that knows WORDS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*special.values(), *WORDS]
    raw = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(known)}, unk_token=special["unk_token"])
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=128, **special).save_pretrained(folder)


def bert(folder: Path) -> None:
    """`bert-base-cased` as a folder: BERT's architecture, small, with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer(folder, {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})
    config = BertConfig(
        vocab_size=600, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def llama(folder: Path) -> None:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer(folder, {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"})
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def sentence_pairs(folder: Path) -> None:
    """What `load_dataset("nyu-mll/glue", "mrpc")` and `evaluate.load("glue", "mrpc")` find in the working folder."""
    data = folder / "nyu-mll" / "glue"
    (data / "mrpc").mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for split, num in (("train", 3000), ("validation", 200)):
        rows = [
            {
                "sentence1": " ".join(chance.choices(WORDS, k=chance.randint(8, 30))),
                "sentence2": " ".join(chance.choices(WORDS, k=chance.randint(8, 30))),
                "label": chance.randint(0, 1),
                "idx": number,
            }
            for number in range(num)
        ]
        (data / "mrpc" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: mrpc/train.jsonl\n"
        "  - split: validation\n    path: mrpc/validation.jsonl\n---\n"
    )
    metric = folder / "glue"
    shutil.rmtree(metric, ignore_errors=True)
    metric.mkdir()
    (metric / "glue.py").write_text(
        "import datasets\nimport evaluate\n\n\nclass Glue(evaluate.Metric):\n    def _info(self):\n"
        "        features = datasets.Features({'predictions': datasets.Value('int64'), "
        "'references': datasets.Value('int64')})\n"
        "        return evaluate.MetricInfo(description='', citation='', features=features)\n\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'accuracy': sum(p == r for p, r in zip(predictions, references)) / len(references)}\n"
    )


def chat_lines(folder: Path) -> None:
    """A text dataset with a `text` column, as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"text": line} for line in text(4000).splitlines()]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def instructions(folder: Path) -> None:
    """A dataset of instructions with the columns of Alpaca, as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = text(4000).splitlines()
    rows = [{"instruction": line, "input": "", "output": line} for line in lines]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def scored_pairs(folder: Path) -> None:
    """A dataset of sentence pairs with a score from 0 to 1, as `load_dataset` finds it in the working folder."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for split, num in (("train", 3000), ("validation", 100), ("test", 100)):
        rows = [
            {
                "sentence1": " ".join(chance.choices(WORDS, k=chance.randint(8, 30))),
                "sentence2": " ".join(chance.choices(WORDS, k=chance.randint(8, 30))),
                "score": chance.random(),
            }
            for _ in range(num)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def shards(folder: Path) -> None:
    """llama2.c's shards of token ids below 512."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(3):
        rng.integers(0, 512, 500_000).astype(np.uint16).tofile(folder / f"data{number:02}.bin")


def compressed_text(path: Path) -> None:
    """95 MB of letters, gzipped, as enwik8 is."""
    import gzip

    path.parent.mkdir(parents=True, exist_ok=True)
    letters = np.random.default_rng(0).integers(97, 123, 1_000_000, np.uint8).tobytes()
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(letters * 95)


def images_and_masks(folder: Path, size: int = 128, num: int = 400) -> None:
    """Images in `folder`/imgs and masks of two classes in `folder`/masks."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("imgs", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(num):
        Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(folder / "imgs" / f"{number}.png")
        Image.fromarray(rng.integers(0, 2, (size, size), np.uint8)).save(folder / "masks" / f"{number}_mask.png")


def photographs(folder: Path, size: int = 300, num: int = 200) -> None:
    """Images in `folder`/train and `folder`/test, as of the BSDS300."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, num_images in (("train", num), ("test", 20)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(num_images):
            Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(folder / split / f"{number}.jpg")


def sine_waves(path: Path) -> None:
    """A hundred sine waves of 1,000 points with random phases, in float64."""
    import torch

    phases = np.random.default_rng(0).integers(-80, 80, 100)[:, None]
    torch.save(np.sin((np.arange(200)[None] + phases) / 20.0), path, pickle_protocol=4)
