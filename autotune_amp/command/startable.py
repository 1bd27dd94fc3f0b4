"""Check that the program and the script of a command exist and will load the agent, before anything is run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.text import shell_line

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")  # their options before the script may take values
_WRAPPERS = ("env", "nice", "nohup", "time", "uv", "run")  # before a program, in the same folder
_PATH_VARIABLE = "PYTHONPATH="
# A line of a shell script that sets the variable without its former value, outside of a comment.
_REPLACED_PATH = re.compile(r"^[^#\n]*\bPYTHONPATH=(?!(?:\$\([^\n]*\)|[^\n;&])*\$\{?PYTHONPATH\b).*", re.MULTILINE)
# Beginnings of arguments by which a launcher looks for the script in other folders than this process would.
_PATH_CHANGES = (_PATH_VARIABLE, "-C", "--chdir", "--directory")
# Python's -c and -m after its options without a value; the code or the module may be joined to them.
_CODE_OR_MODULE_OPTION = re.compile(r"-[bBdEhiIOPqRsStuvVx]*(?P<kind>[cm])(?P<joined>.*)", re.DOTALL)
_OPTIONS_OF_PYTHON, _OPTIONS_OF_SHELLS = r"-[WX]|--check-hash-based-pycs", r"[-+]\w*[oO]"  # options with a value


def likely_command(words: Sequence[str]) -> list[str] | None:
    """Return the training command that is probably meant by arguments without ``--``; None if they do not look like
    one.
    """
    arguments = shlex.split(words[0]) if len(words) == 1 and " " in words[0] else list(words)
    first = arguments[0] if arguments else ""
    interpreter = {".py": "python", ".sh": "bash"}.get(Path(first).suffix)
    if interpreter is not None:
        return [interpreter, *arguments]
    return arguments if _is_launcher(Path(first).name) or shutil.which(first) is not None else None


def require_startable(arguments: Sequence[str], path: str | None, files: Collection[str] = ()) -> None:
    """Raise `WorkloadError` if the program of a command, or the script or module that it names, does not exist.

    `path` lists the folders to look for programs in, like the variable PATH. `files` are written before the start.
    """
    first = arguments[0]
    if shutil.which(first, path=path) is None:
        raise _program_error(first)
    if "-C" in arguments or any(argument.startswith("--chdir") for argument in arguments):
        return  # paths are relative to another folder
    at = next((number for number, each in enumerate(arguments) if _is_launcher(Path(each).name)), None)
    if at is None or not all(_is_wrapping(each) for each in arguments[:at]):
        return  # in a container or on another host, or an unknown program
    if any(each.startswith(_PATH_CHANGES) for each in arguments[:at]):
        return
    script = _script_of(arguments[at], arguments[at + 1 :], path)
    if script is None or "{" in script or script in files or Path(script).exists():
        return
    near = [each.name for each in Path(script).parent.glob(f"*{Path(script).suffix or '.py'}")]
    likely = get_close_matches(Path(script).name, near, 1)
    name = shlex.quote(str(Path(script).with_name(likely[0]))) if likely else "an existing file"
    raise WorkloadError(
        f"There is no file {script!r} in {Path.cwd()}.", f"Name {name}, or change to the folder of the script."
    )


def with_agent_on_path(
    arguments: Sequence[str], agent: Path, files: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the command with the folder `agent` first in each PYTHONPATH that it sets before its program, as ``env``
    does.

    Raises `WorkloadError` if its shell code, or a shell script that it names, sets PYTHONPATH without the former value:
    Python would not load the agent, which guards the user's files. `files` are texts that are written before the start,
    by path.
    """
    at = next((number for number, each in enumerate(arguments) if _is_launcher(Path(each).name)), len(arguments))
    scripts, texts = [each for each in arguments if each.endswith(".sh")], {}
    if at < len(arguments) and Path(arguments[at]).name in _SHELLS:
        texts = {"The command": "\n".join(arguments[at + 1 :])}
        scripts += filter(None, [_script_of(arguments[at], arguments[at + 1 :], path=None)])
    texts |= {each: Path(each).read_text(errors="replace") for each in scripts if Path(each).is_file()}
    texts |= {each: text for each, text in (files or {}).items() if each in scripts}
    for name, text in texts.items():
        if line := _REPLACED_PATH.search(text):
            raise WorkloadError(
                f"{name} replaces PYTHONPATH, by which Python finds the part of autotune_amp that protects your files "
                f"and measures the training: {line[0].strip()}",
                "Keep the former value, as in PYTHONPATH=src:$PYTHONPATH.",
            )
    return tuple(
        os.pathsep.join(filter(None, [f"{_PATH_VARIABLE}{agent}", each[len(_PATH_VARIABLE) :]]))
        if number < at and each.startswith(_PATH_VARIABLE)
        else each
        for number, each in enumerate(arguments)
    )


