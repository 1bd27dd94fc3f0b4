from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.setting import Setting

BF16 = Setting(precision="bf16", batch_size=16, accumulation_steps=2)


def filled(command: str, setting: Setting = BF16, values: dict[str, str] | None = None, **of_trial: Any) -> str:
    arguments, _ = CommandTemplate.of(command, values=values).of_setting(setting, ".", **of_trial)
    return shlex.join(arguments)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python t.py --bs {batch_size=32}", "python t.py --bs 16"),
        ("python t.py --bs={batch_size} --amp={precision=fp32}", "python t.py --bs=16 --amp=bf16"),
        ("python t.py train.batch={batch_size=8} trainer.accumulate={accumulation_steps=1}",
         "python t.py train.batch=16 trainer.accumulate=2"),
        ("python t.py {precision:bf16=--bf16|fp32=} x", "python t.py --bf16 x"),
        ("python t.py '{precision:bf16=--amp --dtype bfloat16|fp32=}'", "python t.py --amp --dtype bfloat16"),
        ("python t.py '--flags={precision:bf16=a b|fp32=}'", "python t.py '--flags=a b'"),
        ("python t.py --workers {num_workers=4}", "python t.py --workers 4"),
        ("bash -c 'python t.py --bs {batch_size=1} | tee log'", "bash -c 'python t.py --bs 16 | tee log'"),
        ("python t.py '{\"lr\": 1}' {{other}} ${batch}", "python t.py '{\"lr\": 1}' '{other}' '${batch}'"),
        ("python t.py '{\"a\": {\"bs\": {batch_size}}}'", "python t.py '{\"a\": {\"bs\": 16}}'"),
        ("python t.py --name={{batch_size=8}}-{batch_size=8}", "python t.py '--name={batch_size=8}-16'"),
        ("bash -c 'python t.py --bs ${batch_size}'", "bash -c 'python t.py --bs ${batch_size}'"),
        ("python t.py --seed {seed=17} --out {trial_dir}", "python t.py --seed 17 --out '{trial_dir}'"),
        ("python t.py --attn {attn=sdpa:eager|flash} {attn=sdpa:flash|eager}", "python t.py --attn eager eager"),
        ("python t.py --attn={attn=sdpa:sdpa|eager} '{ckpt:on=--gc --k|off=}'", "python t.py --attn=eager --gc --k"),
        ("python t.py '{ckpt=off:on=--gc --k v|off=--no}' '{!pin=a b:c}'", "python t.py --gc --k v 'a b'"),
        ("python t.py '{\"a\": \"{attn=sdpa:eager}\"}' {{attn=sdpa:eager}}",
         "python t.py '{\"a\": \"eager\"}' '{attn=sdpa:eager}'"),
    ],
)  # fmt: skip
def test_a_setting_fills_the_placeholders_and_nothing_else(command: str, expected: str) -> None:
    assert filled(command, replace(BF16, arguments=(("attn", "eager"), ("ckpt", "on")))) == expected


NAMES = st.from_regex(r"my_[a-z]{1,6}", fullmatch=True)
VALUES = st.lists(st.from_regex(r"[a-z0-9_./-]{1,8}", fullmatch=True), min_size=2, max_size=4, unique=True)


@given(NAMES, VALUES, st.booleans(), st.booleans())
def test_each_value_of_an_own_placeholder_is_listed_and_inserted(
    name: str, values: list[str], has_choices: bool, is_exact: bool
) -> None:
    name = f"!{name}" if is_exact else name
    today, *others = values
    texts = [f"{value}=--x {value}" for value in values] if has_choices else others
    line = CommandTemplate.of(["t.py", f"{{{name}={today}:{'|'.join(texts)}}}"])
    assert line.argument_values == {name: tuple(values)}
    for value in values:
        arguments = () if value == today else ((name, value),)
        expected = ("--x", value) if has_choices else (value,)
        assert line.of_setting(replace(BF16, arguments=arguments), ".")[0][1:] == expected


