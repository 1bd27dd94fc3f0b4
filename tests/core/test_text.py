"""Foreign text as a shell takes it, and options as Python's arguments."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp import api
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.text import ARGUMENTS, in_python, percent, shell_line

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@needs_bash
@given(words=st.lists(st.text(st.characters(exclude_characters="\0")), min_size=1, max_size=3))
def test_a_shell_reads_the_words_again_and_the_line_is_one(words: list[str]) -> None:
    words = [word.encode(errors="surrogateescape" if word.isascii() else "replace").decode() for word in words]
    line = shell_line(words)
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, timeout=20, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]


def test_words_without_control_characters_stay_readable() -> None:
    assert shell_line(["python", "a b.py", "it's"]) == "python 'a b.py' 'it'\"'\"'s'"


@pytest.mark.parametrize(
    ("said", "in_words_of_python"),
    [
        ("Give --budget 30 or more.", "Give budget=30 or more."),
        ("--effective-batch-size free tries them.", 'effective_batch_size="free" tries them.'),
        ("Give --fit 16GiB, or --batch-size 8:64.", "Give fit 16GiB, or batch_size 8:64."),
        (
            "Leave --devices and --ray out; --try it with --fresh.",
            "Leave devices and ray out; try_ it with fresh=True.",
        ),
        ("Run `autotune-amp search --budget 30`, or sbatch --partition gpu.", None),
        ("--devices-of-theirs is none of ours, nor is '--seed' in quotes.", None),
    ],
)
def test_python_is_told_of_its_own_arguments(said: str, in_words_of_python: str | None) -> None:
    assert in_python(said) == (in_words_of_python or said)


def test_an_error_names_arguments_in_a_traceback_and_keeps_foreign_text() -> None:
    text = str(InvalidRequestError("--batches is 0; it must be 1 or more.", "Give --batches 10, for example."))
    assert text == "num_batches is 0; it must be 1 or more.\nNext step: Give num_batches=10, for example."
    assert "error: argument --seed" in str(InvalidRequestError("train.py: error: argument --seed", "Fix it."))


def test_each_option_has_an_argument_in_python() -> None:
    calls = [getattr(api, name) for name in ("recommend_config", "check_workload", "profile_amp", "profile_memory")]
    known = {name for call in calls for name in inspect.signature(call).parameters}
    assert {argument.partition("=")[0] for argument in ARGUMENTS.values()} <= known
    of_search = set(inspect.signature(api.recommend_config).parameters) - {"workload", "quiet", "progress"}
    assert of_search - {"slots"} <= {argument.partition("=")[0] for argument in ARGUMENTS.values()}


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.00123, "0.12 %"), (0.414, "41 %"), (0.994, "99 %"), (0.999, "100 %"), (1.034, "103 %")],
)
def test_a_share_is_a_percentage_without_an_exponent(share: float, text: str) -> None:
    assert percent(share) == text
