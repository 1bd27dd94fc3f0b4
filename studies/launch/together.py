"""Compares runs of commands that load together with runs that load alone, and searches by both.

`python together.py [NAME...]` measures three settings of each command of `COMMANDS` in `NUM_ROUNDS` rounds, in turn
loaded together and alone, and appends a line for each run to results/together.jsonl. `python together.py --search`
searches one command that takes a minute to start both ways, and appends a line for each search to
results/together_searches.jsonl. Both write the tables of all lines into README.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune_amp import CommandTemplate, recommend_config
from autotune_amp.command import together
from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.command import Command
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.intervals import prediction_interval
from autotune_amp.core.outcome import Description, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Describe, Trial

HERE = Path(__file__).resolve().parent
RUNS, SEARCHES = (HERE / "results" / name for name in ("together.jsonl", "together_searches.jsonl"))
BEGIN, END = "<!-- results: together.py -->", "<!-- end of results of together.py -->"
WAYS = {"together": 8, "alone": 1}  # how many runs may load at the same time, whatever this machine has room for
HEAD = "| command | setting | together, samples/s (95 %) | alone, samples/s (95 %) | overlap | first losses equal |"
NUM_ROUNDS, DEADLINE_SECONDS = 3, 300.0
SHORT_START_SECONDS, LONG_START_SECONDS = 2, 60  # stand for the start of a large training
SEARCHED = "mlp"

HEADER = """
import math, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
time.sleep(START_SECONDS)
torch.manual_seed(0)
"""
PLAIN = """
while True:
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""
MLP = """
data = TensorDataset(torch.randn(8192, 256), torch.randint(10, (8192,)))
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=64, shuffle=True)
"""
CONVNET = """
data = TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,)))
def block(width, out):
    return [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(2048, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=1)
"""
SCALER = """
scaler = torch.amp.GradScaler("cpu", enabled=False)
while True:
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
LANGUAGE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 256)
    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens))).transpose(1, 2)
text = torch.randint(256, (2048, 65))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=16, shuffle=True)
while True:
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
"""
AUTOENCODER = """
data = TensorDataset(torch.rand(8192, 784))
encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 40))
decoder = nn.Sequential(nn.Linear(20, 512), nn.ReLU(), nn.Linear(512, 784))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
loader = DataLoader(data, batch_size=128, shuffle=True)
while True:
    for (x,) in loader:
        optimizer.zero_grad()
        mean, spread = encoder(x).chunk(2, 1)
        restored = decoder(mean + torch.randn_like(mean) * torch.exp(spread / 2))
        loss = nn.functional.binary_cross_entropy_with_logits(restored, x, reduction="sum") / len(x)
        (loss + 0.5 * (mean**2 + spread.exp() - spread - 1).sum() / len(x)).backward()
        optimizer.step()
"""
GAN = """
data = TensorDataset(torch.randn(2048, 1, 32, 32))
generator = nn.Sequential(
    nn.ConvTranspose2d(64, 64, 8), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
    nn.Linear(4096, 1),
)
for_critic, for_generator = (torch.optim.Adam(each.parameters(), 2e-4) for each in (critic, generator))
loss_of = nn.BCEWithLogitsLoss()
loader = DataLoader(data, batch_size=16, shuffle=True)
while True:
    for (real,) in loader:
        made = generator(torch.randn(len(real), 64, 1, 1))
        for_critic.zero_grad()
        ones = torch.ones(len(real), 1)
        (loss_of(critic(real), ones) + loss_of(critic(made.detach()), 0 * ones)).backward()
        for_critic.step()
        for_generator.zero_grad()
        loss_of(critic(made), ones).backward()
        for_generator.step()
"""
COMMANDS = {
    "mlp": MLP + PLAIN,
    "mlp_scaler": MLP + SCALER,
    "convnet_workers": CONVNET + PLAIN,
    "language": LANGUAGE,
    "autoencoder": AUTOENCODER,
    "gan": GAN,
}


def write_script(name: str, folder: Path, start_seconds: int) -> list[str]:
    """Write the script of a command into a folder, and return the command."""
    (folder / "train.py").write_text(HEADER.replace("START_SECONDS", str(start_seconds)) + COMMANDS[name])
    return [sys.executable, str(folder / "train.py")]


