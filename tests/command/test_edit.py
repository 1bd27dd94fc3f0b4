"""What is edited in a script's text, and what is left to do by hand."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from autotune_amp.command.editing.edit import CommandFacts, Edit, ManualChange, RunSetting, edit
from autotune_amp.command.messages import Site
from autotune_amp.core.config import AmpConfig, LossScale

PATH = "/home/me/train.py"
TODAY = RunSetting(precision="fp32", batch_size=32, accumulation_steps=1, num_workers=0)
LOADER = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")
REGION = ("device_type", "dtype", "enabled", "cache_enabled")


def site(kind: str, text: str, call: str, name: str = "", knows_end: bool = True, **changes: Any) -> Site:
    """The `call` that is somewhere in `text`."""
    start = text.index(call)
    end = start + len(call)
    line, column = text.count("\n", 0, end) + 1, len(text[text.rfind("\n", 0, end) + 1 : end].encode())
    values: dict[str, Any] = {
        "pid": 1,
        "time": 0.0,
        "kind": kind,
        "name": name or call.partition("(")[0].rpartition(".")[2],
        "line": f"{PATH}:{text.count(chr(10), 0, start) + 1}",
        "end": (line, column) if knows_end else None,
        "maker": "",
        "parameters": {"loader": LOADER, "autocast": REGION}.get(kind, ()),
        "values": {"batch_size": 32, "num_workers": 0} if kind == "loader" else {},
    }
    return Site(**(values | changes))


def edited(
    text: str,
    *sites: Site,
    today: RunSetting = TODAY,
    command: tuple[str, ...] = ("python", "train.py"),
    device: str = "cpu",
    **config: Any,
) -> Edit:
    wanted: dict[str, Any] = {"precision": "fp32", "batch_size": today.batch_size} | config
    seen = CommandFacts(
        today=today,
        device=device,
        sites=tuple(sites),
        step_line=f"{PATH}:1",
        arguments=command[command.index("train.py") + 1 :],
    )
    found = edit({PATH: text}, seen, AmpConfig(**wanted), command)
    for after in found.texts.values():
        ast.parse(after)
    return found


def only(found: Edit) -> str:
    assert not found.by_hand
    return found.texts[PATH]


# --- an argument of a call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(data, batch_size=32, shuffle=True)", "DataLoader(data, batch_size=64, shuffle=True)"),
        ("DataLoader(data, 32)", "DataLoader(data, 64)"),
        ("DataLoader(data, 4 * 8, True)", "DataLoader(data, 64, True)"),
        ("DataLoader(data)", "DataLoader(data, batch_size=64)"),
        ("DataLoader(data,)", "DataLoader(data, batch_size=64)"),
        ("DataLoader((data))", "DataLoader((data), batch_size=64)"),
        ("DataLoader(*some, batch_size=32)", "DataLoader(*some, batch_size=64)"),
        ("DataLoader(data, **{'batch_size': 32})", None),
        ("DataLoader(data, *some)", None),
        ("DataLoader(data, batch_size=chosen())", None),
        ("DataLoader(\n    data,  # all\n    shuffle=True,  # always\n)",
         "DataLoader(\n    data,  # all\n    shuffle=True,  # always\n    batch_size=64,\n)"),
        ("DataLoader(\n    data,\n    shuffle=True  # always\n)",
         "DataLoader(\n    data,\n    shuffle=True, batch_size=64  # always\n)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("knows_end", [True, False])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_an_argument(before: str, after: str | None, knows_end: bool, newline: str) -> None:
    text = f"# é\nloader = {before}\nä = 1\n".replace("\n", newline)
    found = edited(text, site("loader", text, before.replace("\n", newline), knows_end=knows_end), batch_size=64)
    if after is None:
        assert not found.texts
        assert [each.where for each in found.by_hand] == [f"{PATH}:2"]
        assert "batch_size=64" in found.by_hand[0].what
        assert found.expected == TODAY
    else:
        assert only(found) == f"# é\nloader = {after}\nä = 1\n".replace("\n", newline)
        assert found.expected.batch_size == 64


def test_of_two_calls_on_a_line_the_one_that_was_seen() -> None:
    text = "é, valid = DataLoader(a, batch_size=32), DataLoader(b, batch_size=32)\n"
    first = site("loader", text, "DataLoader(a, batch_size=32)")
    assert only(edited(text, first, batch_size=64)) == text.replace("a, batch_size=32", "a, batch_size=64")
    without = site("loader", text, "DataLoader(a, batch_size=32)", knows_end=False)
    assert edited(text, without, batch_size=64).by_hand


PARSER = "p.add_argument({})\nloader = DataLoader(data, batch_size=args.batch_size)\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("size = 32\nDataLoader(data, size)", "size = 64\nDataLoader(data, size)"),
        ("size: int = 32\nDataLoader(data, int(size))", "size: int = 64\nDataLoader(data, int(size))"),
        ("one = 32\nsize = one\nDataLoader(data, size)", "one = 64\nsize = one\nDataLoader(data, size)"),
        ("size = 32\nsize = 16\nDataLoader(data, size)", None),
        ("def f(size=32): DataLoader(data, size)", None),
        ("for size in (32,): DataLoader(data, size)", None),
        ("class C:\n    size: int = 32\nDataLoader(data, C().size)",
         "class C:\n    size: int = 64\nDataLoader(data, C().size)"),
        ("class C:\n    size = 32\nclass D:\n    size = 1\nDataLoader(data, c.size)", None),
        ("c = {'size': 32}\nDataLoader(data, c['size'])", "c = {'size': 64}\nDataLoader(data, c['size'])"),
        ("o = {'batch_size': a.size}\na.size = 32\nDataLoader(data, **o)",
         "o = {'batch_size': a.size}\na.size = 64\nDataLoader(data, **o)"),
        ("o = {'batch_size': 32}\nif x:\n    o = {}\nDataLoader(data, **o)", None),
        ("a.size = 32\nb.size = 16\nDataLoader(data, c.size)", None),
        ("c = {'size': 32}\nd = {'size': 1}\nDataLoader(data, c['size'])", None),
        ("p.add_argument('--size', default=32)\nDataLoader(data, a.size)",
         "p.add_argument('--size', default=64)\nDataLoader(data, a.size)"),
        ("p.add_argument('--size', type=int)\nDataLoader(data, a.size)",
         "p.add_argument('--size', type=int, default=64)\nDataLoader(data, a.size)"),
        ("p.add_argument('--n', dest='size', default=32)\nsize = a.size\nDataLoader(data, size)",
         "p.add_argument('--n', dest='size', default=64)\nsize = a.size\nDataLoader(data, size)"),
        ("p.add_argument('--size', default=f())\nDataLoader(data, a.size)", None),
    ],
)  # fmt: skip
def test_a_value_is_followed_to_where_it_is_written(before: str, after: str | None) -> None:
    call = before[before.rindex("DataLoader(") :]
    found = edited(before, site("loader", before, call), batch_size=64)
    assert found.texts.get(PATH) == after
    assert bool(found.by_hand) is (after is None)


@pytest.mark.parametrize(
    ("given", "henceforth"),
    [
        (("--batch-size", "32", "--lr", "1"), ("--batch-size", "64", "--lr", "1")),
        (("--lr", "1", "--batch-size=32"), ("--lr", "1", "--batch-size=64")),
        (("-b", "32"), ("-b", "64")),
    ],
)
def test_a_flag_that_is_given_is_changed_in_the_command(given: tuple[str, ...], henceforth: tuple[str, ...]) -> None:
    text = PARSER.format("'-b', '--batch-size', type=int, default=32")
    seen = site("loader", text, "DataLoader(data, batch_size=args.batch_size)")
    found = edited(text, seen, command=("torchrun", "train.py", *given), batch_size=64)
    assert (found.texts, found.by_hand) == ({}, ())
    assert found.command == ("torchrun", "train.py", *henceforth)
    assert found.expected.batch_size == 64


def test_a_flag_that_a_shell_script_gives_is_changed_there_by_hand() -> None:
    text = PARSER.format("'--batch-size', default=32")
    seen = CommandFacts(
        today=TODAY,
        device="cpu",
        sites=(site("loader", text, "DataLoader(data, batch_size=args.batch_size)"),),
        step_line=f"{PATH}:1",
        arguments=("--batch-size", "32"),
    )
    found = edit({PATH: text}, seen, AmpConfig(precision="fp32", batch_size=64), ("bash", "train.sh"))
    assert (found.texts, found.command, len(found.by_hand)) == ({}, ("bash", "train.sh"), 1)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_script_that_keeps_its_total_is_not_told_to_accumulate(keeps: bool) -> None:
    text = "DataLoader(data, batch_size=32)\n"
    seen = CommandFacts(
        today=TODAY,
        device="cpu",
        sites=(site("loader", text, "DataLoader(data, batch_size=32)"),),
        step_line=f"{PATH}:1",
        arguments=(),
        keeps_effective_batch_size=keeps,
    )
    config = AmpConfig(precision="fp32", batch_size=16, accumulation_steps=2)
    found = edit({PATH: text}, seen, config, ("python", "train.py"))
    assert any("backward passes" in each.what for each in found.by_hand) is not keeps


@pytest.mark.parametrize(
    ("text", "said", "written"),
    [
        (PARSER.format("'--batch-size'").replace("batch_size)", "batch_size // 2)"), ["DataLoader(batch_size=32)"], ""),
        ("p.add_argument('--size', default=32)\nDataLoader(data, args.size)\n", [], "default=64"),
    ],
)
def test_a_rank_is_told_its_share_of_a_batch_and_an_argument_is_the_total(
    text: str, said: list[str], written: str
) -> None:
    seen = site("loader", text, text[text.index("DataLoader") :].strip())
    facts = CommandFacts(today=TODAY, device="cpu", sites=(seen,), step_line="", arguments=(), num_sharing=2)
    found = edit({PATH: text}, facts, AmpConfig(precision="fp32", batch_size=64), ("torchrun", "train.py"))
    assert [each.what.partition(",")[0] for each in found.by_hand] == said
    assert written in found.texts.get(PATH, "")


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (("args.json",), "args.json"),
        (("fit", "--config", "c.yaml"), "c.yaml"),
        (("-c=c.yaml", "--data", "d.yaml"), "c.yaml"),
        (("--train_file", "train.json", "--model_name", "gpt2"), None),
    ],
)
def test_arguments_of_a_parser_are_in_its_settings_file_or_in_the_command(
    arguments: tuple[str, ...], file: str | None
) -> None:
    text = "args = parser.parse()\n"
    seen = site("training_arguments", text, "parser.parse()", maker="transformers.hf_argparser")
    found = edited(text, seen, command=("python", "train.py", *arguments), batch_size=64)
    assert [each.where for each in found.by_hand] == ([file] if file else [])
    added = () if file else ("--per_device_train_batch_size", "64")
    assert found.command == ("python", "train.py", *arguments, *added)


def test_what_no_call_sets_is_left_to_the_user() -> None:
    found = edited("", compile="default", pin_memory="on", allocator="expandable_segments", pinned_modules=["norm"])
    said = [each.what for each in found.by_hand]
    assert [word in " ".join(said) for word in ("compiled", "prepare", "pin_memory=True", "norm")] == [True] * 4
    assert len(said) == 3


def test_a_script_that_reads_its_arguments_itself() -> None:
    text = "size = 32\nexec(open('config.py').read())\nDataLoader(data, size)\n"
    found = edited(
        text, site("loader", text, "DataLoader(data, size)"), command=("python", "train.py", "--size=32"), batch_size=64
    )
    assert (found.texts, found.command) == ({}, ("python", "train.py", "--size=64"))


# --- batch size, accumulation, workers -------------------------------------------------------------------------------


def test_batch_size_and_accumulation_are_changed_together_or_by_hand() -> None:
    text = "loader = DataLoader(data, batch_size=32)\n"
    loader = site("loader", text, "DataLoader(data, batch_size=32)")
    found = edited(text, loader, batch_size=16, accumulation_steps=2, num_workers=4)
    assert only_lines(found) == {1}
    assert len(found.by_hand) == 2
    assert found.texts == {PATH: text.replace("=32", "=32, num_workers=4")}
    assert (found.expected.batch_size, found.expected.accumulation_steps, found.expected.num_workers) == (32, 1, 4)


def only_lines(found: Edit) -> set[int]:
    return {int(each.where.rpartition(":")[2]) for each in found.by_hand}


def test_what_is_so_already_is_left_alone() -> None:
    text = "loader = DataLoader(data, batch_size=32)\n"
    found = edited(text, site("loader", text, "DataLoader(data, batch_size=32)"))
    assert found == Edit(texts={}, command=("python", "train.py"), by_hand=(), expected=TODAY)


def test_without_a_loader() -> None:
    text = "x = batch()\nout = model(x)\n"
    forward = site("forward", text, "model(x)", "Net", values={"device": "cpu"})
    assert only_lines(edited(text, forward, batch_size=64)) == {2}
    assert not edited(text, forward, batch_size=16, accumulation_steps=2).by_hand, "32 samples are 32 samples"


@pytest.mark.parametrize("call", ["DataLoader(stream, batch_size=None)", "DataLoader(data, batch_sampler=mine)"])
def test_batches_that_the_loader_does_not_make(call: str) -> None:
    seen = site("loader", call, call, values={"batch_size": None if "None" in call else 32})
    found = edited(call, seen, batch_size=64)
    assert (found.texts, only_lines(found)) == ({}, {1})


TF32 = RunSetting(precision="tf32", batch_size=32, accumulation_steps=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch\nfrom torch import nn\n\nx = 1\n",
         'import torch\nfrom torch import nn\n\ntorch.set_float32_matmul_precision("high")\n\nx = 1\n'),
        ("import torch\ntorch.set_float32_matmul_precision('highest')\n",
         'import torch\ntorch.set_float32_matmul_precision("high")\n'),
        ("import torch\ntorch.backends.cuda.matmul.allow_tf32 = False\n", None),
        ("from torch import nn\n", None),
    ],
)  # fmt: skip
def test_tf32(before: str, after: str | None) -> None:
    found = edited(before, precision="tf32", device="cuda")
    assert found.texts.get(PATH) == after
    assert bool(found.by_hand) is (after is None)
    back = edited(after or before, today=TF32, precision="fp32", device="cuda")
    assert ('"highest"' in back.texts.get(PATH, "")) is (after is not None)


def test_what_no_text_holds_is_said() -> None:
    found = edited("", environment={"MALLOC_TRIM_THRESHOLD_": "2"}, pinned_modules=("head",))
    said = " ".join(each.what for each in found.by_hand)
    assert "MALLOC_TRIM_THRESHOLD_=2" in said
    assert "head" in said


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "values", "precision", "after"),
    [
        ("torch.autocast('cpu', dtype=torch.float16)", {"dtype": "float16", "enabled": True}, "bf16",
         "torch.autocast('cpu', dtype=torch.bfloat16)"),
        ("torch.autocast('cpu', torch.float16, False)", {"dtype": "float16", "enabled": False}, "bf16",
         "torch.autocast('cpu', torch.bfloat16, True)"),
        ("torch.autocast('cpu', enabled=False)", {"dtype": "bfloat16", "enabled": False}, "bf16",
         "torch.autocast('cpu', enabled=True)"),
        ("torch.autocast('cuda')", {"dtype": "float16", "enabled": True}, "bf16",
         "torch.autocast('cuda', dtype=torch.bfloat16)"),
        ("torch.autocast('cuda')", {"dtype": "float16", "enabled": True}, "fp32",
         "torch.autocast('cuda', enabled=False)"),
        ("torch.autocast('cuda', enabled=True)", {"dtype": "float16", "enabled": True}, "fp32",
         "torch.autocast('cuda', enabled=False)"),
    ],
)  # fmt: skip
def test_a_region(call: str, values: dict[str, Any], precision: str, after: str) -> None:
    text = f"import torch\nwith {call}:\n    loss = model(x)\n"
    today = RunSetting(precision="fp16" if values["enabled"] else "fp32", batch_size=32, accumulation_steps=1)
    seen = (site("autocast", text, call, values=values), site("forward", text, "model(x)", values={"device": "cpu"}))
    found = edited(text, *seen, today=today, precision=precision)
    assert only(found) == text.replace(call, after)
    assert found.expected.precision == precision


@pytest.mark.parametrize(
    ("other", "precision", "is_said"),
    [
        ("torch.autocast('cuda')", "bf16", True),
        ("torch.autocast('cuda', torch.float16)", "bf16", True),
        ("torch.autocast('cuda', dtype=torch.bfloat16)", "bf16", False),
        ("torch.autocast('cuda', enabled=False)", "bf16", False),
        ("torch.autocast('cuda', dtype=dtype)", "bf16", False),  # perhaps edited with the training's
        ("torch.cuda.amp.autocast(False)", "bf16", False),
        ("torch.cuda.amp.autocast(True, torch.bfloat16)", "bf16", False),
        ("torch.cuda.amp.autocast(use_amp, torch.bfloat16)", "bf16", False),
        ("torch.cuda.amp.autocast(True)", "bf16", True),
        ("torch.cuda.amp.autocast(use_amp)", "fp32", False),
        ("autocast(False)", "bf16", False),  # imported from torch.cuda.amp
        ("torch.autocast('cuda')", "fp32", True),
        ("torch.autocast('cuda', enabled=args.amp)", "fp32", False),
    ],
)
def test_a_region_that_no_training_step_enters_is_named(other: str, precision: str, is_said: bool) -> None:
    call = "torch.autocast('cuda', torch.float16, True)"
    text = f"import torch\nwith {call}:\n    loss = model(x)\nwith torch.no_grad(), {other}:\n    model(x)\n"
    seen = site("autocast", text, call, values={"dtype": "float16", "enabled": True})
    today = RunSetting(precision="fp16", batch_size=32, accumulation_steps=1)
    found = edited(text, seen, today=today, precision=precision, device="cuda")
    assert found.texts
    assert [each.where for each in found.by_hand] == [f"{PATH}:4"] * is_said


def test_the_name_by_which_a_file_knows_torch_is_kept() -> None:
    text = "import torch as th\nwith th.autocast('cpu', dtype=th.float16):\n    pass\n"
    seen = site("autocast", text, "th.autocast('cpu', dtype=th.float16)", values={"dtype": "float16", "enabled": True})
    today = RunSetting(precision="fp16", batch_size=32, accumulation_steps=1)
    assert "dtype=th.bfloat16" in edited(text, seen, today=today, precision="bf16").texts[PATH]


def test_a_switch_of_the_command_turns_regions_on() -> None:
    text = (
        "import torch\np.add_argument('--amp', action='store_true')\n"
        "with torch.autocast('cpu', enabled=args.amp):\n    pass\n"
    )
    seen = site(
        "autocast", text, "torch.autocast('cpu', enabled=args.amp)", values={"dtype": "bfloat16", "enabled": False}
    )
    found = edited(text, seen, precision="bf16")
    assert (found.texts, found.command) == ({}, ("python", "train.py", "--amp"))


SCALED = "import torch\nscaler = {}\nwith torch.autocast('cpu', dtype=torch.{}):\n    pass\n"


@pytest.mark.parametrize(
    ("scaler", "after"),
    [
        ("GradScaler()", "GradScaler(enabled=False)"),
        ("GradScaler(enabled=True)", "GradScaler(enabled=False)"),
        ("GradScaler(enabled=args.amp)", "GradScaler(enabled=args.amp)"),  # which may turn the regions off too
    ],
)
def test_a_scaler_is_turned_off_where_that_is_its_own(scaler: str, after: str) -> None:
    text = SCALED.format(scaler, "float16") + "p.add_argument('--amp', action='store_true')\n"
    region = site(
        "autocast", text, "torch.autocast('cpu', dtype=torch.float16)", values={"dtype": "float16", "enabled": True}
    )
    today = RunSetting(precision="fp16", batch_size=32, accumulation_steps=1)
    found = edited(
        text, region, site("scaler", text, scaler, values={"enabled": True}), today=today,
        command=("python", "train.py", "--amp"), precision="bf16",
    )  # fmt: skip
    assert only(found) == text.replace(scaler, after).replace("torch.float16", "torch.bfloat16")
    assert found.command[-1] == "--amp"


def test_fp16_needs_a_scaler_and_its_scale_is_set_by_hand() -> None:
    scale = LossScale(init_scale=1024.0, growth_interval=100)
    text = SCALED.format("GradScaler('cpu', enabled=False)", "bfloat16")
    region = site(
        "autocast", text, "torch.autocast('cpu', dtype=torch.bfloat16)", values={"dtype": "bfloat16", "enabled": True}
    )
    today = RunSetting(precision="bf16", batch_size=32, accumulation_steps=1)
    scaler = site("scaler", text, "GradScaler('cpu', enabled=False)", values={"enabled": False})
    assert "GradScaler('cpu', enabled=True)" in only(
        edited(text, region, scaler, today=today, precision="fp16", loss_scale=LossScale())
    )
    (by_hand,) = edited(text, region, scaler, today=today, precision="fp16", loss_scale=scale).by_hand
    assert "init_scale=1024.0, growth_interval=100" in by_hand.what
    without = edited(text, region, today=today, precision="fp16", loss_scale=LossScale())
    assert (without.texts, len(without.by_hand)) == ({}, 2)


HEADER = 'with torch.autocast("cpu", dtype=torch.bfloat16):'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("for x in xs:\n    out = model(x)\n    loss = f(out)\n    loss.backward()\n",
         "for x in xs:\n    HEADER\n        out = model(x)\n        loss = f(out)\n    loss.backward()\n"),
        ("for x in xs:\n\tloss = f(model(x),\n\t\t1)\n\n\tscaler.scale(loss).backward()\n",
         "for x in xs:\n\tHEADER\n\t\tloss = f(model(x),\n\t\t\t1)\n\n\tscaler.scale(loss).backward()\n"),
        ("a, loss = model(x)\nlog(a)\nloss = f(loss)\n# clean\nmodel.zero_grad()\nloss.backward()\n",
         "HEADER\n    a, loss = model(x)\n    log(a)\n    loss = f(loss)\n"
         "# clean\nmodel.zero_grad()\nloss.backward()\n"),
        ("def step(x):\n    out = model(x)\n    return out.sum()\n",
         "def step(x):\n    HEADER\n        out = model(x)\n        return out.sum()\n"),
        ("with ctx:\n    loss = model(x)\nloss.backward()\n",
         "with ctx:\n    HEADER\n        loss = model(x)\nloss.backward()\n"),
        ("loss = model(x)\nif late:\n    step()\nloss.backward()\n",
         "HEADER\n    loss = model(x)\n    if late:\n        step()\nloss.backward()\n"),
        ("f(model(x)).backward()\n", None),
        ("loss = model(x); loss.backward()\n", None),
        ("y = 1; loss = model(x)\nloss.backward()\n", None),
        ("if model(x) > 1:\n    pass\n", None),
        ("loss = model(x)\nprint(loss)\n", None),
        ("loss = model(x)\ntext = '''a\nb'''\nloss.backward()\n", None),
    ],
)  # fmt: skip
def test_a_forward_pass_gets_a_region_of_its_own(before: str, after: str | None) -> None:
    before = f"import torch\n{before}"
    found = edited(before, site("forward", before, "model(x)", "Net", values={"device": "cpu"}), precision="bf16")
    if after is None:
        assert not found.texts
        assert HEADER in found.by_hand[0].what
    else:
        assert only(found) == "import torch\n" + after.replace("HEADER", HEADER)
        assert found.expected.precision == "bf16"


def test_two_passes_share_a_region_and_torch_is_imported() -> None:
    text = "from __future__ import annotations\nfrom torch import nn\na = one(x)\nb = two(a)\nb.backward()\n"
    seen = [site("forward", text, call, "Net", values={"device": "cpu"}) for call in ("one(x)", "two(a)")]
    assert only(edited(text, *seen, precision="bf16")) == (
        "from __future__ import annotations\nimport torch\nfrom torch import nn\n"
        f"{HEADER}\n    a = one(x)\n    b = two(a)\nb.backward()\n"
    )


def test_a_pass_that_a_library_makes_is_said() -> None:
    text = "library.fit(model)\n"
    seen = site("forward", text, "library.fit(model)", "Net", values={"device": "cpu"}, maker="library.loop", end=None)
    found = edited(text, seen, precision="bf16")
    assert (found.texts, only_lines(found)) == ({}, {1})


# --- frameworks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "before", "values", "after"),
    [
        (
            "training_arguments",
            "TrainingArguments('out', per_device_train_batch_size=32)",
            {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "bf16": False, "use_cpu": False},
            "TrainingArguments('out', per_device_train_batch_size=16, "
            "gradient_accumulation_steps=2, bf16=True, use_cpu=True)",
        ),
        (
            "training_arguments",
            "TrainingArguments(output_dir='out', bf16=False, use_cpu=True)",
            {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "bf16": False, "use_cpu": True},
            "TrainingArguments(output_dir='out', bf16=True, use_cpu=True, "
            "per_device_train_batch_size=16, gradient_accumulation_steps=2)",
        ),
    ],
)
def test_training_arguments(kind: str, before: str, values: dict[str, Any], after: str) -> None:
    seen = site(kind, before, before, values=values)
    found = edited(before, seen, precision="bf16", batch_size=16, accumulation_steps=2)
    assert only(found) == after
    assert found.expected == RunSetting(precision="bf16", batch_size=16, accumulation_steps=2, num_workers=0)


@pytest.mark.parametrize(
    ("kind", "call", "values", "after"),
    [
        ("lightning_trainer", "Trainer()", {"precision": "32-true", "accumulate_grad_batches": 1},
         'Trainer(accumulate_grad_batches=2, precision="bf16-mixed")'),
        ("accelerator", "Accelerator()", {"mixed_precision": "no", "gradient_accumulation_steps": 1},
         'Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")'),
        ("accelerator", "Accelerator(mixed_precision='no')",
         {"mixed_precision": "no", "gradient_accumulation_steps": 2},
         "Accelerator(mixed_precision=\"bf16\")"),
    ],
)  # fmt: skip
def test_lightning_and_accelerate(kind: str, call: str, values: dict[str, Any], after: str) -> None:
    text = f"{call}\nDataLoader(data, 32)\n"
    seen = (site(kind, text, call, values=values), site("loader", text, "DataLoader(data, 32)"))
    found = edited(text, *seen, precision="bf16", batch_size=16, accumulation_steps=2)
    assert only(found) == f"{after}\nDataLoader(data, 16)\n"


@pytest.mark.parametrize(
    ("given", "henceforth"),
    [
        ((), ("--per_device_train_batch_size", "16", "--bf16", "True")),
        (
            ("--bf16", "False", "--per_device_train_batch_size", "8"),
            ("--bf16", "True", "--per_device_train_batch_size", "16"),
        ),
    ],
)
def test_arguments_that_a_parser_makes_are_the_commands(given: tuple[str, ...], henceforth: tuple[str, ...]) -> None:
    values = {"per_device_train_batch_size": 32, "bf16": False, "use_cpu": True}
    seen = site("training_arguments", "parse()", "parse()", maker="transformers.hf_argparser", end=None, values=values)
    found = edited("parse()", seen, command=("python", "train.py", *given), precision="bf16", batch_size=16)
    assert (found.texts, found.by_hand, found.command) == ({}, (), ("python", "train.py", *henceforth))
    in_file = edited("parse()", seen, command=("python", "train.py", "args.json"), precision="bf16", batch_size=16)
    assert {each.where for each in in_file.by_hand} == {"args.json"}
    assert in_file.command == ("python", "train.py", "args.json")


def test_what_another_library_makes_is_said() -> None:
    seen = site(
        "accelerator",
        "main()",
        "main()",
        "Accelerator",
        maker="trl.trainer",
        end=None,
        values={"mixed_precision": "no"},
    )
    found = edited("main()", seen, precision="bf16")
    assert "trl.trainer" in found.by_hand[0].what


def test_one_switch_for_two_opposite_values_is_by_hand() -> None:
    text = "on = True\nTrainingArguments('out', bf16=on, fp16=on)\n"
    values = {"bf16": True, "fp16": False}
    seen = site("training_arguments", text, "TrainingArguments('out', bf16=on, fp16=on)", values=values)
    today = RunSetting(precision="bf16", batch_size=32, accumulation_steps=1)
    found = edited(text, seen, today=today, device="cuda", precision="fp16", loss_scale=LossScale())
    assert (found.texts, len(found.by_hand)) == ({}, 2)
    assert isinstance(found.by_hand[0], ManualChange)
