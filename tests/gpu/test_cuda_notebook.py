"""A notebook on the T4 that Colab and Kaggle lend: fp16 native, bf16 emulated, and its own process holds the card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import command_line
from notebook import SHOWN, run_notebook
from virtual_gpu_plugin import VirtualMachine

pytestmark = [pytest.mark.gpu, pytest.mark.real_time]


def test_a_search_where_the_notebook_itself_has_used_the_card(virtual_machine: VirtualMachine, tmp_path: Path) -> None:
    with command_line(tmp_path) as cli:
        cli.environment |= virtual_machine(num=1, cc="7.5")
        ran = run_notebook(cli, "cuda")
        assert cli.failures() == []
    assert ran.error == "SearchInterruptedError"
    assert set(ran.html) == set(SHOWN)
    assert "<dt>compute</dt><dd>7.5</dd>" in ran.html["Hardware"]
    levels = dict(re.findall(r"<td>(bf16|fp16)</td><td[^>]*>[^<]*</td><td>(\w+)</td>", ran.html["Hardware"]))
    assert levels == {"bf16": "emulated", "fp16": "native"}
