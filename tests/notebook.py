"""A notebook, executed in a kernel of its own: classes in `__main__`, a search that is interrupted and goes on.

As a script, `notebook.py FILE`: runs the notebook FILE in place. The cell tagged INTERRUPTED gets what Jupyter's stop
button sends once a trial of it was measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from conftest import CommandLine
from nbclient import NotebookClient

INTERRUPTED, DRAWN = "interrupted", "drawn.json"

DEFINED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import autotune_amp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, inputs):
        return self.layers(inputs)

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

loader = DataLoader(TensorDataset(torch.randn(512, 64), torch.randint(10, (512,))), batch_size=32)
workload = autotune_amp.Workload(Net, loss, loader, torch.optim.AdamW)
"""
TRAINED = """
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
controller = autotune_amp.PrecisionController(recommendation.config, device)
for inputs, targets in loader:
    batch = inputs.to(device), targets.to(device)
    controller.train_step(lambda: loss(model, batch), optimizer)
controller.status()
"""
SEARCHED = """
recommendation = autotune_amp.recommend_config(workload, device=device, batch_size=(32, 32), budget=40, try_="none")
recommendation
"""
SHOWN = {
    "Recommendation": SEARCHED,
    "Hardware": "autotune_amp.probe(device)",
    "AmpProfile": "autotune_amp.profile_amp(workload, 3, device=device)",
    "Fidelity": 'autotune_amp.check_fidelity(workload, "fp16", device=device)',
    "Status": TRAINED,
}


@dataclass
class Ran:
    """What came of the cells: the HTML of each of `SHOWN`; what was drawn over time, and what is left of it; what the
    interrupted one and the one after it told, and what the former raised."""

    html: dict[str, str]
    drawn: list[str]
    left: str
    text: str
    text_after: str
    error: str
    best_so_far: str


def run_notebook(cli: CommandLine, device: str) -> Ran:
    """Execute the notebook on the device, in the environment of `cli`."""
    code = nbformat.v4.new_code_cell
    tags = {"tags": ["raises-exception", INTERRUPTED]}
    used = "torch.ones(3, device=device).sum().item()"  # the notebook's own process holds the device
    cells = [
        code(f"{DEFINED}\ndevice = {device!r}\n{used}"),
        code(SEARCHED, metadata=tags),
        code('autotune_amp.Recommendation.load("studies/workload/recommendation.json").explain()'),
        *map(code, SHOWN.values()),
    ]
    path = cli.folder / "tried.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    cli.environment |= {f"{name}_DIR": str(cli.temporary / name) for name in ("IPYTHON", "JUPYTER_RUNTIME")}
    done = cli.python(__file__, str(path))
    assert done.code == 0, done.err
    _, stopped, best, *shown = (cell["outputs"] for cell in nbformat.read(path, as_version=4)["cells"])
    (error,) = (output["ename"] for output in stopped if _is(output, "error"))
    return Ran(
        html={name: _result(outputs)["text/html"] for name, outputs in zip(SHOWN, shown, strict=True)},
        drawn=json.loads((cli.folder / DRAWN).read_text()),
        left="".join(output["data"]["text/html"] for output in stopped if _is(output, "display_data")),
        text=_told(stopped),
        text_after=_told(shown[0]),
        error=error,
        best_so_far=_result(best)["text/plain"],
    )


def _result(outputs: list[dict[str, Any]]) -> dict[str, str]:
    """What the last expression of a cell shows, by MIME type."""
    (found,) = (output["data"] for output in outputs if _is(output, "execute_result"))
    return dict(found)


def _told(outputs: list[dict[str, Any]]) -> str:
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def _is(output: dict[str, Any], kind: str) -> bool:
    return bool(output["output_type"] == kind)


class Stopping(NotebookClient):  # type: ignore[misc] # its types are not strict
    """Interrupts its kernel, as Jupyter does, where a trial of the cell tagged so was measured."""

    is_stopped = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.drawn: list[str] = []

    def process_message(self, msg: dict[str, Any], cell: dict[str, Any], cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.drawn.append(msg["content"]["data"].get("text/html", ""))
        is_measured = "samples/s" in msg["content"].get("text", "")
        if is_measured and INTERRUPTED in cell["metadata"].get("tags", ()) and not self.is_stopped:
            self.is_stopped = True
            self._stopping = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    notebook = nbformat.read(path, as_version=4)
    client = Stopping(notebook, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    nbformat.write(notebook, path)
    path.with_name(DRAWN).write_text(json.dumps(client.drawn))