def measure(name: str, folder: Path) -> None:
    """Measure three settings of a command loaded together and alone, in turn, and append a line for each run."""
    together.num_fitting = lambda _: WAYS["together"]
    payload = Payload(target="autotune_amp.workloads:workload", path=tuple(sys.path))
    with LocalBackend(payload, "kept", Watcher()) as local:
        template = CommandTemplate.of(write_script(name, folder, SHORT_START_SECONDS))
        backend = CommandBackend(Command(template), local, Watcher())
        described = backend.submit(
            Describe(device="cpu", baseline_batch_size=8, deadline_seconds=DEADLINE_SECONDS, is_batch_free=True)
        ).result()
        assert isinstance(described, Description), described
        sizes = described.batch_size, described.batch_size // 2
        settings = [Setting(precision="fp32", batch_size=size) for size in sizes]
        settings.append(Setting(precision="bf16", batch_size=sizes[0]))
        for number in range(NUM_ROUNDS):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                trials = [
                    Trial(
                        candidate=each,
                        device="cpu",
                        purpose="confirm",
                        round=number,
                        measure_seconds=2.0,
                        num_steps=(20, 200),
                        deadline_seconds=DEADLINE_SECONDS,
                    )
                    for each in settings
                ]
                began = time.monotonic()
                if way == "together":
                    backend.load_together(trials)
                for trial in trials:
                    found = backend.submit(trial).result()
                    assert isinstance(found, Measurement), found
                    line = {
                        "command": name,
                        "way": way,
                        "round": number,
                        "setting": f"{trial.candidate.precision} {trial.candidate.batch_size}",
                        "samples_per_second": found.samples_per_second,
                        "first_losses": found.first_losses,
                        "peak_memory_bytes": found.peak_memory_bytes,
                        "seconds": time.monotonic() - began,
                    }
                    append(RUNS, line)
                    began = time.monotonic()


def search(way: str, folder: Path) -> None:
    """Search the command that takes a minute to start, and append a line."""
    together.num_fitting = lambda _: WAYS[way]
    command = write_script(SEARCHED, folder, LONG_START_SECONDS)
    line: dict[str, Any] = {"command": SEARCHED, "way": way, "start_seconds": LONG_START_SECONDS}
    try:
        found = recommend_config(
            CommandTemplate.of(command), effective_batch_size="free", study="study", out=str(folder)
        )
    except AutotuneAmpError as error:
        append(SEARCHES, {**line, "error": str(error)})
        return
    outcomes = (folder / "study" / "outcomes.jsonl").read_text().splitlines()
    append(
        SEARCHES,
        {
            **line,
            "answer": f"{found.config.precision} {found.config.batch_size}",
            "is_confirmed": found.evidence.is_confirmed,
            "speedup": found.evidence.speedup,
            "seconds": found.search.seconds,
            "num_trials": found.search.num_trials,
            "num_records": len(outcomes),
        },
    )


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file."""
    with path.open("a") as raw:
        raw.write(json.dumps(line) + "\n")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(found: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table: each setting of each command, measured both ways."""
    lines = []
    for name, setting in dict.fromkeys((each["command"], each["setting"]) for each in found):
        ways = [
            [each for each in found if (each["command"], each["setting"], each["way"]) == (name, setting, way)]
            for way in WAYS
        ]
        speeds = [[each["samples_per_second"] for each in way] for way in ways]
        (low, high), (other_low, other_high) = intervals = list(map(prediction_interval, speeds))
        cells = [
            f"{fmean(each):,.0f} ({min_:,.0f} to {max_:,.0f})"
            for each, (min_, max_) in zip(speeds, intervals, strict=True)
        ]
        overlap = "yes" if low <= other_high and other_low <= high else "no"
        losses = {tuple(each["first_losses"]) for way in ways for each in way}
        lines.append(
            f"| {name} | {setting} | {' | '.join(cells)} | {overlap} | {'yes' if len(losses) == 1 else 'no'} |"
        )
    return lines


def summary(found: list[dict[str, Any]], searches: list[dict[str, Any]]) -> list[str]:
    """Return lines on the seconds of three settings both ways, and on the searches."""
    seconds = {
        way: sum(each["seconds"] for each in found if each["way"] == way) / max(1, len(rows(found)) * NUM_ROUNDS)
        for way in WAYS
    }
    lines = [
        f"- Seconds of a run, its share of loading included: {seconds['together']:.1f} together, "
        f"{seconds['alone']:.1f} alone."
    ]
    for each in searches:
        what = each.get("error") or (
            f"{each['answer']}, {each['speedup'] or 1.0:.2f} times as fast, "
            f"{'confirmed' if each['is_confirmed'] else 'not confirmed'}, {each['num_trials']} trials, "
            f"{each['seconds']:.0f} s"
        )
        lines.append(f"- Search of {each['command']}, {each['start_seconds']} s to start, {each['way']}: {what}.")
    return lines


def write_tables() -> None:
    """Write the tables of all raw outcomes into README.md."""
    found = lines_of(RUNS)
    lines = rows(found)
    num_overlapping = sum(line.split("|")[5].strip() == "yes" for line in lines)
    head = [
        *summary(found, lines_of(SEARCHES)),
        f"- The intervals overlap for {num_overlapping} of {len(lines)} settings.",
        "",
        HEAD,
    ]
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    text = "\n".join([*head, "|" + "---|" * (HEAD.count("|") - 1), *lines])
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main(names: list[str]) -> None:
    """Measure or search, and write the tables."""
    if names == ["--search"]:
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                search(way, Path(folder))
    elif names != ["--table"]:
        for name in names or COMMANDS:
            with tempfile.TemporaryDirectory() as folder:
                measure(name, Path(folder))
    write_tables()


if __name__ == "__main__":
    main(sys.argv[1:])
