"""Edits of a recommendation into a script, at the calls that were observed; changes that no edit can make are left to
be made by hand. Pure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import msgspec

from autotune_amp.command.editing.script import Flag, Script, Splice, spliced
from autotune_amp.command.messages import Site
from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.precisions import Precision

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_LIGHTNING = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_LOADERS = ("loader", "batch_sampler")
_FRAMEWORKS = ("training_arguments", "lightning_trainer", "accelerator")
_ACCUMULATION = {
    "training_arguments": "gradient_accumulation_steps",
    "lightning_trainer": "accumulate_grad_batches",
    "accelerator": "gradient_accumulation_steps",
}
# Libraries that make a framework's object from the command's arguments, and the prefix of these arguments.
_PARSERS = {"transformers.hf_argparser": "--", "lightning.pytorch.cli": "--trainer.", "jsonargparse": "--trainer."}
_TF32_SWITCH, _TF32_FLAG = "set_float32_matmul_precision", "allow_tf32"


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Setting that a run was observed to use: samples in a pass, passes in a step, precision, and the
    loader's workers.
    """

    precision: Precision
    batch_size: int
    accumulation_steps: int
    num_workers: int | None = None


class CommandFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts known about a command: its setting of today, the type of its device, its `sites` with absolute paths, the
    line of its optimizer's step, and the arguments of the process that trains. With `keeps_effective_batch_size` the
    script itself accumulates to a total.
    """

    today: Observed
    device: str
    sites: tuple[Site, ...]
    step_line: str
    arguments: tuple[str, ...]
    keeps_effective_batch_size: bool = False


class ByHand(msgspec.Struct, frozen=True, kw_only=True):
    """Change that no edit can make reliably: `what` to put at `where`, a ``path:line`` or "the command"."""

    where: str
    what: str


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """Result of editing: the new texts of files, the command to run from now on, the changes left to do by hand, and
    the setting that a run is expected to use.
    """

    texts: dict[str, str]
    command: tuple[str, ...]
    by_hand: tuple[ByHand, ...]
    expected: Observed


_Change: TypeAlias = "list[Splice] | Flag | ByHand"


def edit(sources: Mapping[str, str], seen: CommandFacts, config: AmpConfig, command: Sequence[str]) -> Edit:
    """Return the edit that writes `config` into the files `sources`, by absolute path, and into the command's
    arguments.

    Batch size and accumulation are changed together or not at all, since a change of one alone would change what the
    model learns; so are all autocast regions and the scaler.
    """
    editor = _Editor({path: Script(path, text) for path, text in sources.items()}, seen, config, tuple(command))
    editor.take(editor.batch(), batch_size=config.batch_size, accumulation_steps=config.accumulation_steps)
    if not config.as_found and config.precision != seen.today.precision:
        editor.take(list(editor.precision()) or [editor.unseen_precision()], precision=config.precision)
    if config.loss_scale is not None:
        editor.take(editor.loss_scale(config.loss_scale))
    if config.num_workers not in (None, seen.today.num_workers):
        editor.take(editor.workers(), num_workers=config.num_workers)
    by_hand = [*editor.by_hand, *_beyond_text(config)]
    texts = {
        path: spliced(text, [each for each in editor.splices if each.path == path]) for path, text in sources.items()
    }
    return Edit(
        texts={path: text for path, text in texts.items() if text != sources[path]},
        command=editor.command,
        by_hand=tuple(dict.fromkeys(by_hand)),
        expected=editor.expected,
    )


def _beyond_text(config: AmpConfig) -> Iterator[ByHand]:
    if config.pinned_modules:
        yield ByHand(where="the model", what=f"keep {', '.join(config.pinned_modules)} in fp32: no edit can")
    for name, value in config.environment.items():
        yield ByHand(where="the command", what=f"set {name}={value} before it")


@dataclass
class _Editor:
    scripts: dict[str, Script]
    seen: CommandFacts
    config: AmpConfig
    command: tuple[str, ...]
    splices: list[Splice] = field(default_factory=list)
    by_hand: list[ByHand] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = self.seen.today
        self._framework = next((name for name in _FRAMEWORKS if self._of(name)), None)

    def take(self, wishes: Iterable[tuple[ByHand, _Change]], **expected: object) -> None:
        """Make these changes if all of them can be made; else leave all of them to be made by hand, with the words
        given for each.
        """
        asked = list(wishes)
        if not asked:
            return
        splices = [splice for _, change in asked if isinstance(change, list) for splice in change]
        command: tuple[str, ...] | None = self.command
        for _, change in asked:
            if isinstance(change, Flag) and command is not None:
                command = with_flag(command, change, self.seen.arguments)
        if (
            command is None
            or any(isinstance(change, ByHand) for _, change in asked)
            or not _fit([*self.splices, *splices])
        ):
            self.by_hand += [change if isinstance(change, ByHand) else words for words, change in asked]
            return
        self.splices += splices
        self.command = command
        self.expected = msgspec.structs.replace(self.expected, **expected)

    def batch(self) -> Iterator[tuple[ByHand, _Change]]:
        """Yield the changes of the batch size and of the accumulation steps."""
        today, config = self.seen.today, self.config
        has_loader = any(site.kind in _LOADERS for site in self.seen.sites)
        total = today.batch_size * today.accumulation_steps
        if self._framework is None and not has_loader and total == config.effective_batch_size:
            return  # without a loader, the samples of a step are known, but not how they are divided
        if today.batch_size != config.batch_size:
            if self._framework == "training_arguments":
                yield from self._arguments(self._framework, "per_device_train_batch_size", str(config.batch_size))
            else:
                yield from self._loaders("batch_size", config.batch_size)
        if today.accumulation_steps != config.accumulation_steps and not self.seen.keeps_effective_batch_size:
            if self._framework is not None:
                yield from self._arguments(
                    self._framework, _ACCUMULATION[self._framework], str(config.accumulation_steps)
                )
            else:
                num = config.accumulation_steps
                what = f"take this step after every {num} backward passes, of losses divided by {num}"
                yield _only_by_hand(
                    self.seen.step_line, "take this step after every backward pass" if num == 1 else what
                )

    def workers(self) -> Iterator[tuple[ByHand, _Change]]:
        """Yield the changes of the number of loader workers."""
        if self._framework == "training_arguments":
            yield from self._arguments(self._framework, "dataloader_num_workers", str(self.config.num_workers))
        else:
            yield from self._loaders("num_workers", self.config.num_workers)

    def precision(self) -> Iterator[tuple[ByHand, _Change]]:
        """Yield the changes of the precision: in the framework's argument, else in the script's own regions, else as a
        new region.
        """
        precision, today = self.config.precision, self.seen.today.precision
        if self._framework == "training_arguments":
            for name in ("bf16", "fp16", "tf32"):
                if name in (precision, today):
                    yield from self._arguments(self._framework, name, str(name == precision))
            if precision in _DTYPES and self.seen.device == "cpu":  # Transformers requires it
                yield from self._arguments(self._framework, "use_cpu", "True")
            return
        if self._framework == "lightning_trainer":
            yield from self._arguments(self._framework, "precision", f'"{_LIGHTNING[precision]}"')
        elif self._framework == "accelerator":
            value = precision if precision in _DTYPES else "no"
            yield from self._arguments(self._framework, "mixed_precision", f'"{value}"')
        elif self._of("autocast"):
            yield from self._regions()
        elif precision in _DTYPES:
            yield from self._region_of_its_own()
        if "tf32" in (precision, today):
            yield from self._tf32()

    def unseen_precision(self) -> tuple[ByHand, _Change]:
        """Return a change by hand for a script in which every place that sets the precision already has the recommended
        one.
        """
        what = f"this steps in {self.seen.today.precision}, though nothing that was seen asks for it: see why"
        return _only_by_hand(self.seen.step_line, what)

    def loss_scale(self, scale: LossScale) -> Iterator[tuple[ByHand, _Change]]:
        """Yield the changes of the arguments of the script's own GradScalers."""
        for site in self._of("scaler"):
            for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
                value = getattr(scale, name)
                if site.values.get(name, value) != value:
                    yield self._change(site, name, f"{value!r}")

    def _of(self, kind: str) -> list[Site]:
        return [site for site in self.seen.sites if site.kind == kind]

    def _arguments(self, kind: str, name: str, value: str) -> Iterator[tuple[ByHand, _Change]]:
        for site in self._of(kind):
            if str(site.values.get(name)) != value.strip('"'):
                yield self._change(site, name, value)

    def _loaders(self, name: str, value: object) -> Iterator[tuple[ByHand, _Change]]:
        found = [site for site in self.seen.sites if site.kind in _LOADERS]
        if not found:
            where = next((site.line for site in self._of("forward")), self.seen.step_line)
            yield _only_by_hand(
                where,
                f"no DataLoader was seen: bring {value} samples here" if name == "batch_size" else f"{name}={value}",
            )
        for site in found:
            if name == "batch_size" and site.values.get(name) is None:
                yield _only_by_hand(
                    site.line, f"its dataset or sampler makes the batches: have it make them of {value}"
                )
            else:
                yield self._change(site, name, str(value))

    def _regions(self) -> Iterator[tuple[ByHand, _Change]]:
        precision = self.config.precision
        for site in self._of("autocast"):
            if bool(site.values["enabled"]) is not (precision in _DTYPES):
                yield self._change(site, "enabled", str(precision in _DTYPES))
            if precision in _DTYPES and site.values["dtype"] != _DTYPES[precision]:
                yield self._change(site, "dtype", f"torch.{_DTYPES[precision]}")
        yield from self._scalers()

    def _scalers(self) -> Iterator[tuple[ByHand, _Change]]:
        scales = self.config.precision == "fp16"
        for site in self._of("scaler"):
            if bool(site.values["enabled"]) is not scales:
                words, change = self._change(site, "enabled", str(scales))
                # A scaler does no harm with bf16; a switch elsewhere that turns it off may turn the regions off too.
                if scales or (isinstance(change, list) and self._is_at(site, change)):
                    yield words, change
        if scales and not self._of("scaler"):
            what = "fp16 needs a torch.amp.GradScaler: scale(loss).backward(), step(optimizer), update()"
            yield _only_by_hand(self.seen.step_line, what)

    def _region_of_its_own(self) -> Iterator[tuple[ByHand, _Change]]:
        """Yield the changes that put each forward pass, and the code up to the backward pass, in a new
        autocast region.
        """
        done: list[Splice] = []
        for site in self._of("forward"):
            header = f'with torch.autocast("{site.values["device"]}", dtype=torch.{_DTYPES[self.config.precision]}):'
            words = ByHand(where=site.line, what=f"put the forward pass and the loss in `{header}`")
            script, line = self._script(site)
            wrapped = None if script is None or site.maker else script.wrap(line, site.end, site.name, header)
            if script is None or wrapped is None:
                yield words, words
            elif not {(each.path, each.start) for each in wrapped[1:]} <= {(each.path, each.start) for each in done}:
                done += wrapped
                yield words, wrapped + ([] if script.imports("torch") else script.first_import("torch", "import torch"))
        if not done and not self._of("forward"):
            yield _only_by_hand(self.seen.step_line, f"put the forward pass in {self.config.precision} autocast")
        yield from self._scalers()

    def _tf32(self) -> Iterator[tuple[ByHand, _Change]]:
        """Yield the change of the switch for TF32 of the whole process: where it is set already, else below the import
        of torch.
        """
        value = '"high"' if self.config.precision == "tf32" else '"highest"'
        statement = f"torch.set_float32_matmul_precision({value})"
        words = ByHand(where=self.seen.step_line, what=f"before training, {statement}")
        found = [change for script in self.scripts.values() for change in script.calls_of(_TF32_SWITCH)]
        if len(found) == 1:
            script, call = found[0]
            yield words, script.change(call, "precision", value, ("precision",), self.seen.arguments) or words
            return
        of_step = self.scripts.get(self.seen.step_line.rpartition(":")[0])
        has_other = bool(found) or any(_TF32_FLAG in script.text for script in self.scripts.values())
        added = [] if of_step is None or has_other else of_step.below_import("torch", statement)
        yield words, added or words

    def _is_at(self, site: Site, splices: list[Splice]) -> bool:
        """Whether all splices are within the call at the site."""
        script, line = self._script(site)
        call = None if script is None else script.call(line, site.end, site.name)
        return script is not None and call is not None and all(script.holds(call, each) for each in splices)

    def _script(self, site: Site) -> tuple[Script | None, int]:
        path, _, line = site.line.rpartition(":")
        return self.scripts.get(path), int(line or 0)

    def _change(self, site: Site, name: str, value: str) -> tuple[ByHand, _Change]:
        """Return the change of the argument `name` of the call at a site, or of the command's argument if a parser made
        the call from that.
        """
        words = ByHand(where=site.line, what=f"{site.name}({name}={value})")
        if site.maker:
            prefix = next((begin for maker, begin in _PARSERS.items() if site.maker.startswith(maker)), None)
            if prefix is None:
                return words, msgspec.structs.replace(words, what=f"{words.what}, which {site.maker} makes")
            files = [each for each in self.seen.arguments if each.endswith((".json", ".yaml", ".yml"))]
            if files:
                return words, ByHand(where=files[0], what=f"{name}: {value}")
            return words, Flag(option=prefix + name, value=str(ast.literal_eval(value)))
        script, line = self._script(site)
        call = None if script is None else script.call(line, site.end, site.name)
        if script is None or call is None:
            return words, words
        change = script.change(call, name, value, site.parameters, self.seen.arguments)
        given = script.given(call, name, site.parameters)
        if name == "batch_size" and site.kind == "loader":  # a batch sampler takes its place
            sampler = script.given(call, "batch_sampler", site.parameters)
            if sampler is not None and not isinstance(sampler, ast.Starred):
                given, change = sampler, None
        if change is None:
            there = "" if given is None else f", in place of {script.source(given)}"
            words = msgspec.structs.replace(words, what=words.what + there)
            return words, words
        if isinstance(change, list) and value.startswith("torch.") and not script.imports("torch"):
            change += script.first_import("torch", "import torch")
        return words, change


def _only_by_hand(where: str, what: str) -> tuple[ByHand, ByHand]:
    words = ByHand(where=where, what=what)
    return words, words


def _fit(splices: Sequence[Splice]) -> bool:
    """Whether no two splices replace the same text by different texts."""
    ranges = sorted({(each.path, each.start, each.end, each.text) for each in splices if each.start < each.end})
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ranges))


def with_flag(command: Sequence[str], flag: Flag, arguments: Sequence[str]) -> tuple[str, ...] | None:
    """Return the command with this argument; None if the process gets the argument from elsewhere, such as a shell
    script.
    """
    option, value = flag.option, flag.value
    if not _has(command, option):
        if _has(arguments, option):
            return None
        if not flag.is_on:
            return tuple(command)
        return (*command, option) if value is None else (*command, option, value)
    changed: list[str] = []
    words = iter(enumerate(command))
    for place, word in words:
        if word.partition("=")[0] != option:
            changed.append(word)
        elif "=" in word:
            changed.append(f"{option}={value}")
        elif flag.is_on and value is None:
            changed.append(word)
        elif value is not None:
            if place + 1 < len(command) and not command[place + 1].startswith("-"):
                next(words)
            changed += [word, value]
    return tuple(changed)


def _has(command: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in command)