def _program_error(first: str) -> WorkloadError:
    if re.fullmatch(r"[A-Za-z_]\w*=.*", first):
        return WorkloadError(
            f"{first!r} is not a program but a variable assignment.", f"Begin the command with env: `env {first} ...`."
        )
    if Path(first).is_file():
        interpreter = "bash" if first.endswith(".sh") else "python"
        return WorkloadError(
            f"{first!r} is not executable.", f"Give the program that runs it: `{interpreter} {first} ...`."
        )
    return WorkloadError(
        f"There is no program {first!r} here.",
        "Give the command as you type it in this folder and environment. If it needs a shell, use `bash -c '...'`.",
    )


def _is_launcher(name: str) -> bool:
    return _PYTHON.fullmatch(name) is not None or name in _SHELLS or name in _LAUNCHERS


def _is_wrapping(argument: str) -> bool:
    return Path(argument).name in _WRAPPERS or argument.startswith("-") or "=" in argument or argument.isdecimal()


def _script_of(launcher: str, rest: Sequence[str], path: str | None) -> str | None:
    """Return the path of the script among a launcher's arguments `rest`; None if there is none or it is not clear
    which.

    Raises `WorkloadError` for a module after ``-m`` that does not exist, if the command uses the running Python.
    """
    name = Path(launcher).name
    if name in _LAUNCHERS:
        is_other = {"-m", "--module", "--no-python", "--no_python"} & set(rest)
        return None if is_other else next((each for each in rest if _is_script(each)), None)
    is_shell, skips_next = name in _SHELLS, False
    for number, argument in enumerate(rest):
        option = None if is_shell else _CODE_OR_MODULE_OPTION.fullmatch(argument)
        if skips_next:
            skips_next = False
        elif argument == "-" or (is_shell and re.fullmatch(r"-\w*[cs]", argument)):
            return None
        elif option is not None:
            if option["kind"] == "c":
                return None
            words = [*filter(None, [option["joined"]]), *rest[number + 1 :]]
            _require_module(words[:1], launcher, path)
            is_launcher = any(each.startswith("torch.distributed.") for each in words[:1])
            return _script_of("torchrun", words[1:], path) if is_launcher else None
        elif re.fullmatch(_OPTIONS_OF_SHELLS if is_shell else _OPTIONS_OF_PYTHON, argument):
            skips_next = True
        elif not argument.startswith(("-", "+")):
            return argument
    return None


def _is_script(argument: str) -> bool:
    return argument.endswith((".py", ".sh")) and not argument.startswith("-") and not re.search(r"\s", argument)


def _require_module(module: Sequence[str], python: str, path: str | None) -> None:
    executable = shutil.which(python, path=path)
    is_this_python = (
        executable is not None and Path(executable).absolute().parent == Path(sys.executable).absolute().parent
    )
    name = module[0].partition(".")[0] if module else ""
    if not is_this_python or not name.isidentifier() or name in sys.builtin_module_names:
        return
    if not _is_module(name):
        raise WorkloadError(
            f"There is no module {name!r}, neither in {Path.cwd()} nor installed.",
            f"Give its name as Python imports it, or the file: `{shell_line([python, 'path/to/script.py'])}`.",
        )


def _is_module(name: str) -> bool:
    """Whether the running Python can import the module, also from the working directory."""
    finds = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    is_importable = any(find_spec(name, None) is not None for find_spec in finds)
    return is_importable or PathFinder.find_spec(name, [str(Path.cwd())]) is not None
