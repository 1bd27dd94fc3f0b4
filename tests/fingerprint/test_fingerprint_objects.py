"""What counts of an object."""

import _thread
import copy
import functools
import importlib
import importlib.util
import linecache
import logging
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from autotune_amp import fingerprint
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.fingerprint import compute_fingerprint, workload_parts
from autotune_amp.hardware import host


def parts_of(value: object) -> dict[str, str]:
    parts, unknown, _ = workload_parts(SimpleNamespace(data=value))
    assert unknown == ()
    return parts


# --- plain data

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
DATA = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner), max_leaves=20
)


@given(DATA, LEAVES, LEAVES)
def test_copies_are_equal_and_one_other_leaf_is_not(value: Any, one: object, other: object) -> None:
    assert parts_of([copy.deepcopy(value), one]) == parts_of([value, one])
    assert (parts_of([value, one]) == parts_of([value, other])) == (repr(one) == repr(other))


def test_equal_dictionaries_and_sets_are_equal_in_any_order() -> None:
    assert parts_of({"a": 1, "b": 2}) == parts_of({"b": 2, "a": 1})
    one, other = {0, 8}, {8, 0}  # they collide: the first in stays first
    assert list(one) != list(other)
    assert parts_of(one) == parts_of(other)
    assert parts_of([1, 2]) != parts_of([2, 1])
    cycle: list[Any] = [1]
    cycle.append(cycle)
    assert parts_of(cycle) != parts_of([1, [2]])


# --- live objects

MODEL: Callable[[], torch.nn.Module] = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())  # noqa: E731


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def hooked() -> torch.nn.Module:
    model = MODEL()
    model.register_forward_hook(lambda *_: None)
    return model


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(8, 2)), **settings)


def stepped() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    optimizer.step()
    return optimizer


def iterated() -> DataLoader[Any]:
    found = loader(batch_size=2)
    list(found)
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.randn(3, 2), torch.randn(3, 2)),
        (numpy.zeros(3), numpy.ones(3)),
        (numpy.random.default_rng(1), numpy.random.default_rng(2)),
        (stepped(), torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)),
        (iterated(), loader(batch_size=2)),
        (logging.getLogger("a"), logging.getLogger("a")),
    ],
)
def test_values_and_state_do_not_count(one: object, other: object) -> None:
    assert parts_of(one) == parts_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3, 2), torch.zeros(2, 3)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.zeros(3), torch.zeros(3, requires_grad=True)),
        (torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (MODEL(), MODEL().eval()),
        (MODEL(), MODEL().requires_grad_(False)),
        (MODEL(), hooked()),
        (MODEL(), torch.compile(MODEL(), backend="eager")),
        (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)),
        (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), tied()),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), torch.optim.SGD([torch.zeros(1)], lr=0.2)),
        (loader(batch_size=2), loader(batch_size=4)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (defaultdict(int), defaultdict(float)),
        ([].append, [1].append),
        (torch.nn.functional.relu, torch.nn.functional.gelu),
    ],
)
def test_what_a_run_would_feel_counts(one: object, other: object) -> None:
    assert parts_of(one) == parts_of(one)
    assert parts_of(one) != parts_of(other)


# --- functions and classes


class Uncomparable(type):
    def __eq__(cls, _: object) -> bool:
        raise AssertionError("the class was compared")

    def __hash__(cls) -> int:
        raise AssertionError("the class was hashed")


class Raising:
    def __reduce__(self) -> Any:
        raise ValueError("not for pickle")


def fails() -> Any:
    raise AssertionError("the function was called")


def test_no_function_is_called_and_an_object_that_raises_is_unknown() -> None:
    assert workload_parts(fails)[1] == ()
    for value in (Raising(), Uncomparable("Odd", (), {"__module__": __name__})()):
        (line,) = workload_parts(SimpleNamespace(data=value))[1]
        assert line.startswith("workload.data cannot be known: ")


