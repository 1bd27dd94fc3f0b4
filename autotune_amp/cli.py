"""The command line: typer reads the request, the work is done, the result is printed, the exit code is set.

Standard output carries the result and nothing else. Nothing heavy is imported before a command needs it, so that
``--help`` answers at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune_amp import __version__
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError
from autotune_amp.interruption import interruptible
from autotune_amp.report.output import emit, json_document, reader_may_leave, rendered

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.integrations.export import Export

_TAKE_COMMANDS = ("search", "run", "apply")  # a training command, after ``--``
_OF_THE_COMMAND_LINE = ("context", "value", "file", "dry_run", "as_json")  # no options of recommend_config()

# typer brought its own copy of click with 0.2x; the base of every usage error is found wherever it lives.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    # typer converts a missing --help through pydantic, and importing that takes longer than all the rest of a --help.
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)


def _command(work: Callable[..., bytes]) -> Callable[..., bytes]:
    """Makes a command of a function that returns what goes to standard output.

    Typer only reads the options, and the work is done after it has returned: it would take any broken pipe or end of
    file for the terminal's.
    """

    @wraps(work)
    def deferred(**options: Any) -> Callable[[], bytes]:
        return partial(work, **options)

    app.command(work.__name__.rstrip("_"))(deferred)
    return work


def _option(metavar: str, text: str) -> Any:
    return typer.Option(help=text, metavar=metavar)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, of an error too.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Target = Annotated[
    str | None,
    typer.Argument(
        help="What to train: path/file.py:function or package.module:function, a function that returns a "
        "Workload. Without it, a small transformer that comes with the package.",
        metavar="TARGET",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Argument(help="A study's folder, or the file meant. Without it, the latest in ./studies.", metavar="FOLDER"),
]
Device = Annotated[str, _option("DEVICE", "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N.")]
Precision = Annotated[
    list[str] | None, _option("PRECISION", "Try only this precision: fp32, tf32, bf16, fp16 or fp8. Repeatable.")
]
_OBJECTIVE = _option(
    "OBJECTIVE",
    "Choose for speed, memory (the least that is no slower than the baseline) or energy. A finished search is ranked "
    "again, nothing is run.",
)
_TRY = typer.Option(
    "--try",
    help="What else to try: auto (what is safe), none, or some of compile, channels_last, optimizer_impl, "
    "activation_checkpointing, allocator, fp8_recipe, weights, with commas.",
    metavar="NAMES",
)
Steps = Annotated[
    int | None, _option("N", "Optimizer steps of the training to come: fp16's loss scale is chosen for them.")
]
Samples = Annotated[int | None, _option("N", "The same in samples.")]
Price = Annotated[float | None, _option("MONEY", "What an hour costs: with --steps or --samples, the price.")]


@app.callback(invoke_without_command=True)
def autotune_amp(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Measure which precision and batch size to train a PyTorch model with, on your own model and machine."""
    if version:
        typer.echo(f"autotune-amp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_command
def search(
    context: typer.Context,
    workload: Target = None,
    budget: Annotated[float, _option("SECONDS", "Seconds the whole search may take.")] = 110.0,
    trials: Annotated[int | None, _option("N", "At most this many trials.")] = None,
    device: Device = "auto",
    devices: Annotated[str | None, _option("all|N,N", "NVIDIA cards to search on at the same time.")] = None,
    slots: Annotated[int | None, _option("N", "Shares of the CPU to search on at the same time.")] = None,
    ray: Annotated[str | None, _option("ADDRESS", "Search on the nodes of a Ray cluster: auto or HOST:PORT.")] = None,
    ranks: Annotated[int, _option("N", "Train each trial on so many processes together, under DDP.")] = 1,
    precision: Precision = None,
    batch_size: Annotated[str | None, _option("LOW:HIGH", "Try only batch sizes in this range, such as 8:256.")] = None,
    effective_batch_size: Annotated[
        str | None,
        _option(
            "N|free",
            "Samples per optimizer step, kept exactly: smaller batches accumulate gradients. Without it, what the "
            "DataLoader has; `free` lets the search change it.",
        ),
    ] = None,
    baseline: Annotated[
        str | None, _option("PRECISION:BATCH", "What to compare with, such as fp32:32. Without it, what runs today.")
    ] = None,
    try_: Annotated[str, _TRY] = "auto",
    memory_fraction: Annotated[float, _option("SHARE", "Share of the available memory that a trial may take.")] = 0.9,
    objective: Annotated[str, _OBJECTIVE] = "speed",
    steps: Steps = None,
    samples: Samples = None,
    price_per_hour: Price = None,
    study: Annotated[str | None, _option("NAME", "The study; the same name goes on where it stopped.")] = None,
    out: Annotated[str, _option("FOLDER", "Folder that holds the studies.")] = "studies",
    storage: Annotated[str | None, _option("URL", "Optuna storage in place of SQLite in the study's folder.")] = None,
    seed: Annotated[int, _option("N", "Seed of the trials and of Optuna.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is known from earlier.")] = False,
    value: Annotated[
        list[str] | None, _option("PRECISION=WORD", "What the command after -- calls a precision. Repeatable.")
    ] = None,
    file: Annotated[
        list[str] | None, _option("FILE", "A settings file with placeholders that the command names. Repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what of a command would be started first.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Find the fastest precision and batch size to train with.

    What is trained is a TARGET, or any training command: search -- python train.py --bs {batch_size=32} --amp
    {precision=fp32}. The result is printed and saved in a study folder; the same command again goes on where it
    stopped.
    """
    # Every option goes to recommend_config() under the name and with the default that it has there.
    asked = {name: given for name, given in locals().items() if name not in _OF_THE_COMMAND_LINE}
    from autotune_amp.core.launch_line import from_command_line

    line = from_command_line(context.obj, workload, value or [], file or [], is_dry=dry_run)
    if line is not None and dry_run:
        started = [shlex.join(arguments) for arguments in line.first_commands()]
        return (
            json_document({"format": 1, "commands": started})
            if as_json
            else "".join(f"{s}\n" for s in started).encode()
        )
    asked["workload"] = line or workload
    from autotune_amp.api import recommend_config
    from autotune_amp.distributed import place
    from autotune_amp.report.progress import TerminalProgress

    recommendation = recommend_config(**asked, progress=None if quiet else TerminalProgress(sys.stderr))
    path = Path(out, recommendation.search.study, "recommendation.json")
    return _result(recommendation, as_json, path) if place().rank == 0 else b""


@_command
def probe(device: Device = "auto", as_json: Json = False) -> bytes:
    """Say what this machine can do, and why not more.

    Device, driver, memory, and each precision as native, emulated or unsupported with a measured rate.
    """
    from rich.console import Console

    from autotune_amp.hardware import probe as probe_hardware

    with Console(stderr=True).status("Probing the device"):
        hardware = probe_hardware(device)
    if as_json:
        return json_document({"format": 1, "hardware": hardware})
    from autotune_amp.report.terminal import hardware_table

    return rendered(lambda console: hardware_table(hardware, console))


@_command
def show(
    folder: Folder = None,
    objective: Annotated[str | None, _OBJECTIVE] = None,
    steps: Steps = None,
    samples: Samples = None,
    price_per_hour: Price = None,
    as_json: Json = False,
) -> bytes:
    """Print a finished recommendation again, ranked again where an option asks for it.

    Nothing is run and nothing is saved.
    """
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.report.files import latest

    path = latest(folder, "recommendation.json")
    recommendation = Recommendation.load(path)
    if any(given is not None for given in (objective, steps, samples, price_per_hour)):
        from autotune_amp.search.answer.decide import ranked_again

        recommendation = ranked_again(recommendation, path, objective, steps, samples, price_per_hour)
    return _result(recommendation, as_json, path)


@_command
def report(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A study's folder, or the run log (.jsonl) of a PrecisionController. Without it, the latest study.",
            metavar="FOLDER|RUN.jsonl",
        ),
    ] = None,
    out: Annotated[
        Path | None, _option("FILE", "Write this file in place of the study's report.html or the log's .html.")
    ] = None,
    as_json: Json = False,
) -> bytes:
    """Draw a search, or a training's run log, as one HTML file, and print its path.

    A search that recommended nothing is drawn too, with what failed. A page is written over an earlier one of its kind
    and over no other file.
    """
    from autotune_amp.report.files import OUTCOMES, latest, write_report, write_run_report

    if path is not None and path.is_file() and path.suffix != ".json" and path.name != OUTCOMES:
        written = write_run_report(path, out)  # the controller writes its log to whatever name it is given
    else:
        written = write_report(latest(path, "recommendation.json", OUTCOMES), out)
    return json_document({"format": 1, "report": written.as_posix()}) if as_json else f"{written.as_posix()}\n".encode()


@_command
def profile(
    target: Target = None,
    batches: Annotated[int, _option("N", "Training steps to time in each precision.")] = 10,
    device: Device = "auto",
    precision: Precision = None,
    batch_size: Annotated[int | None, _option("N", "Samples in a batch. Without it, the workload's own.")] = None,
    trace: Annotated[Path | None, _option("FILE", "Write the profiled steps here, for ui.perfetto.dev.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Say whether mixed precision pays here, and why.

    fp32 against bf16 and fp16 on the same batches: speed-up, memory, where a step's time goes, what to try next.
    """
    from autotune_amp.api import profile_amp

    found = profile_amp(
        target, batches, device=device, precision=precision, batch_size=batch_size, trace=trace, quiet=quiet
    )
    if as_json:
        return f"{found.to_json()}\n".encode()
    from autotune_amp.report.terminal import print_profile

    return rendered(lambda console: print_profile(found, console))


@_command
def export(
    to: Annotated[
        str,
        _option(
            "TARGET",
            "lightning, transformers, accelerate, deepspeed, torch, env for the shell, or slurm: two jobs, a search "
            "and the training after it.",
        ),
    ],
    folder: Folder = None,
    out: Annotated[
        Path | None,
        _option("FILE", "Write it here; of accelerate, a .yaml is the file of `accelerate launch --config_file`."),
    ] = None,
    as_json: Json = False,
) -> bytes:
    """Print a recommendation as text to paste into a training script, or write it to a file and print its path.

    A file is written over an earlier export and over no other file.
    """
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.integrations.export import accelerate_file, is_exported, setting_of
    from autotune_amp.integrations.export import export as exported
    from autotune_amp.report.files import latest, write_over
    from autotune_amp.report.rows import origin_line

    path = latest(folder, "recommendation.json")
    recommendation = Recommendation.load(path)
    origin = origin_line(path, recommendation)
    setting = setting_of(recommendation, origin)
    is_launch_file = to == "accelerate" and out is not None and out.suffix in (".yaml", ".yml")
    if to == "slurm":
        made = _slurm_jobs(recommendation, path.parent if path.parent.name else path.parent.resolve(), origin)
    else:
        made = accelerate_file(setting) if is_launch_file else exported(setting, to)
    if out is not None:
        elsewhere = "Name another file with --out, or leave --out away and paste what is printed."
        write_over(out, made.text, "export of autotune-amp's", is_exported, elsewhere)
    for note in made.notes:
        sys.stderr.write(f"Note: {note}\n")
    if as_json:
        return json_document(made)
    return (made.text if out is None else f"{out.as_posix()}\n").encode()


@_command
def run_(
    context: typer.Context,
    study: Annotated[
        Path | None,
        typer.Argument(help="A study's folder, or its file. Without it, the latest in ./studies.", metavar="STUDY"),
    ] = None,
) -> bytes:
    """Run the real training with a recommendation: run STUDY -- python train.py.

    What its command does not say is set from outside; one line says what and where. A GradScaler of the script's own
    becomes a PrecisionController. Signals and exit code are the command's.
    """
    from autotune_amp.launch.run import start
    from autotune_amp.report.files import latest

    start(_training(context, "run"), latest(study, "recommendation.json"))


@_command
def apply(
    context: typer.Context,
    folder: Folder = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the edits, once a copy has done what they say.")
    ] = False,
    as_json: Json = False,
) -> bytes:
    """Print a recommendation as a diff of your script: apply -- python train.py.

    The command is run for a few steps, to see which calls are to be edited, and an edited copy, to see what that does.
    What no edit can be trusted with is said with its line.
    """
    training = _training(context, "apply")
    from rich.console import Console

    from autotune_amp.core.launch_line import LaunchLine
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.launch.editing.apply import apply as applied_to
    from autotune_amp.report.files import latest

    found = latest(folder, "recommendation.json")
    recommended = Recommendation.load(found)
    with Console(stderr=True).status("") as status:
        applied = applied_to(recommended, LaunchLine.of(training), study=found.parent, write=write, phase=status.update)
    emit(json_document(applied) if as_json else applied.diff.encode())
    with reader_may_leave(sys.stdout):
        sys.stdout.flush()
    for note in applied.notes():  # below the diff, however long that is
        sys.stderr.write(f"{note}\n")
    return b""


@_command
def dashboard(
    folder: Folder = None,
    storage: Annotated[str | None, _option("URL", "The storage that the search was given, not a folder.")] = None,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 is any free one.", min=0, max=65535, metavar="PORT")
    ] = 8080,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    as_json: Json = False,
) -> bytes:
    """Open Optuna's dashboard on a study, until Ctrl-C.

    It listens on this machine only. Needs the extra `dashboard`.
    """
    from autotune_amp.report.dashboard import has_display, serving
    from autotune_amp.report.files import latest

    with serving(storage or latest(folder, "study.db"), port) as server:
        typer.echo(json.dumps({"format": 1, "url": server.url}) if as_json else server.url)
        if not as_json:
            typer.echo("Ctrl-C ends it.", err=True)
        if not no_browser and has_display():
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return b""
    return b""


def _slurm_jobs(recommendation: Recommendation, study: Path, origin: str) -> Export:
    import msgspec

    from autotune_amp.core.launch_line import to_command_line
    from autotune_amp.integrations.slurm import slurm
    from autotune_amp.search.options import SearchOptions

    target, line = recommendation.target, recommendation.launch_line
    options = msgspec.convert(recommendation.options, SearchOptions)
    asked = msgspec.structs.replace(options, ray=None).arguments()  # which is no cluster of the job's
    asked += ["--out", str(study.parent), "--study", study.name]
    what = to_command_line(line) if line is not None else target and [target]
    searching = what and [*asked, *what]
    training = None if line is None else line.arguments
    on_ray = line is None and options.can_use_ray
    return slurm(searching, training, name=study.name, study=study.as_posix(), origin=origin, can_use_ray=on_ray)


def _training(context: typer.Context, command: str) -> list[str]:
    if not context.obj:
        raise InvalidRequestError("No command is given.", f"Give it after `--`, as in `{command} -- python train.py`.")
    training: list[str] = context.obj
    return training


def main() -> None:
    """The entry point: the only place that prints or exits."""
    # Closed by the caller (``>&-``): without this the next file that is opened would become standard output.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    with interruptible():
        code = run(sys.argv[1:])
        for stream in (sys.stdout, sys.stderr):
            with reader_may_leave(stream):
                stream.flush()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Do what the command line asks for; returns the exit code."""
    own, training = arguments, None
    if "--" in arguments and arguments[0] in _TAKE_COMMANDS:
        own, training = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    as_json = "--json" in own
    command = typer.main.get_command(app)
    try:
        work = command.main(own, prog_name="autotune-amp", standalone_mode=False, obj=training)
        if callable(work):
            emit(work())
    except AutotuneAmpError as error:
        return _fail(error, as_json)
    except KeyboardInterrupt:
        from autotune_amp.core.recommendation import SearchInterruptedError

        interrupted = SearchInterruptedError("Interrupted.", "Run the same command again.", (), None)
        return _fail(interrupted, as_json)
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx else "autotune-amp"
        return _fail(InvalidRequestError(error.format_message(), f"See `{path} --help`."), as_json)
    return 0


# --- what an error is to the outside -------------------------------------------------------------------------------


def _fail(error: AutotuneAmpError, as_json: bool) -> int:
    from autotune_amp.core.recommendation import SearchInterruptedError
    from autotune_amp.report.errors import error_document, error_text

    sys.stderr.write(error_text(error))
    if as_json:
        emit(error_document(error).encode())
    elif isinstance(error, SearchInterruptedError) and error.best is not None:
        emit(_result(error.best, as_json))
    return error.exit_code


# --- what goes to standard output ----------------------------------------------------------------------------------


def _result(recommendation: Recommendation, as_json: bool, path: Path | None = None) -> bytes:
    if as_json:
        return f"{recommendation.to_json()}\n".encode()
    from autotune_amp.report.terminal import print_recommendation

    shown = None if path is None else path.as_posix()
    return rendered(lambda console: print_recommendation(recommendation, console, shown))
