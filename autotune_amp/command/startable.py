"""Check whether a command can be started: its program and its script are looked for before anything is run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.text import shell_line

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")  # their options before the script may take values
_WRAPPERS = ("env", "nice", "nohup", "time", "uv", "run")  # before a program, in the same folder
# What stands before a launcher that looks in other folders than this process.
_ELSEWHERE = ("PYTHONPATH=", "-C", "--chdir", "--directory")
# Python's -c and -m after its options without a value; the code or the module may be joined to them.
_RUNS = re.compile(r"-[bBdEhiIOPqRsStuvVx]*(?P<kind>[cm])(?P<joined>.*)", re.DOTALL)
_OPTIONS_OF_PYTHON, _OPTIONS_OF_SHELLS = ("-W", "-X", "--check-hash-based-pycs"), ("-o", "-O")  # options with a value


def likely_command(words: Sequence[str]) -> list[str] | None:
    """Return the training command that is probably meant by words without ``--``, None if they do not look like a
    command.
    """
    given = shlex.split(words[0]) if len(words) == 1 and " " in words[0] else list(words)
    first = given[0] if given else ""
    by = {".py": "python", ".sh": "bash"}.get(Path(first).suffix)
    if by is not None:
        return [by, *given]
    return given if _is_launcher(Path(first).name) or shutil.which(first) is not None else None


def require_startable(arguments: Sequence[str], path: str | None) -> None:
    """Raise `WorkloadError` if the program of a command, or the script or module that it names, does not exist.

    `path` lists the folders to look for programs in, like the variable PATH.
    """
    first = arguments[0]
    if shutil.which(first, path=path) is None:
        raise _no_program(first)
    if "-C" in arguments or any(argument.startswith("--chdir") for argument in arguments):
        return  # paths are relative to another folder
    at = next((number for number, each in enumerate(arguments) if _is_launcher(Path(each).name)), None)
    if at is None or not all(_is_wrapping(each) for each in arguments[:at]):
        return  # the script is in a container or on another host, or the program is none that is known
    if any(each.startswith(_ELSEWHERE) for each in arguments[:at]):
        return
    script = _script(arguments[at], arguments[at + 1 :], path)
    if script is None or "{" in script or Path(script).exists():
        return
    near = [each.name for each in Path(script).parent.glob(f"*{Path(script).suffix or '.py'}")]
    likely = get_close_matches(Path(script).name, near, 1)
    name = shlex.quote(str(Path(script).with_name(likely[0]))) if likely else "a file that is there"
    raise WorkloadError(
        f"There is no file {script!r} in {Path.cwd()}.", f"Name {name}, or go to the folder that has it."
    )


def _no_program(first: str) -> WorkloadError:
    if re.fullmatch(r"[A-Za-z_]\w*=.*", first):
        return WorkloadError(
            f"{first!r} is no program but sets a variable.", f"Begin the command with env: `env {first} ...`."
        )
    if Path(first).is_file():
        by = "bash" if first.endswith(".sh") else "python"
        return WorkloadError(f"{first!r} is not executable.", f"Give the program that runs it: `{by} {first} ...`.")
    return WorkloadError(
        f"There is no program {first!r} here.",
        "Give the command as it is typed in this folder and environment; one that needs a shell as `bash -c '...'`.",
    )


def _is_launcher(name: str) -> bool:
    return _PYTHON.fullmatch(name) is not None or name in _SHELLS or name in _LAUNCHERS


def _is_wrapping(argument: str) -> bool:
    return Path(argument).name in _WRAPPERS or argument.startswith("-") or "=" in argument or argument.isdecimal()


def _script(launcher: str, rest: Sequence[str], path: str | None) -> str | None:
    """Return the script that a launcher is given, None if it is given none or that cannot be told.

    Raises `WorkloadError` for a module after ``-m`` that this Python does not find, if the command uses this Python.
    """
    name = Path(launcher).name
    if name in _LAUNCHERS:
        is_other = {"-m", "--module", "--no-python", "--no_python"} & set(rest)
        return None if is_other else next((each for each in rest if _is_script(each)), None)
    is_shell, skips = name in _SHELLS, False
    for number, argument in enumerate(rest):
        runs = None if is_shell else _RUNS.fullmatch(argument)
        if skips:
            skips = False
        elif argument == "-" or (is_shell and re.fullmatch(r"-\w*[cs]", argument)):
            return None
        elif runs is not None:
            if runs["kind"] == "c":
                return None
            words = [*filter(None, [runs["joined"]]), *rest[number + 1 :]]
            _require_module(words[:1], launcher, path)
            is_launcher = any(each.startswith("torch.distributed.") for each in words[:1])
            return _script("torchrun", words[1:], path) if is_launcher else None
        elif argument in (_OPTIONS_OF_SHELLS if is_shell else _OPTIONS_OF_PYTHON):
            skips = True
        elif not argument.startswith(("-", "+")):
            return argument
    return None


def _is_script(argument: str) -> bool:
    return argument.endswith((".py", ".sh")) and not argument.startswith("-") and not re.search(r"\s", argument)


def _require_module(module: Sequence[str], python: str, path: str | None) -> None:
    found = shutil.which(python, path=path)
    is_ours = found is not None and Path(found).absolute().parent == Path(sys.executable).absolute().parent
    name = module[0].partition(".")[0] if module else ""
    if not is_ours or not name.isidentifier() or name in sys.builtin_module_names:
        return
    if not _is_module(name):
        raise WorkloadError(
            f"There is no module {name!r}, neither in {Path.cwd()} nor among what is installed.",
            f"Give its name as Python imports it, or the file: `{shell_line([python, 'path/to/script.py'])}`.",
        )


def _is_module(name: str) -> bool:
    """Return whether a finder of this Python, such as that of an editable install, or the working directory has it."""
    finds = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    is_found = any(find_spec(name, None) is not None for find_spec in finds)
    return is_found or PathFinder.find_spec(name, [str(Path.cwd())]) is not None