def test_what_adds_nothing_takes_no_argument() -> None:
    line = "python t.py {precision:bf16=--bf16|fp32=} x"
    assert filled(line, Setting(precision="fp32", batch_size=1)) == "python t.py x"


def test_a_trial_has_values_of_its_own() -> None:
    command = "torchrun --master_port {port} t.py --out {trial_dir=runs}/x --seed {seed=3}"
    assert filled(command, port=1234, trial_dir="/tmp/t", seed=0) == (
        "torchrun --master_port 1234 t.py --out /tmp/t/x --seed 0"
    )


def test_the_commands_own_words() -> None:
    line = CommandTemplate.of(
        "python t.py --precision {precision=32-true}", values={"fp32": "32-true", "bf16": "bf16-mixed"}
    )
    assert line.today_values == {"precision": "fp32"}
    assert line.of_setting(BF16, ".")[0][-1] == "bf16-mixed"


def test_today_is_what_the_defaults_say() -> None:
    line = CommandTemplate.of(
        ["python", "t.py", "--bs", "{batch_size=32}", "{precision:bf16=--bf16|fp32=}", "{num_workers=2}"]
    )
    assert line.today_values == {"precision": "fp32", "batch_size": 32, "num_workers": 2}
    assert line.today("accumulation_steps") is None


@given(st.lists(st.text(st.characters(exclude_characters="{}\0"), min_size=1), min_size=1))
def test_a_command_without_placeholders_stays_as_it_is(arguments: list[str]) -> None:
    line = CommandTemplate.of(arguments)
    assert line.of_setting(BF16, ".") == (tuple(arguments), {})
    assert line.outside(BF16, Setting(precision="fp32", batch_size=16)) == {
        "precision": "bf16",
        "accumulation_steps": 2,
    }
    assert line.outside(BF16, BF16) == {}


def test_what_a_script_makes_up_itself_is_not_set_from_outside() -> None:
    line = replace(CommandTemplate.of("python t.py {batch_size=32}"), keeps_effective_batch_size=True)
    assert line.outside(BF16, Setting(precision="bf16", batch_size=32)) == {}


def test_a_settings_file_is_copied_and_the_copy_named(tmp_path: Path) -> None:
    own = tmp_path / "cfg.yaml"
    own.write_text("batch: {batch_size=4}\nshape: {3: 4}\nattn: {attn=sdpa:eager}\nname: {{attn=sdpa:eager}}\n")
    line = CommandTemplate.of(f"python t.py --config={own}", files=[str(own)])
    arguments, files = line.of_setting(replace(BF16, arguments=(("attn", "eager"),)), "trial")
    assert arguments == ("python", "t.py", "--config=trial/cfg.yaml")
    text = "batch: 16\nshape: {3: 4}\nattn: eager\nname: {attn=sdpa:eager}\n"
    assert files == {"trial/cfg.yaml": text}
    assert line.today_values == {"batch_size": 4}
    assert own.read_text().startswith("batch: {batch_size=4}")


def test_a_settings_file_whose_path_is_a_part_of_another_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "my-a.yaml", "a.yaml.j2"):
        (tmp_path / name).write_text(f"{name}: {{batch_size=4}}")
    command = "python t.py a.yaml --other=my-a.yaml,a.yaml a.yaml.j2 lib/a.yaml"
    line = CommandTemplate.of(command, files=["a.yaml", "my-a.yaml", "a.yaml.j2"])
    arguments, files = line.of_setting(BF16, "a.yaml.d")
    own, mine, template = "a.yaml.d/a.yaml", "a.yaml.d/my-a.yaml", "a.yaml.d/a.yaml.j2"
    assert arguments == ("python", "t.py", own, f"--other={mine},{own}", template, "lib/a.yaml")
    assert files == {own: f"{own}: 16", mine: f"{mine}: 16", template: f"{template}: 16"}


