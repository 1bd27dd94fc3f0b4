"""Foreign text as a shell takes it."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.text import shell_line

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
