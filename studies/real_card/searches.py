"""Searches ten training runs as a user would, then trains each by hand with what the search answered.

Usage: searches.py --minutes 8 --out FOLDER [--only NAME ...] [--device cpu --tiny] | --out FOLDER --table.

FOLDER/searches.jsonl gets one line for each training run, as it ends; runs that it holds for this device are skipped.
Today's setting is fp32 at the batch size of `trainings.py`, as PyTorch's defaults have it, and the batch size is kept
unless the name ends with "_free". The search has its default budget unless another is given. What it answers is timed
by `measurer.py` in a process of its own, beside today's setting; the best by hand is that of by_hand.jsonl at the batch
sizes that the search may use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ORDER = ("llama", "resnet50_free", "gpt", "unet", "mlp", "vit_b16", "efficientnet_b0", "bert", "t5_small", "lstm")
SECONDS_OF_TRAININGS = 45.0  # what today's setting and the answer take by hand, after a search
NUM_SAMPLES = 2048


def named(name: str) -> Any:
    """The training run of a name, without what says that its batch is free."""
    from trainings import trainings

    wanted = name.removesuffix("_free")
    return next(one for one in trainings(tiny="TINY" in os.environ) if one.name == wanted)


class InMemory:
    """A dataset of tensors in memory that hands out whole batches: samples stacked one by one would bound the step."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> Any:
        return tuple(tensor[indices] for tensor in self.tensors)


def as_it_is(batch: Any) -> Any:
    """Collate what is a batch already."""
    return batch


def workload(name: str) -> Any:
    """What is searched: the same model, loss, batches and optimizer, with a DataLoader of today's batch size."""
    import torch

    from autotune_amp import Workload

    training = named(name)
    tiny = "TINY" in os.environ
    if training.name == "t5_small":  # its lengths differ from batch to batch, which no dataset of samples has
        return Workload(
            training.model, training.loss, partial(training.make_batch, index=0), training.optimizer, name=name
        )
    samples = InMemory(training.make_batch(64 if tiny else NUM_SAMPLES, 0))

    def loss(model: Any, batch: Any) -> Any:
        return training.loss(model, tuple(batch))

    loader = torch.utils.data.DataLoader(
        samples,
        batch_size=training.batch_size,
        shuffle=True,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
        collate_fn=as_it_is,
    )
    return Workload(training.model, loss, loader, training.optimizer, name=name)


for each in (*ORDER, "resnet50"):  # searches.py:NAME for the command line
    globals()[each] = partial(workload, each)


def searched(name: str, device: str, folder: Path, budget: str | None, limit_seconds: float) -> dict[str, Any]:
    """Run the search of a training run, as a command of its own that gets Ctrl-C at its limit; returns what it says."""
    training = named(name)
    command = [
        sys.executable,
        "-m",
        "autotune_amp",
        "search",
        f"{os.path.relpath(HERE / 'searches.py')}:{name}",
        "--json",
    ]
    command += ["--device", device, "--out", str(folder), "--effective-batch-size"]
    command += ["free" if name.endswith("_free") else str(training.batch_size)]
    if budget is not None:
        command += ["--budget", budget]
    if training.name == "t5_small":
        command += ["--baseline", f"fp32:{training.batch_size}"]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryFile("w+") as answered:
        process = subprocess.Popen(command, stdout=answered, stderr=subprocess.PIPE, text=True, env=environment)
        interrupt = threading.Timer(limit_seconds, process.send_signal, (signal.SIGINT,))
        interrupt.start()
        assert process.stderr is not None
        said = [f"{time.monotonic() - began:6.1f} {line}" for line in process.stderr]
        status = process.wait()
        interrupt.cancel()
        answered.seek(0)
        printed = answered.read()
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "said": "".join(said)}
    found["interrupted"] = found["seconds"] > limit_seconds
    if not printed.startswith("{"):
        return {**found, "failure": f"exit status {status}: {printed[-2000:]}"}
    answer = json.loads(printed)
    answer = answer.get("best") or answer  # where the search was interrupted
    if "config" not in answer:
        return {**found, "failure": printed[-2000:]}
    evidence = answer["evidence"]
    keys = ("samples_per_second", "samples_per_second_interval", "speedup", "speedup_interval", "is_confirmed")
    return {
        **found,
        "config": answer["config"],
        "reason": answer["reason"],
        "warnings": answer["warnings"],
        "start_seconds": answer["search"]["start_seconds"],
        "num_trials": answer["search"]["num_trials"],
        "precisions": sorted({row["precision"] for row in answer["candidates"] if row["samples_per_second"]}),
        **{key: evidence[key] for key in keys},
        "baseline_samples_per_second": evidence["baseline"]["samples_per_second"],
    }