def test_a_settings_file_that_a_choice_names_may_be_copied_to_a_path_that_a_shell_would_split(tmp_path: Path) -> None:
    own = tmp_path / "cfg.yaml"
    own.write_text("batch: 4\n")
    line = CommandTemplate.of(["python", "t.py", f"{{precision=fp32:bf16=-c {own}|fp32=}}"], files=[str(own)])
    arguments, _ = line.of_setting(BF16, "o'neil's study")
    assert arguments == ("python", "t.py", "-c", "o'neil's study/cfg.yaml")


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("python t.py a/own.yaml b/own.yaml", ["a/own.yaml", "b/own.yaml"]),  # their copies would be one
        ("python t.py a/own.yaml", ["own.yaml"]),
    ],
)
def test_settings_files_that_cannot_be_told_apart_are_refused(
    command: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(InvalidRequestError) as refused:
        CommandTemplate.of(command, files=files)
    assert files[-1] in refused.value.message


def test_choices_in_several_places_have_words_of_their_own_beside_the_braces_of_json(tmp_path: Path) -> None:
    own, naming = tmp_path / "ds.json", tmp_path / "launch.yaml"
    own.write_text(
        '{"bf16":{"enabled":{precision=bf16:bf16=true|fp16=false}},"size":{batch_size=4},'
        '"fp16":{"enabled":{precision:bf16=false|fp16=true}}}'
    )
    naming.write_text(f"deepspeed_config_file: {own}\n")
    line = CommandTemplate.of(f"accelerate launch --config_file {naming} t.py", files=[str(naming), str(own)])
    assert line.today_values == {"precision": "bf16", "batch_size": 4}
    for precision in ("bf16", "fp16"):
        _, files = line.of_setting(replace(BF16, precision=precision), "trial")
        values = json.loads(files["trial/ds.json"])
        assert {name: values[name]["enabled"] for name in ("bf16", "fp16")} == {
            name: name == precision for name in ("bf16", "fp16")
        }
        assert values["size"] == 16
        assert files["trial/launch.yaml"] == "deepspeed_config_file: trial/ds.json\n"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{"batch_size": 8}',
        "{}",
        "{0}",
        "${VAR:-x}",
        "{date:%Y}",
        "{val_loss:.2f}",
        "{1..3}",
        "{a,b}",
        "{lr: 0.1}",
        "f() { python t.py; }",
        "awk '{print $1}'",
        "{{ name }}",
        "{model.dim}",
        "trainer={precision:16,max_epochs:3}",
        "+data={batch_size:32,num_workers:4}",
        "--cfg={seed: 1, lr: 2}",
        "{seed: 1, model: {width: 2}}",
    ],
)
def test_braces_that_can_be_no_placeholder_stay(text: str) -> None:
    assert CommandTemplate.of(["python", "t.py", text]).of_setting(BF16, ".")[0][-1] == text