class Unstepped(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_the_first_optimizer_made_does_not_change_its_class() -> None:
    before = parts_of(Unstepped)
    Unstepped([torch.zeros(1)])
    assert parts_of(Unstepped) == before


@torch.no_grad()
def decorated(x: Any) -> Any:
    return x + 1


@torch.no_grad()
def otherwise(x: Any) -> Any:
    return x + 2


def test_a_function_behind_a_librarys_decorator_counts() -> None:
    names = set(parts_of([decorated, compute_fingerprint]))
    assert not any("autotune_amp" in name for name in names if name.startswith("source file"))
    assert "source file test_fingerprint_objects.py" in names
    assert parts_of(decorated) != parts_of(otherwise)


# --- what cannot be known


def test_what_has_no_content_is_unknown_by_its_path(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, socket.socket() as connection:
        for value, kind in (
            (_thread.allocate_lock(), "lock"),
            (file, "TextIOWrapper"),
            (connection, "socket"),
            ((x for x in [1]), "generator"),
        ):
            (line,) = workload_parts(SimpleNamespace(data={"inner": [value]}))[1]
            assert line.startswith("workload.data cannot be known: ")
            assert kind in line


# --- the whole fingerprint

IDENTITY = DeviceIdentity(type="cuda", name="H100", driver="560.1", num_cpus=4, total_memory_bytes=1)


def whole(identity: DeviceIdentity = IDENTITY, **options: object) -> Fingerprint:
    return compute_fingerprint(SimpleNamespace(model=MODEL), options, identity, {"deterministic": False})


def test_a_setting_is_shown_with_both_values() -> None:
    driver = DeviceIdentity(type="cuda", name="H100", driver="570.2", num_cpus=4, total_memory_bytes=1)
    assert whole().differences(whole()) == ()
    assert whole().differences(whole(driver)) == ("device driver changed from 560.1 to 570.2",)
    assert whole(seed=0).differences(whole(seed=1)) == ("option seed changed from 0 to 1",)
    assert whole().differences(whole(seed=1)) == ("option seed is new",)
    assert whole(seed=1).differences(whole()) == ("option seed is gone",)
    assert whole().digest != whole(driver).digest


def test_a_storage_url_is_not_shown() -> None:
    one, other = whole(storage="mysql://user:secret@host/a"), whole(storage="mysql://user:secret@host/b")
    assert one.differences(other) == ("option storage changed",)
    assert not any("secret" in part for part in one.parts.values())


COUNT = (
    "LD_PRELOAD",
    "ATEN_CPU_CAPABILITY",
    "NCCL_ALGO",
    "GLIBC_TUNABLES",
    "OMP_NUM_THREADS",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "NVIDIA_TF32_OVERRIDE",
)
DO_NOT_COUNT = ("CUDA_MODULE_LOADING", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_RUN_ID", "HOME")


def test_the_version_of_a_loaded_library_is_plain_text() -> None:
    assert {type(version) for version in fingerprint.versions().values()} == {str}, "torch's own is a subclass"


def test_a_device_without_a_name_is_known_by_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = DeviceIdentity(type="xpu", name="unknown", num_cpus=2, total_memory_bytes=0)
    here = whole(unseen)
    monkeypatch.setattr(host, "cpu_name", lambda: "elsewhere")
    assert [line.partition(" changed")[0] for line in here.differences(whole(unseen))] == ["host of the device"]
    assert "host of the device" not in whole().parts


def test_the_environment_counts_where_it_decides_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COUNT, *DO_NOT_COUNT):
        monkeypatch.delenv(name, raising=False)
    unset = whole()
    for name in (*COUNT, *DO_NOT_COUNT):
        monkeypatch.setenv(name, "secret")
    one = whole()
    for name in (*COUNT, *DO_NOT_COUNT):
        monkeypatch.setenv(name, "other")
    assert set(unset.differences(one)) == {f"environment variable {name} is new" for name in COUNT}
    assert set(one.differences(whole())) == {f"environment variable {name} changed" for name in COUNT}
    assert not any("secret" in part for part in one.parts.values())


# --- files


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MAX_READ_BYTES", 3)
    path = tmp_path / "train.bin"
    path.write_bytes(b"12345")
    os.utime(path, ns=(0, 1))
    before = fingerprint.file_digest(path)
    os.utime(path, ns=(0, 2))
    assert fingerprint.file_digest(path) != before


def test_what_a_notebooks_function_imports_is_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lately.py").write_text("from beside import x")
    (tmp_path / "beside.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    cell, file = "def late():\n    import lately\n", "<ipython-input-1>"
    monkeypatch.setitem(linecache.cache, file, (len(cell), None, cell.splitlines(keepends=True), file))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(cell, file, "exec"), namespace)
    before = parts_of(namespace["late"])
    assert {"source file lately.py", "source file beside.py"} <= before.keys()
    (tmp_path / "beside.py").write_text("x = 2")
    now = parts_of(namespace["late"])
    assert {name for name in now if now[name] != before[name]} == {"source file beside.py"}


def test_a_library_without_a_version_counts_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "unversioned.py").write_text("def work(): pass")
    monkeypatch.syspath_prepend(folder)
    work = importlib.import_module("unversioned").work
    before = parts_of(work)
    (folder / "unversioned.py").write_text("def work(): return 1")
    now = parts_of(work)
    assert {name for name in now if now[name] != before[name]} == {"version of unversioned"}
    del sys.modules["unversioned"]


class Words(set[str]):
    """A vocabulary."""


def test_a_long_chain_of_calls_counts_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = "".join(f"def f{number}(x):\n    return f{number + 1}(x)\n" for number in range(600))
    path = tmp_path / "a_long_chain.py"
    path.write_text(f"{calls}def f600(x):\n    return x\n")
    spec = importlib.util.spec_from_file_location("a_long_chain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_long_chain", module)
    spec.loader.exec_module(module)
    before = parts_of(module.f0)
    module.f600.__code__ = (lambda x: x + 1).__code__
    assert parts_of(module.f0) != before


def test_words_of_a_subclass_of_set_have_no_order() -> None:
    words = [f"word{number}" for number in range(50)]
    assert parts_of(Words(words)) == parts_of(Words(reversed(words)))
    assert parts_of(Words(words)) != parts_of(Words(words[1:]))


def test_the_objects_in_an_array_count() -> None:
    short, long = numpy.empty(2, object), numpy.empty(2, object)
    short[:], long[:] = [[1], [2, 3]], [[1], [2, 3, 4]]
    assert parts_of(short) != parts_of(long)


def test_attributes_with_names_of_torch_count_as_others_do() -> None:
    class Prefetcher:
        def __init__(self, buffers: Any, hook: str) -> None:
            self._buffers, self.grad_hooks = buffers, {hook: 1}

    assert workload_parts(SimpleNamespace(data=Prefetcher([None, None], "encoder")))[1] == ()
    assert parts_of(Prefetcher([1], "encoder")) != parts_of(Prefetcher([1], "decoder"))
    assert parts_of(Prefetcher([1], "encoder")) != parts_of(Prefetcher([2], "encoder"))
