"""`autotune-amp serve`: what cannot be served is an error with the way out; Ctrl-C and SIGTERM end it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from conftest import CommandLine

from autotune_amp.cli import run

TARGET = '[targets.mlp]\nworkload = "train.py:workload"\n'


def test_what_cannot_be_served_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def error(text: str) -> str:
        Path("serve.toml").write_text(text)
        assert run(["serve", "--config", "serve.toml", "--json"]) == 2
        return " ".join(json.loads(capfd.readouterr().out)["error"].values())

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_AMP_TOKEN", raising=False)
    assert "no target" in error("targets = {}")
    assert "AUTOTUNE_AMP_TOKEN" in error(f'host = "0.0.0.0"\n{TARGET}')
    assert "999.0.0.1" in error(
        f'host = "999.0.0.1"\ntoken_file = "t"\n{TARGET}'.replace('token_file = "t"', "port = 0")
    )
    Path("file").touch()
    assert "file" in error(f'folder = "file"\n{TARGET}')
    assert "nowhere" in error(f'database = "sqlite:////nowhere/q.db"\n{TARGET}')
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "autotune_amp.service.server", raising=False)
    assert "autotune_amp[serve]" in error(TARGET)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_serves_until_a_signal_and_alone(number: signal.Signals, code: int, cli: CommandLine) -> None:
    (cli.folder / "serve.toml").write_text(f"port = 0\n{TARGET}")
    process = cli.start("serve", "--config", "serve.toml", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["url"].startswith("http://127.0.0.1:")
    second = cli("serve", "--config", "serve.toml", "--json")
    assert (second.code, second.document["error"]["kind"]) == (2, "study_busy")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", "")
