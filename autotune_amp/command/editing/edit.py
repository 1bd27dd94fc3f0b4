"""Edit the text of a training script so that it uses a recommended setting, at the calls observed in a run.

Changes that cannot be edited safely are returned as instructions for the user. No file is read or written here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import msgspec

from autotune_amp.command.editing.script import Flag, Script, Splice, apply_splices
from autotune_amp.command.messages import Site
from autotune_amp.command.settable import left_to_script
from autotune_amp.core.config import SCALER_ARGUMENTS, AmpConfig, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import LOADER_ARGUMENTS

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_LIGHTNING_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# Kinds of observed calls (`Site.kind`): those that set the batch size, and those that create a framework's object.
_LOADERS = ("loader", "batch_sampler")
_FRAMEWORKS = ("training_arguments", "lightning_trainer", "accelerator")
_ACCUMULATION_ARGUMENTS = {
    "training_arguments": "gradient_accumulation_steps",
    "lightning_trainer": "accumulate_grad_batches",
    "accelerator": "gradient_accumulation_steps",
}
# Modules that create a framework's object from command-line arguments, and the prefix of these arguments.
_PREFIX_BY_PARSER = {
    "transformers.hf_argparser": "--",
    "trl.scripts._hf_argparser": "--",
    "lightning.pytorch.cli": "--trainer.",
    "jsonargparse": "--trainer.",
}
_REGION_PARAMETERS = ("device_type", "dtype", "enabled", "cache_enabled")  # of torch.autocast
_TF32_SWITCH, _TF32_FLAG = "set_float32_matmul_precision", "allow_tf32"


class RunSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Setting that a run used, as observed.

    `batch_size` is the number of samples in a forward pass, `accumulation_steps` the number of passes in an optimizer
    step, `num_workers` the number of the DataLoader's workers, None without a loader.
    """

    precision: Precision
    batch_size: int
    accumulation_steps: int
    num_workers: int | None = None


class CommandFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts observed in a run of the unchanged command.

    `today` is its setting, `device` the type of its device ("cuda"), `sites` the calls that create its loaders,
    autocast regions, scalers and framework objects, and `step_line` the call of the optimizer's step; lines are
    ``path:line`` with absolute paths. `arguments` are the command-line arguments of the training process. With
    `keeps_effective_batch_size` the script itself accumulates to a fixed effective batch size. `num_sharing` ranks
    divide a batch among them; sizes are those of all of them.
    """

    today: RunSetting
    device: str
    sites: tuple[Site, ...]
    step_line: str
    arguments: tuple[str, ...]
    keeps_effective_batch_size: bool = False
    num_sharing: int = 1


class ManualChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change for the user to make: `what` to do, and `where`: a ``path:line`` or "the command"."""

    where: str
    what: str


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """Result of editing.

    `texts` has the new texts of changed files by path, `command` the words of the new command, `by_hand` the changes
    left to the user, and `expected` the setting that a run of the edited files by the new command should use.
    """

    texts: dict[str, str]
    command: tuple[str, ...]
    by_hand: tuple[ManualChange, ...]
    expected: RunSetting


# A change is made in a file, in the command's arguments, or by the user.
_Change: TypeAlias = "list[Splice] | Flag | ManualChange"


def edit(sources: Mapping[str, str], facts: CommandFacts, config: AmpConfig, command: Sequence[str]) -> Edit:
    """Return the edit of the files `sources` (text by absolute path) and of the words of `command` that sets `config`.

    `facts` are those of a run before. Batch size and accumulation are changed together or both left to the user, since
    changing only one would change the effective batch size. So are all autocast regions and the GradScaler.
    """
    editor = _Editor({path: Script(path, text) for path, text in sources.items()}, facts, config, tuple(command))
    editor.add_changes(
        editor.batch_changes(), batch_size=config.batch_size, accumulation_steps=config.accumulation_steps
    )
    if not config.as_found and config.precision != facts.today.precision:
        editor.add_changes(
            list(editor.precision_changes()) or [editor.manual_precision_change()], precision=config.precision
        )
        editor.by_hand += editor.unobserved_regions()
    if config.num_workers not in (None, facts.today.num_workers):
        editor.add_changes(editor.worker_changes(), num_workers=config.num_workers)
    by_hand = [*editor.by_hand, *_changes_outside_scripts(config)]
    texts = {
        path: apply_splices(text, [each for each in editor.splices if each.path == path])
        for path, text in sources.items()
    }
    return Edit(
        texts={path: text for path, text in texts.items() if text != sources[path]},
        command=editor.command,
        by_hand=tuple(dict.fromkeys(by_hand)),
        expected=editor.expected,
    )


