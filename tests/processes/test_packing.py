"""What of a live workload arrives in another process: a compiled model compiled, a wrapped one bare, or an error."""

from __future__ import annotations

import linecache
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.fingerprint import workload_parts
from autotune_amp.processes import server
from autotune_amp.processes.packing import _reduce_for_worker, pack, unpack


class Net(nn.Module):
    """Of our own: torch compiles its own modules as parts of others alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.linear(inputs)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # its stubs do not export it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def workload_of(model: Any, optimizer: Any = torch.optim.SGD) -> Workload:
    return Workload(model, lambda model, batch: model(batch).sum(), lambda size: torch.randn(size, 4), optimizer)


def arrived(model: Any, optimizer: Any = torch.optim.SGD) -> Any:
    return unpack(pack(workload_of(model, optimizer)))


def test_the_part_that_cannot_travel_is_named() -> None:
    data: Any = [threading.Lock()]
    with pytest.raises(WorkloadError, match=r"^workload\.data .*lock"):
        pack(Workload(Net(), lambda model, batch: model(batch).sum(), data))


def test_functions_are_called_with_the_flags_of_torch_that_they_were_sent_from() -> None:
    first = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    packed = pack(lambda: workload_of(Net()))
    torch.set_float32_matmul_precision(first)
    unpack(packed)
    assert (first, torch.get_float32_matmul_precision()) == ("highest", "high")


def wrapped(model: nn.Module) -> Any:
    return nn.parallel.DistributedDataParallel(model)


@pytest.mark.usefixtures("group")
def test_a_model_arrives_without_the_ddp_around_it_and_the_optimizer_is_its_own() -> None:
    model = wrapped(nn.Linear(4, 1))
    groups: list[dict[str, Any]] = [{"params": [model.module.weight], "lr": 0.1}, {"params": [model.module.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.2)
    found = arrived(model, optimizer)
    assert type(found.model) is nn.Linear
    assert [group["params"] for group in found.optimizer.param_groups] == [[found.model.weight], [found.model.bias]]
    assert torch.equal(found.model.weight, model.module.weight)
    of_bare, of_wrapped = (workload_parts(SimpleNamespace(model=each)) for each in (model.module, model))
    assert of_bare == of_wrapped, "the fingerprint is that of the bare model too"


@pytest.mark.usefixtures("group")
def test_what_is_compiled_around_ddp_stays_so_and_what_is_in_place_is_refused() -> None:
    found = arrived(torch.compile(wrapped(Net()), backend="eager")).model
    assert isinstance(found, torch._dynamo.OptimizedModule)
    assert type(found._orig_mod) is Net
    inside, in_place, not_at_all = Net(), wrapped(Net()), Net()
    not_at_all.compile(disable=True)
    assert type(arrived(not_at_all).model) is Net
    inside.compile(backend="eager")
    in_place.compile(backend="eager")
    for model in (inside, wrapped(inside), in_place):
        with pytest.raises(WorkloadError, match=r"(?s)^workload\.model .*compiled in place.*Call compile\(\) inside"):
            pack(workload_of(model))


def sharded(model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("group")
def test_what_needs_the_process_group_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), sharded(nn.Linear(4, 1)))
    with pytest.raises(
        WorkloadError, match=r"^workload\.model.* process group .*\n.*Pass the model without its wrapper"
    ):
        pack(workload_of(model))


@pytest.mark.parametrize(
    "file", ["/home/user/script.py", "<ipython-input-3-0a1b2c>", "/tmp/ipykernel_7/123.py", "<string>"]
)
def test_code_of_a_script_a_notebook_or_a_string_keeps_its_file_and_a_cells_text(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def loss(model, batch):\n    return [part for part in batch][0] * 0\n"
    is_cell = "ipy" in file  # IPython keeps the text of each of its cells
    cached = {file: (len(text), None, text.splitlines(keepends=True), file)} if is_cell else {}
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), names)
    monkeypatch.setattr(linecache, "cache", cached)
    packed = pack(Workload(lambda: nn.Linear(1, 1), names["loss"], lambda size: None))
    monkeypatch.setattr(linecache, "cache", {})  # as another process has it
    arrived: Any = unpack(packed)
    code = arrived.loss.__code__
    assert {code.co_filename, *(one.co_filename for one in code.co_consts if hasattr(one, "co_code"))} == {file}
    assert linecache.getline(file, 2) == (text.splitlines(keepends=True)[1] if is_cell else "")
    assert packed.count(b"[part for part in batch]") == is_cell


def test_an_optimizer_arrives_without_its_state_and_without_accelerates_wrapper() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    try:
        prepared = Accelerator(cpu=True).prepare_optimizer(optimizer)
        for given in (optimizer, prepared, [prepared]):
            found = arrived(model, given).optimizer
            (inner,) = found if isinstance(found, list) else [found]
            assert type(inner) is torch.optim.AdamW
            assert inner.param_groups[0].keys() == optimizer.param_groups[0].keys()
            assert not inner.state
        assert optimizer.state
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_an_optimizer_that_the_loss_steps_itself_arrives_with_its_state() -> None:
    model, other = Net(), Net()
    own, inner = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())

    def loss(model: Any, batch: Any) -> Any:
        other(batch).sum().backward()
        inner.step()
        inner.zero_grad()
        return model(batch).sum()

    for _ in range(2):
        loss(model, torch.ones(4)).backward()
    own.step()
    there: Any = unpack(pack(Workload(model, loss, lambda size: torch.randn(size, 4), own)))
    there.loss(there.model, torch.ones(4)).backward()
    assert not there.optimizer.state
    there.optimizer.step()
    (found,) = (cell.cell_contents for cell in there.loss.__closure__ if isinstance(cell.cell_contents, type(inner)))
    assert {int(state["step"]) for state in found.state.values()} == {3}


def test_classes_and_functions_of_main_reach_spawned_workers_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkingPickler, "reducer_override", _reduce_for_worker, raising=False)
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return Row(index)\n"
        "class Row:\n"
        "    def __init__(self, index): self.index = index\n"
        "def collated(rows): return rows[0]\n",
        names,
    )
    loader: Any = torch.utils.data.DataLoader(names["Rows"](), collate_fn=names["collated"])
    there: Any = unpack(pack(Workload(Net(), lambda model, batch: model(batch).sum(), loader)))
    found = there.data
    sent = bytes(ForkingPickler.dumps((found.dataset, found.collate_fn)))
    source = (
        "import pickle, sys; from multiprocessing.reduction import ForkingPickler;"
        "dataset, collated = pickle.loads(sys.stdin.buffer.read());"
        "sys.stdout.buffer.write(ForkingPickler.dumps(collated([dataset[3]])))"
    )
    done = subprocess.run([sys.executable, "-c", source], input=sent, capture_output=True, check=True)
    row = pickle.loads(done.stdout)
    assert (row.index, type(row)) == (3, type(found.dataset[0]))


def test_another_default_device_is_refused_for_what_lives_here_since_a_trial_would_not_have_it() -> None:
    with torch.device("meta"):
        with pytest.raises(WorkloadError, match=r"^workload\.model .*default device is meta") as caught:
            pack(workload_of(Net()))
        of_functions = pack(workload_of(Net))
    assert "torch.set_default_device" in caught.value.next_step
    found: Any = unpack(of_functions)
    assert found.model is Net


def test_to_unpack_changes_nothing_of_how_this_process_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ForkingPickler, "reducer_override", raising=False)
    arrived(Net())
    assert "reducer_override" not in vars(ForkingPickler)


def test_a_batchs_class_of_main_is_defined_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("class Row:\n    pass\n", names)
    definitions: list[Any] = []
    dumps = cloudpickle.dumps

    def counted(obj: Any) -> Any:
        definitions.append(obj)
        return dumps(obj)

    monkeypatch.setattr(cloudpickle, "dumps", counted)
    monkeypatch.setattr(ForkingPickler, "reducer_override", _reduce_for_worker, raising=False)
    batches = [ForkingPickler.dumps(names["Row"]()) for _ in range(3)]
    assert {type(pickle.loads(batch)) for batch in batches} == {names["Row"]}
    assert definitions == [names["Row"]]


def test_a_job_defines_a_function_of_main_with_the_global_variables_of_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def scaled(row): return SCALE * row\n", names)
    sent: list[bytes] = []
    job = Mock(run=lambda *_: sent.append(bytes(ForkingPickler.dumps(names["scaled"]))))
    monkeypatch.setattr(ForkingPickler, "reducer_override", _reduce_for_worker, raising=False)
    monkeypatch.setattr(multiprocessing, "set_start_method", Mock())
    monkeypatch.setattr(server, "find_job", lambda *_: job)
    running = server.Server(Mock(), is_template=False)
    running._context = Mock()
    for scale in (1, 2):
        names["SCALE"] = scale
        running.run("trial", {}, ())
    assert [pickle.loads(definition)(1) for definition in sent] == [1, 2]
