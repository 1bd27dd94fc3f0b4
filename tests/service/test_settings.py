"""The file of a service, and its tokens: what is wrong is named, and nobody else may read a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.service.settings import Settings, Target, load_settings, read_tokens

TARGET = '[targets.mlp]\nworkload = "train.py:workload"\n'
TOKEN = "0123456789abcdef"


def loaded(folder: Path, text: str) -> Settings:
    (folder / "serve.toml").write_text(text)
    return load_settings(folder / "serve.toml")


def test_paths_are_those_beside_the_file_and_limits_are_options(tmp_path: Path) -> None:
    (tmp_path / "mlp").mkdir()
    limits = 'folder = "mlp"\ndevices = [0, 1]\nmemory_limit = "2GiB"\nbudget = 90\n'
    text = f'folder = "kept"\ntoken_file = "t"\n{TARGET}{limits}'
    settings = loaded(tmp_path, text)
    target = settings.targets["mlp"]
    assert (settings.folder, settings.token_file) == (str(tmp_path / "kept"), str(tmp_path / "t"))
    assert (settings.host, settings.is_local, target.folder) == ("127.0.0.1", True, str(tmp_path / "mlp"))
    options = target.limits
    assert (options.devices, options.memory_limit, options.budget_seconds) == ((0, 1), 2 << 30, 90.0)
    assert target.arguments() == ["train.py:workload"]


def test_a_command_is_words_behind_the_separator() -> None:
    target = Target(command="python train.py --bs {batch_size=8}", values={"fp32": "no"}, files=("c.yaml",))
    own = ["--value", "fp32=no", "--file", "c.yaml"]
    assert target.arguments() == [*own, "--", "python", "train.py", "--bs", "{batch_size=8}"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "targets"),
        ("targets = {}", "no target"),
        ("not toml", "serve.toml"),
        (f"prot = 1\n{TARGET}", "prot"),
        (f"port = 70000\n{TARGET}", "65535"),
        (f'name = "{"n" * 256}"\n{TARGET}', "255"),
        (f'{TARGET}command = "python train.py"', "either"),
        ("[targets.mlp]\n", "either"),
        ('[targets."../up"]\nworkload = "a.py:b"', "../up"),
        ('[targets.mlp]\nworkload = "--out=x"', "--out=x"),
        (f'{TARGET}folder = "missing"', "missing"),
        (f"{TARGET}budget = -1", "budget"),
        (f'{TARGET}memory_limit = "much"', "much"),
        (f'{TARGET}device = "tpu"', "tpu"),
        ('[targets.mlp]\ncommand = "python train.py {batch_sise=8}"', "batch_sise"),
        ('[targets.mlp]\ncommand = "python \'train.py"', "quotation"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(text: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        loaded(tmp_path, text)
    with pytest.raises(InvalidRequestError, match=r"other\.toml"):
        load_settings(tmp_path / "other.toml")


def test_tokens_of_the_environment_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"ann {TOKEN}\n\n{TOKEN}2\n")
    file.chmod(0o600)
    settings = Settings(targets={}, host="0.0.0.0", token_file=str(file))
    tokens = read_tokens(settings, {"AUTOTUNE_AMP_TOKEN": f"{TOKEN}3"})
    assert tokens == {TOKEN: "ann", f"{TOKEN}2": "team", f"{TOKEN}3": "team"}


@pytest.mark.parametrize(
    ("text", "mode", "word"),
    [
        (TOKEN, 0o640, "chmod"),
        (TOKEN, 0o604, "chmod"),
        ("short", 0o600, "16"),
        (f"a b {TOKEN}", 0o600, "NAME"),
        (None, 0, "read"),
    ],
)
def test_a_token_file_that_will_not_do_is_refused(text: str | None, mode: int, word: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(InvalidRequestError, match=word):
        read_tokens(Settings(targets={}, token_file=str(file)), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "gpu-host"])
def test_without_a_token_only_this_machine_can_connect(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="AUTOTUNE_AMP_TOKEN"):
        read_tokens(Settings(targets={}, host=host), {"AUTOTUNE_AMP_TOKEN": ""})
    assert read_tokens(Settings(targets={}, host="::1"), {}) == {}
