"""Search each fine-tuning, then train by hand with the answer: `python study.py [CELL…]`, a cell such as `trl_lora`.

Each cell appends a line to results/outcomes.jsonl: the document of its search, and the rates of NUM_RUNS trainings of
today's setting and of the answer in turn, in fresh processes without autotune_amp. A cell that has its line is skipped,
unless it is named.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from msgspec import convert
from msgspec.structs import replace

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.config import AmpConfig, training_arguments
from autotune_amp.core.setting import Setting

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SITE_PACKAGES = sysconfig.get_path("purelib")
FORMS = ("full", "lora", "qlora")
CELLS = tuple(f"{way}_{form}" for form in FORMS for way in ("trainer", "trl", "workload"))
NUM_RUNS = 3
RUN_SECONDS = 900
TRAINER = "python train.py --form {form} --output_dir {{trial_dir}} --report_to none --learning_rate 1e-4"
TODAY = "--bf16 --per_device_train_batch_size 4"  # the Trainer's own arguments need no braces
ARGUMENTS = "--optim {optim=adamw_torch:adamw_torch_fused} --gradient_checkpointing {ckpt=False:True}"
ATTENTION = "{attn=sdpa:eager}"
TRL = """model_name_or_path: model
dtype: bfloat16
dataset_name: data
max_length: 128
report_to: none
learning_rate: 1.0e-4
per_device_train_batch_size: 4
"""
TRL_OF_FORM = {
    "full": "",
    "lora": "use_peft: true\nlora_r: 8\nlora_target_modules: all-linear\n",
    "qlora": "use_peft: true\nlora_r: 8\nlora_target_modules: all-linear\nload_in_4bit: true\n",
}


def search(cell: str, folder: Path, device: str, budget: int) -> dict:
    """Return the seconds, the exit status and the document of a search."""
    way, form = cell.split("_")
    on_cpu = ["--use_cpu"] if device == "cpu" else []
    if way == "trainer":
        line = f"{TRAINER.format(form=form)} {TODAY} --attention {ATTENTION} {ARGUMENTS}"
        target = ["--", *shlex.split(line), *on_cpu]
    elif way == "trl":
        (folder / f"{form}.yaml").write_text(TRL + TRL_OF_FORM[form])
        line = f"--attn_implementation {ATTENTION} --packing {{packing=False:True}} {ARGUMENTS}"
        own = [*line.split(), *on_cpu]
        target = ["--", "trl", "sft", "--config", f"{form}.yaml", "--output_dir", "{trial_dir}", *own]
    else:
        target = [f"train.py:{form}"]
    began = time.monotonic()
    options = ["--budget", str(budget), "--device", device, "--study", cell, "--out", "found", "--fresh", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", "search", *options, *target],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        check=False,
    )
    document = json.loads(done.stdout) if done.stdout else {"error": {"message": "no document"}}
    return {"seconds": time.monotonic() - began, "status": done.returncode, "document": document}


def by_hand(cell: str, folder: Path, document: dict, device: str) -> list[dict]:
    """Return the rates of trainings with today's setting and with the answer."""
    settings = {"today": document["evidence"]["baseline"]["config"], "answer": document["config"]}
    return [
        {"of": of, **timed(arguments(cell, document, config, device), folder, config)}
        for _ in range(NUM_RUNS)
        for of, config in settings.items()
    ]


def arguments(cell: str, document: dict, config: dict, device: str) -> list[str]:
    """Return what by_hand.py runs for a setting: the searched command, or for a Workload the same Trainer's script."""
    way, form = cell.split("_")
    setting = convert(config, AmpConfig)
    if way != "workload" and setting.precision != "tf32":  # a command's trials keep its own TF32 flags
        setting = replace(setting, as_found=True)
    flags = [word for name, value in training_arguments(setting).items() for word in flag(name, value)]
    if way == "workload":
        return [*shlex.split(TRAINER.format(form=form))[1:], *flags, *(["--use_cpu"] if device == "cpu" else [])]
    line = convert(document["launch_line"], CommandTemplate)
    filled, _ = line.of_setting(convert(config, Setting), ".", seed=0)
    return [*(["-m", "trl.scripts.sft", *filled[2:]] if way == "trl" else filled[1:]), *flags]


def flag(name: str, value: object) -> list[str]:
    """Return a command-line argument of TrainingArguments."""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"--{name}", text]


def timed(words: list[str], folder: Path, config: dict) -> dict:
    """Run by_hand.py, and return its rates or the error."""
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary, "rates.json")
        words = [word.replace("{trial_dir}", temporary) for word in words]
        done = subprocess.run(
            [sys.executable, str(HERE / "by_hand.py"), *words],
            cwd=folder,
            env={**environment(), **config.get("environment", {}), "BY_HAND": str(result)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=RUN_SECONDS,
            text=True,
            check=False,
        )
        command = shlex.join(words).replace(temporary, "OUT")
        return {"command": command} | (
            json.loads(result.read_text()) if result.exists() else {"error": done.stderr[-2000:]}
        )


def environment() -> dict[str, str]:
    """Return the variables of every process: offline, with this repository and this Python first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT), "PATH": path}


def main() -> None:
    """Run the cells that are named, or all that have no line in the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny", help="of make.py")
    parser.add_argument("--budget", type=int, default=600, help="seconds of each search")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "studies_fine_tuning")
    options = parser.parse_args()
    results = HERE / "results" / "outcomes.jsonl"
    results.parent.mkdir(exist_ok=True)
    lines = results.read_text().splitlines() if results.exists() else []
    known = {(line["cell"], line["device"], line["size"]) for line in map(json.loads, lines)}
    folder = options.work / options.size
    if not (folder / "data" / "train.jsonl").exists():
        make = [sys.executable, str(HERE / "make.py"), str(folder), "--size", options.size]
        subprocess.run(make, check=True, env=environment())
    shutil.copy(HERE / "train.py", folder)
    missing = [cell for cell in CELLS if (cell, options.device, options.size) not in known]
    for cell in options.cells or missing:
        found = search(cell, folder, options.device, options.budget)
        if found["status"] == 0:
            found["runs"] = by_hand(cell, folder, found["document"], options.device)
        outcome = {"cell": cell, "device": options.device, "size": options.size, **found}
        text = json.dumps(outcome).replace(f"{options.work}/", "").replace(f"{SITE_PACKAGES}/", "")  # where it ran
        with results.open("a") as file:
            file.write(f"{text}\n")
        print(cell, found["status"], f"{found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
