"""Compares searches of a command that goes over from setting to setting in one start with searches that start it for
each trial.

`python switching.py [NAME...]` searches each command of `COMMANDS` both ways, appends a line for each search to
results/switching.jsonl, and writes the table of all lines into README.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune_amp.core.intervals import prediction_interval

HERE = Path(__file__).resolve().parent
RAW = HERE / "results" / "switching.jsonl"
BEGIN, END = "<!-- results: switching.py -->", "<!-- end of results of switching.py -->"
WAYS = ("switched", "started")
HEAD = "| command | setting | switched, samples/s (95 %) | own start, samples/s (95 %) | overlap | peaks |"
BUDGET_SECONDS, START_SECONDS = 300, 5

HEADER = f"""
import math, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
time.sleep({START_SECONDS})  # stands for the start of a large training
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


def search(name: str, way: str) -> dict[str, Any]:
    """Search a command in a process of its own, and return the records of its trials, its starts and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(HEADER + COMMANDS[name])
        arguments = [sys.executable, str(Path(__file__).resolve()), "--search", way, folder]
        subprocess.run(arguments, check=True, cwd=folder)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return {"command": name, "way": way, **found}


def search_here(way: str, folder: Path) -> None:
    """Search train.py in a folder, with a start for each trial if `way` is "started", and write what was found."""
    from autotune_amp import CommandTemplate, recommend_config
    from autotune_amp.command import command
    from autotune_amp.command.running import RunningCommand

    num_starts = 0
    start = RunningCommand.start

    class Counted(RunningCommand):
        @classmethod
        def start(cls, *arguments: Any, **how: Any) -> RunningCommand:
            nonlocal num_starts
            num_starts += 1
            return start(*arguments, **how)

    command.RunningCommand = Counted  # type: ignore[misc]
    if way == "started":
        command.Command.switch = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    recommended = recommend_config(
        CommandTemplate.of([sys.executable, str(folder / "train.py")]),
        budget=BUDGET_SECONDS,
        effective_batch_size="free",
        study="study",
        out=str(folder),
    )
    config = recommended.config
    records = [json.loads(line) for line in (folder / "study" / "outcomes.jsonl").read_text().splitlines()]
    found = {
        "answer": f"{config.precision} {config.batch_size}",
        "num_starts": num_starts,
        "seconds": recommended.search.seconds,
        "records": [each for each in records if each["purpose"] == "search"],
    }
    (folder / "found.json").write_text(json.dumps(found))


def rows(found: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table: the settings of each command that both ways measured."""
    lines = []
    for name in COMMANDS:
        by_way = {way: _measured(found, name, way) for way in WAYS}
        for setting in sorted(by_way["switched"].keys() & by_way["started"].keys()):
            ways = [by_way[way][setting] for way in WAYS]
            speeds = [[each["samples_per_second"] for each in way] for way in ways]
            (low, high), (other_low, other_high) = map(prediction_interval, speeds)
            cells = [
                f"{fmean(each):.0f} ({min_:.0f} to {max_:.0f})"
                for each, (min_, max_) in zip(speeds, ((low, high), (other_low, other_high)), strict=True)
            ]
            overlap = "yes" if low <= other_high and other_low <= high else "no"
            peaks = " and ".join(f"{fmean(each['peak_memory_bytes'] for each in way) / 2**20:.0f} MiB" for way in ways)
            lines.append(f"| {name} | {setting} | {' | '.join(cells)} | {overlap} | {peaks} |")
    return lines


def _measured(found: list[dict[str, Any]], name: str, way: str) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements of a command's settings: after a switch, or in a start of their own."""
    measured: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        for record in each["records"] if (each["command"], each["way"]) == (name, way) else ():
            outcome, setting = record["outcome"], record["candidate"]
            if outcome.get("is_build_shared", False) == (way == "switched") and "samples_per_second" in outcome:
                measured.setdefault(f"{setting['precision']} {setting['batch_size']}", []).append(outcome)
    return measured


def summary(found: list[dict[str, Any]]) -> list[str]:
    """Return a line for each command: starts, seconds and answer of its searches both ways."""
    lines = []
    for name in COMMANDS:
        parts = []
        for way in WAYS:
            of_way = [each for each in found if (each["command"], each["way"]) == (name, way)]
            for each in of_way:
                parts.append(f"{way} {each['num_starts']} starts, {each['seconds']:.0f} s, {each['answer']}")
        if parts:
            lines.append(f"- {name}: {'; '.join(parts)}.")
    return lines


def write_table() -> None:
    """Write the table of all raw outcomes into README.md."""
    found = [json.loads(line) for line in RAW.read_text().splitlines()]
    lines = rows(found)
    num_overlapping = sum("| yes |" in line for line in lines)
    head = [*summary(found), "", f"The intervals overlap for {num_overlapping} of {len(lines)} settings.", "", HEAD]
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    text = "\n".join([*head, "|" + "---|" * (HEAD.count("|") - 1), *lines])
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main(names: list[str]) -> None:
    """Search the commands both ways in turn, and write the table."""
    for name in names or COMMANDS:
        for way in WAYS:
            with RAW.open("a") as raw:
                raw.write(json.dumps(search(name, way)) + "\n")
    write_table()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--search"]:
        search_here(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:])