def test_of_a_settings_file_only_misspelt_names_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "cfg.yaml"
    text = "batch: {batch_size=4}\nname: {{epoch}}-{epoch}-{{seeds=1}}\nmodel: {port: 1, width: 2}\n"
    text += "{attn=sdpa} {attn} {x:0=} {x=!s:>5} {x=:5} {a=b: c} {a: b=c|d=}\n"
    own.write_text(text)
    _, files = CommandTemplate.of(f"python t.py {own}", files=[str(own)]).of_setting(BF16, ".")
    assert list(files.values()) == [text.replace("{batch_size=4}", "16").replace("{{seeds=1}}", "{seeds=1}")]
    own.write_text("batch: {batchsize=4}\n")
    with pytest.raises(InvalidRequestError, match=r"cfg.yaml(.|\n)*\{batch_size=4\}"):
        CommandTemplate.of(f"python t.py {own}", files=[str(own)])


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        ("", {}, "empty"),
        ("python t.py", {"files": ["cfg.yaml"]}, "cfg.yaml"),
        ("python t.py no.yaml", {"files": ["no.yaml"]}, "cannot be read"),
        ("python t.py {batch_size=8} {batch_size=16}", {}, "twice"),
        ("python t.py '{precision:bf16=--a|fp32=}' '{precision:fp16=--a|fp32=}'", {}, "twice"),
        ("python t.py {batch_size=many}", {}, "many"),
        ("python t.py {batch_size=0}", {}, "'0'"),
        ("python t.py {precision=bf16-mixed}", {}, "bf16-mixed"),
        ("python t.py {precision:half=--half|fp32=}", {}, "half"),
        ("python t.py '{precision:half=--half|fp32=}'", {"values": {"bf16": "half"}}, "half"),
        ("python t.py '{precision:bf16=--bf16|fp16=--fp16}'", {}, "today"),
        ("python t.py --workers {num_workers}", {}, "today"),
        (["python", "t.py", "{precision:bf16=--bf16"], {}, "Quote|invalid placeholder"),
        ("python t.py {batch_size=8", {}, "invalid placeholder"),
        ("python t.py {batch_size:8}", {}, "invalid placeholder"),
        ("python t.py '{batch_size:8|16}'", {}, "invalid placeholder"),
        ("python t.py '{batch_size:8=--small}'", {}, "invalid placeholder"),
        ("python t.py {batchsize:8}", {}, r"Write \{batch_size=8\}"),
        ("python t.py {batchsize=32}", {}, r"batchsize(.|\n)*Write \{batch_size=32\}(.|\n)*\{\{batchsize=32\}\}"),
        ("python t.py --amp={precison=fp32}", {}, r"Write \{precision=fp32\}"),
        ("python t.py {attn=sdpa}", {}, r"\{batch_size\}(.|\n)*\{\{attn=sdpa\}\}"),
        ("python t.py {attn}", {}, r"\{attn=TODAY:OTHER"),
        ("python t.py '{attn:flash=--flash|eager=--eager}'", {}, r"\{attn=.*:OTHER"),
        ("python t.py {attn=sdpa:sdpa}", {}, r"\{attn=sdpa:OTHER"),
        ("python t.py '{ckpt=off:on=--gc}'", {}, r"\{ckpt=off:off=\|on=--gc\}"),
        ("python t.py '{batchsize=32:16|64}'", {}, r"Write \{batch_size=32\}"),
        ("python t.py '{init_scale=1:2}'", {}, "study"),
        ("python t.py {attn=a:b} {attn=b:a}", {}, "twice"),
        ("python t.py {attn=a:b} {!attn=a:b}", {}, r"Both(.|\n)*!"),
        ("python t.py ckpt-{epoch}", {}, r"\{\{epoch\}\}"),
        ("bash -c 'python t.py --bs {batch-size=8} | tee log'", {}, r"Write \{batch_size=8\}"),
        ("python t.py {precision}", {"values": {"bfloat": "x"}}, "bfloat"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(command: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        CommandTemplate.of(command, **options)


def test_what_is_suggested_as_todays_is_fp32_and_can_be_meant() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        CommandTemplate.of("python t.py '{precision:bf16=--dtype bf16|fp32=--dtype fp32}'")
    suggested = "{precision=fp32:bf16=--dtype bf16|fp32=--dtype fp32}"
    assert suggested in raised.value.next_step
    assert CommandTemplate.of(["python", "t.py", suggested]).today("precision") == "fp32"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u src/train.py --x 1", "train"),
        ("torchrun -m pkg.train", "pkg.train"),
        ("bash go.sh", "go"),
        ("/usr/bin/fit", "fit"),
        ("/usr/bin/fit ./data lora", "fit"),
        ("trl sft --config c.yaml", "trl-sft"),
        ("python -m trl dpo", "trl-dpo"),
    ],
)
def test_a_study_is_named_by_its_script(command: str, name: str) -> None:
    assert CommandTemplate.of(command).name == name


def test_the_first_commands_differ_in_one_thing_each() -> None:
    line = CommandTemplate.of("python t.py {batch_size=8} {precision:fp16=--fp16|fp32=} {attn=a:b|c}")
    assert [shlex.join(command) for command in line.first_commands()] == [
        "python t.py 8 a", "python t.py 8 --fp16 a", "python t.py 4 a", "python t.py 8 b", "python t.py 8 c",
    ]  # fmt: skip