def _changes_outside_scripts(config: AmpConfig) -> Iterator[ManualChange]:
    """Yield the instructions for settings that no edited call sets: a calibrated loss scale, modules kept in fp32,
    variants of the training, and environment variables.
    """
    scales = [(name, getattr(config.loss_scale or LossScale(), name)) for name in SCALER_ARGUMENTS]
    if changed := [f"{name}={value!r}" for name, value in scales if value != getattr(LossScale(), name)]:
        yield ManualChange(where="the GradScaler", what=f"set {', '.join(changed)}")
    if config.pinned_modules:
        yield ManualChange(where="the model", what=f"keep the modules {', '.join(config.pinned_modules)} in fp32")
    for name in left_to_script(config, handled=("pinned_modules", "num_workers")):
        if name in LOADER_ARGUMENTS:
            argument = f"{name}={config.loader_arguments[name]}"
            yield ManualChange(where="the DataLoader", what=f"set {argument}")
        else:
            what = f"{config.labelled([name])}: `model, optimizer = prepare(config, model, optimizer)` sets it up"
            yield ManualChange(where="the script", what=what)
    for name, value in config.environment.items():
        yield ManualChange(where="the command", what=f"set {name}={value} before it")


@dataclass
class _Editor:
    """Collector of the changes of one edit: in the scripts' text and the command, or instructions for the user.

    Methods named `*_changes` yield pairs of an instruction for the user and the change that makes it unnecessary. A
    change that cannot be edited is itself an instruction.
    """

    scripts: dict[str, Script]
    facts: CommandFacts
    config: AmpConfig
    command: tuple[str, ...]
    splices: list[Splice] = field(default_factory=list)
    by_hand: list[ManualChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = self.facts.today
        self._framework = next((name for name in _FRAMEWORKS if self._sites_of(name)), None)

    def add_changes(self, changes: Iterable[tuple[ManualChange, _Change]], **expected: object) -> None:
        """Add the changes if all of them can be edited; else add the instructions of all of them for the user.

        `changes` are pairs of an instruction and a change, `expected` the fields of `RunSetting` that they change.
        """
        all_changes = list(changes)
        if not all_changes:
            return
        splices = [splice for _, change in all_changes if isinstance(change, list) for splice in change]
        command: tuple[str, ...] | None = self.command
        for _, change in all_changes:
            if isinstance(change, Flag) and command is not None:
                command = with_flag(command, change, self.facts.arguments)
        if (
            command is None
            or any(isinstance(change, ManualChange) for _, change in all_changes)
            or not _are_compatible([*self.splices, *splices])
        ):
            self.by_hand += [change if isinstance(change, ManualChange) else manual for manual, change in all_changes]
            return
        self.splices += splices
        self.command = command
        self.expected = msgspec.structs.replace(self.expected, **expected)

    def batch_changes(self) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes of the batch size and of the accumulation steps."""
        today, config = self.facts.today, self.config
        has_loader = any(site.kind in _LOADERS for site in self.facts.sites)
        total = today.batch_size * today.accumulation_steps
        if self._framework is None and not has_loader and total == config.effective_batch_size:
            return  # without a loader, only the number of samples in an optimizer step is known, and it is right
        if today.batch_size != config.batch_size:
            if self._framework == "training_arguments":
                yield from self._argument_changes(
                    self._framework, "per_device_train_batch_size", str(config.batch_size)
                )
            else:
                yield from self._loader_changes("batch_size", config.batch_size)
        if today.accumulation_steps != config.accumulation_steps and not self.facts.keeps_effective_batch_size:
            if self._framework is not None:
                yield from self._argument_changes(
                    self._framework, _ACCUMULATION_ARGUMENTS[self._framework], str(config.accumulation_steps)
                )
            else:
                num = config.accumulation_steps
                what = f"take this step after every {num} backward passes, and divide each loss by {num}"
                yield _manual_change(
                    self.facts.step_line, "take this step after every backward pass" if num == 1 else what
                )

    def worker_changes(self) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes of the number of loader workers."""
        if self._framework == "training_arguments":
            yield from self._argument_changes(self._framework, "dataloader_num_workers", str(self.config.num_workers))
        else:
            yield from self._loader_changes("num_workers", self.config.num_workers)

    def precision_changes(self) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes of the precision, without calls that set it already.

        They are in the framework's argument, else in the script's autocast regions, else a new region. For tf32 they
        also set the precision of matrix products.
        """
        precision, today = self.config.precision, self.facts.today.precision
        if self._framework == "training_arguments":
            for name in ("bf16", "fp16", "tf32"):
                if name in (precision, today):
                    yield from self._argument_changes(self._framework, name, str(name == precision))
            if precision in _DTYPES and self.facts.device == "cpu":  # Transformers requires it
                yield from self._argument_changes(self._framework, "use_cpu", "True")
            return
        if self._framework == "lightning_trainer":
            yield from self._argument_changes(self._framework, "precision", f'"{_LIGHTNING_PRECISIONS[precision]}"')
        elif self._framework == "accelerator":
            value = precision if precision in _DTYPES else "no"
            yield from self._argument_changes(self._framework, "mixed_precision", f'"{value}"')
        elif self._sites_of("autocast"):
            yield from self._region_changes()
        elif precision in _DTYPES:
            yield from self._new_region_changes()
        if "tf32" in (precision, today):
            yield from self._tf32_changes()

    def manual_precision_change(self) -> tuple[ManualChange, _Change]:
        """Return the instruction for steps that run in another precision than recommended, although every observed
        call sets the recommended one already.
        """
        what = f"find what sets {self.facts.today.precision} here: the observed calls do not"
        return _manual_change(self.facts.step_line, what)

    def unobserved_regions(self) -> Iterator[ManualChange]:
        """Yield the instructions for autocast calls beside the observed ones, as around an evaluation, whose own
        arguments set another precision.
        """
        dtype, sites = _DTYPES.get(self.config.precision), self._sites_of("autocast")
        observed = {(script, line) for script, line in map(self._script, sites)}
        default = "bfloat16" if self.facts.device == "cpu" else "float16"
        for script in self.scripts.values() if sites and self._framework is None else ():
            for call in script.calls_of("autocast"):
                parameters = _region_parameters(script, call)
                given = script.argument_value(call, "dtype", parameters)
                enabled = script.argument_value(call, "enabled", parameters)
                is_always_on = enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True)
                own_dtype = default if given is None else given.attr if isinstance(given, ast.Attribute) else dtype
                is_off = isinstance(enabled, ast.Constant) and not enabled.value
                differs = is_always_on if dtype is None else own_dtype != dtype and not is_off
                if differs and (script, call.lineno) not in observed:
                    argument = "enabled=False" if dtype is None else f"dtype=torch.{dtype}"
                    yield ManualChange(where=f"{script.path}:{call.lineno}", what=f"autocast({argument}) here too")

    def _sites_of(self, kind: str) -> list[Site]:
        return [site for site in self.facts.sites if site.kind == kind]

    def _argument_changes(self, kind: str, name: str, value: str) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes that set the argument `name` to `value`, Python source, in the calls of a kind."""
        for site in self._sites_of(kind):
            if str(site.values.get(name)) != value.strip('"'):
                yield self._change(site, name, value)

    def _loader_changes(self, name: str, value: object) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes that set ``batch_size`` or ``num_workers`` in the calls that create the data loaders."""
        loaders = [site for site in self.facts.sites if site.kind in _LOADERS]
        # The user sets the size of one rank; a literal that the script divides by the ranks is that of all.
        shown = self.config.batch_size // self.facts.num_sharing if name == "batch_size" else value
        if not loaders:
            where = next((site.line for site in self._sites_of("forward")), self.facts.step_line)
            yield _manual_change(
                where,
                f"no DataLoader was observed: use batches of {shown} samples here"
                if name == "batch_size"
                else f"{name}={value}",
            )
        for site in loaders:
            if name == "batch_size" and site.values.get(name) is None:
                yield _manual_change(
                    site.line, f"its dataset or sampler makes the batches: set its batch size to {shown}"
                )
            else:
                yield self._change(site, name, str(value), by_hand=str(shown))

    def _region_changes(self) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes of ``enabled`` and ``dtype`` in the script's autocast calls, and those of its GradScalers.

        Calls that have the right values are left out.
        """
        precision = self.config.precision
        for site in self._sites_of("autocast"):
            if bool(site.values["enabled"]) is not (precision in _DTYPES):
                yield self._change(site, "enabled", str(precision in _DTYPES))
            if precision in _DTYPES and site.values["dtype"] != _DTYPES[precision]:
                yield self._change(site, "dtype", f"torch.{_DTYPES[precision]}")
        yield from self._scaler_changes()

    def _scaler_changes(self) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes that enable the script's GradScalers for fp16, and else disable them if that is safe."""
        needs_scaler = self.config.precision == "fp16"
        for site in self._sites_of("scaler"):
            if bool(site.values["enabled"]) is not needs_scaler:
                manual, change = self._change(site, "enabled", str(needs_scaler))
                # With bf16 an enabled scaler does no harm; a variable that disables it may disable the regions too.
                if needs_scaler or (isinstance(change, list) and self._is_within_call(site, change)):
                    yield manual, change
        if needs_scaler and not self._sites_of("scaler"):
            what = "fp16 needs a torch.amp.GradScaler: scale(loss).backward(), step(optimizer), update()"
            yield _manual_change(self.facts.step_line, what)

    def _new_region_changes(self) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the changes that put each forward pass and the loss, up to the backward pass, in a new
        autocast region.
        """
        added: list[Splice] = []
        # The first of the splices inserts the header, each other one indents a line. If earlier splices indent all of
        # these lines, this forward pass is in an added region already.
        for site in self._sites_of("forward"):
            header = f'with torch.autocast("{site.values["device"]}", dtype=torch.{_DTYPES[self.config.precision]}):'
            manual = ManualChange(where=site.line, what=f"put the forward pass and the loss in `{header}`")
            script, line = self._script(site)
            wrapped = None if script is None or site.maker else script.put_in_block(line, site.end, site.name, header)
            if script is None or wrapped is None:
                yield manual, manual
            elif not {(each.path, each.start) for each in wrapped[1:]} <= {(each.path, each.start) for each in added}:
                added += wrapped
                yield manual, wrapped + script.import_torch()
        if not added and not self._sites_of("forward"):
            yield _manual_change(self.facts.step_line, f"put the forward pass in {self.config.precision} autocast")
        yield from self._scaler_changes()

    def _tf32_changes(self) -> Iterator[tuple[ManualChange, _Change]]:
        """Yield the change of `torch.set_float32_matmul_precision`: in its only call, else in a new one below the
        imports.
        """
        value = '"high"' if self.config.precision == "tf32" else '"highest"'
        statement = f"torch.set_float32_matmul_precision({value})"
        manual = ManualChange(where=self.facts.step_line, what=f"before training, {statement}")
        calls = [(script, call) for script in self.scripts.values() for call in script.calls_of(_TF32_SWITCH)]
        if len(calls) == 1:
            script, call = calls[0]
            yield manual, script.change(call, "precision", value, ("precision",), self.facts.arguments) or manual
            return
        step_script = self.scripts.get(self.facts.step_line.rpartition(":")[0])
        has_other = bool(calls) or any(_TF32_FLAG in script.text for script in self.scripts.values())
        inserted = [] if step_script is None or has_other else step_script.insert_below_imports(statement)
        yield manual, inserted or manual

    def _is_within_call(self, site: Site, splices: list[Splice]) -> bool:
        """Whether all splices lie within the call at the site."""
        script, line = self._script(site)
        call = None if script is None else script.call(line, site.end, site.name)
        return script is not None and call is not None and all(script.contains(call, each) for each in splices)

    def _script(self, site: Site) -> tuple[Script | None, int]:
        """Return the script of an observed call, None if its text was not given, and the call's line number."""
        path, _, line = site.line.rpartition(":")
        return self.scripts.get(path), int(line or 0)

    def _change(self, site: Site, name: str, value: str, by_hand: str | None = None) -> tuple[ManualChange, _Change]:
        """Return the change that sets the argument `name` of an observed call to `value`, Python source, preceded by
        its instruction for the user, with the value `by_hand` if that differs. If a parser of command-line arguments
        made the call, the command is changed.
        """
        manual = ManualChange(where=site.line, what=f"{site.name}({name}={by_hand or value})")
        if site.maker:
            prefix = next((begin for maker, begin in _PREFIX_BY_PARSER.items() if site.maker.startswith(maker)), None)
            if prefix is None:
                return manual, msgspec.structs.replace(manual, what=f"{manual.what}, which {site.maker} makes")
            file = _settings_file(self.facts.arguments)
            if file is not None:
                return manual, ManualChange(where=file, what=f"{name}: {value}")
            return manual, Flag(option=prefix + name, value=str(ast.literal_eval(value)))
        script, line = self._script(site)
        call = None if script is None else script.call(line, site.end, site.name)
        if script is None or call is None:
            return manual, manual
        change = script.change(call, name, value, site.parameters, self.facts.arguments)
        argument = script.argument_value(call, name, site.parameters)
        if name == "batch_size" and site.kind == "loader":  # with a batch sampler the argument is unused
            sampler = script.argument_value(call, "batch_sampler", site.parameters)
            if sampler is not None and not isinstance(sampler, ast.Starred):
                argument, change = sampler, None
        if change is None:
            replaced = "" if argument is None else f", in place of {script.source(argument)}"
            manual = msgspec.structs.replace(manual, what=manual.what + replaced)
            return manual, manual
        if isinstance(change, list) and value.startswith("torch."):
            change += script.import_torch()
        return manual, change


def _region_parameters(script: Script, call: ast.Call) -> tuple[str, ...]:
    """Return the names of the positional arguments of an autocast call: `torch.cuda.amp.autocast` and that of
    `torch.cpu.amp` begin with `enabled`.
    """
    first = call.args[0] if call.args else None
    is_enabled_first = isinstance(first, ast.Constant) and not isinstance(first.value, str)
    if is_enabled_first or script.source(call.func).endswith(("cuda.amp.autocast", "cpu.amp.autocast")):
        return ("enabled", "dtype", "cache_enabled")
    return _REGION_PARAMETERS


def _settings_file(arguments: Sequence[str]) -> str | None:
    """Return the file from which a parser of command-line arguments reads them: the only argument, or the value of
    ``--config``; None without one.
    """
    words = [part for word in arguments for part in word.split("=", 1)]
    values = [word for option, word in pairwise(words) if option in ("--config", "-c")]
    files = values or list(arguments if len(arguments) == 1 else ())
    return next((each for each in files if each.endswith((".json", ".yaml", ".yml"))), None)


def _manual_change(where: str, what: str) -> tuple[ManualChange, ManualChange]:
    """Return a change that only the user can make, as a pair like those of changes that can be edited."""
    manual = ManualChange(where=where, what=what)
    return manual, manual


def _are_compatible(splices: Sequence[Splice]) -> bool:
    """Whether no two splices replace the same text by different texts."""
    ranges = sorted({(each.path, each.start, each.end, each.text) for each in splices if each.start < each.end})
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ranges))


def with_flag(command: Sequence[str], flag: Flag, arguments: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words of the command with the flag's option set, added or removed.

    Return None if the option is not in `command` but among `arguments`, those of the training process: it is set
    elsewhere, for example in a shell script that the command runs.
    """
    option, value = flag.option, flag.value
    if not _has_option(command, option):
        if _has_option(arguments, option):
            return None
        if not flag.is_on:
            return tuple(command)
        return (*command, option) if value is None else (*command, option, value)
    changed: list[str] = []
    words = iter(enumerate(command))
    for index, word in words:
        if word.partition("=")[0] != option:
            changed.append(word)
        elif "=" in word:
            changed.append(f"{option}={value}")
        elif flag.is_on and value is None:
            changed.append(word)
        elif value is not None:
            if index + 1 < len(command) and not command[index + 1].startswith("-"):  # the old value
                next(words)
            changed += [word, value]
    return tuple(changed)


def _has_option(command: Sequence[str], option: str) -> bool:
    """Whether a word of the command is the option, alone or followed by ``=value``."""
    return any(word.partition("=")[0] == option for word in command)