def trained(name: str, settings: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Time settings by hand, each after the other in one process without anything of autotune_amp."""
    command = [sys.executable, str(HERE / "searches.py"), "--train", name, "--settings", json.dumps(settings)]
    done = subprocess.run([*command, "--device", device], capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines] or [{"failure": done.stderr[-2000:]}]


def setting_of(config: dict[str, Any]) -> dict[str, Any]:
    """A config as `measurer.Setting` has it."""
    compiled = config.get("compile", "off")
    return {
        "precision": config["precision"],
        "batch_size": config["batch_size"],
        "is_fused": config.get("optimizer_impl") == "fused",
        "is_channels_last": config.get("memory_format") == "channels_last",
        "is_benchmark": config.get("cudnn_benchmark") == "on",
        "compile_mode": None if compiled == "off" else compiled,
    }


def labelled(config: dict[str, Any]) -> str:
    """A config in a few words."""
    found = setting_of(config)
    flags = [name.removeprefix("is_") for name, value in found.items() if value is True]
    return " ".join([found["precision"], str(found["batch_size"]), *flags, *filter(None, [found["compile_mode"]])])


def train(name: str, settings: list[dict[str, Any]], device: str) -> None:
    """Print a line for each setting."""
    import torch
    from measurer import Measurer, Setting

    measurer = Measurer(torch.device(device))
    for setting in settings:
        print(json.dumps(measurer.outcome(named(name), Setting(**setting))), flush=True)


def known_best(name: str) -> dict[str, Any] | None:
    """The best by hand that by_hand.jsonl has at the batch sizes that the search may use."""
    lines = [json.loads(line) for line in (HERE / "results" / "by_hand.jsonl").read_text().splitlines()]
    training = named(name)
    ours = [
        line
        for line in lines
        if line.get("training") == training.name
        and line.get("samples_per_second")
        and (name.endswith("_free") or line["batch_size"] == training.batch_size)
    ]
    return max(ours, key=lambda line: line["samples_per_second"], default=None)


def piece(name: str, device: str, out: Path, budget: str | None, limit_seconds: float) -> dict[str, Any]:
    """One training run: its search, then by hand today's setting and what was answered."""
    import torch

    folder = Path(tempfile.mkdtemp())
    found = {"training": name, "device": torch.cuda.get_device_name() if device == "cuda" else device}
    found |= {"budget": budget, **searched(name, device, folder, budget, limit_seconds)}
    study = next(folder.glob("*/outcomes.jsonl"), None)
    if study is not None:
        kept = out / found["device"].replace(" ", "_") / name
        kept.mkdir(parents=True, exist_ok=True)
        for file in ("outcomes.jsonl", "recommendation.json"):
            if (study.parent / file).exists():
                shutil.copy(study.parent / file, kept)
    shutil.rmtree(folder)
    if "config" in found:
        today = {"precision": "fp32", "batch_size": named(name).batch_size}
        answer = setting_of(found["config"])
        found["trained"] = trained(name, [today] if answer == {**setting_of(today)} else [today, answer], device)
    return found


def table(path: Path) -> list[str]:
    """A row for each training run, the gains over today's fp32 of the same process."""
    titles = ("training", "answer", "gain promised", "trained by hand", "best by hand", "of the best", "s", "confirmed")
    rows = [f"| {' | '.join((*titles, 'precisions compared'))} |", "|" + "---|" * 9]
    for line in map(json.loads, path.read_text().splitlines()):
        if "config" not in line:
            rows.append(f"| {line['training']} | failed: {str(line.get('failure'))[:60]} |" + " |" * 7)
            continue
        speeds = [one.get("samples_per_second") for one in line["trained"]]
        attained = speeds[-1] / speeds[0] if speeds[0] and speeds[-1] else None
        best = known_best(line["training"])
        best_gain = best and best["samples_per_second"] / by_hand_today(line["training"])
        share = f"{100 * attained / best_gain:.0f} %" if attained and best_gain else ""
        label = labelled(line["config"])
        promised = "" if line["speedup"] is None else f"{line['speedup']:.2f}"
        rows.append(
            f"| {line['training']} | {label} | {promised} | {attained or 0:.2f} | {best_gain or 0:.2f} | {share} | "
            f"{line['seconds']:.0f} | {'yes' if line['is_confirmed'] else 'no'} | {', '.join(line['precisions'])} |"
        )
    return rows


def by_hand_today(name: str) -> float:
    """Samples per second of fp32 at today's batch in by_hand.jsonl."""
    training = named(name)
    for line in map(json.loads, (HERE / "results" / "by_hand.jsonl").read_text().splitlines()):
        key = line.get("training"), line.get("setting"), line.get("batch_size")
        if key == (training.name, "fp32", training.batch_size):
            return float(line["samples_per_second"])
    raise KeyError(name)


COURSES = {  # the folders of results/ with searches of default budget, by what was new
    "cut_off": "trials forked",
    "before_standby_waits": "one process kept, one standing by",
    "standby_waits": "nothing loads beside timed steps",
    "variants_first": "further dimensions before repeats",
}


def kind(record: dict[str, Any]) -> str:
    """What a job of a search is for: a check, a profile, or a trial of which kind."""
    setting = record["candidate"]
    if record["purpose"] != "search":
        return "checks" if record["purpose"] in ("fidelity", "accumulation", "calibration") else record["purpose"]
    if setting["compile"] != "off":
        return "compiled"
    if setting["num_workers"] is not None:
        return "loader workers"
    plain = {"memory_format": "contiguous", "optimizer_impl": "as_found", "cudnn_benchmark": "as_found"}
    return "batches, precisions" if all(setting[name] == value for name, value in plain.items()) else "dimensions"


def courses() -> list[str]:
    """A row for each search that is recorded job by job: where its seconds went, and the fastest that it measured."""
    kinds = ("batches, precisions", "checks", "profile", "loader workers", "dimensions", "compiled")
    titles = ("training", "what was new", "today's, samples/s", "fastest seen", "its setting", "jobs")
    rows = [f"| {' | '.join((*titles, *(f'{one}, s' for one in kinds)))} |", "|" + "---|" * (len(titles) + len(kinds))]
    for folder, new in COURSES.items():
        for path in sorted((HERE / "results" / folder).glob("*.jsonl")):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            if "candidate" not in records[0]:
                continue
            measured = [r for r in records if r["outcome"]["outcome"] == "measurement"]
            best = max(measured, key=lambda r: r["outcome"]["samples_per_second"])
            label = labelled(best["candidate"])
            rate_today, rate = (r["outcome"]["samples_per_second"] for r in (measured[0], best))
            seconds = [sum(r["seconds"] for r in records if kind(r) == one) for one in kinds]
            shown = [f"{some:.0f}" for some in seconds]
            rows.append(
                f"| {path.stem} | {new} | {rate_today:,.0f} | {rate:,.0f} | {label} | {len(records)} | "
                f"{' | '.join(shown)} |"
            )
    return rows


def put(readme: Path, name: str, rows: list[str]) -> None:
    """Write a table between its marks."""
    before, rest = readme.read_text().split(f"<!-- {name} -->\n")
    after = rest.split(f"<!-- end of {name} -->")[1]
    text = "\n".join(rows)
    readme.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- end of {name} -->{after}")


def main() -> None:
    """Run pieces until the time is over, or make the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", nargs="*", default=ORDER)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a search gets Ctrl-C")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--train")
    parser.add_argument("--settings", type=json.loads)
    given = parser.parse_args()
    if given.tiny:
        os.environ["TINY"] = "1"
    path = given.out / "searches.jsonl"
    if given.train:
        train(given.train, given.settings, given.device)
    elif given.table:
        put(HERE / "README.md", "answers", table(path))
        put(HERE / "README.md", "courses", courses())
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        ends = time.monotonic() + 60 * given.minutes
        done = {json.loads(line)["training"] for line in path.read_text().splitlines()} if path.exists() else set()
        for name in given.only:
            if name in done or time.monotonic() + given.limit + SECONDS_OF_TRAININGS > ends:
                continue
            found = piece(name, given.device, given.out, given.budget, given.limit)
            with path.open("a") as file:
                file.write(json.dumps(found) + "\n")
            said = {key: value for key, value in found.items() if key not in ("trained", "warnings")}
            print(json.dumps(said), flush=True)
            print([(one.get("setting"), one.get("samples_per_second")) for one in found.get("trained", ())], flush=True)


if __name__ == "__main__":
    main()
