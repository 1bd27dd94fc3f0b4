"""Recording of one fp32 step on the CPU, each call repeated on tensors without data under the device's autocast.

Each tensor of the step has a shadow: a fake tensor on the device, with the dtype that the tensor would have there. The
autocast of the installed torch decides which operations run in half precision, which in fp32, and which raise. The step
itself stays in fp32 on the CPU, whatever its code asks for, but its code sees the dtype of the shadow, so that it takes
the branches that it would take on the device.
"""

from __future__ import annotations

import linecache
import logging
import re
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from autotune_amp.diagnostics.check import fixes
from autotune_amp.diagnostics.check.findings import CodeLocation, Finding, make_finding
from autotune_amp.diagnostics.check.judging import CASTS, LOW, Call, call_findings
from autotune_amp.diagnostics.check.operands import OperandCheck
from autotune_amp.precision import rules
from autotune_amp.precision.forward_wrapper import can_be_wrapped, modules_by_name
from autotune_amp.precision.rules import AutocastDevice, Severity
from autotune_amp.precision.torch_state import HALF_DTYPES

Say: TypeAlias = Callable[[str], None]
SAY_SECONDS = 1.0  # between two reports of a recording's progress
_OWN = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])

# Functions that cannot be repeated without the device itself; autocast runs all of them in half precision.
_LOWERED: Final = {"lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"}
_MIXED, _NO_KERNEL = "the same dtypes are wanted", "not implemented for 'Half'"  # as the rules' patterns match them
_DTYPES = re.compile(r"dtype|scalar type|Half|float|not implemented for", re.IGNORECASE)
_DEVICE = re.compile(r"(cuda|mps|xpu)(:\d+)?")
# Methods that a recorded step calls in place of those of these names, to stay in fp32 on the CPU.
_HERE: Final[dict[str, Callable[..., Any]]] = {
    "half": Tensor.float,
    "bfloat16": Tensor.float,
    "cuda": lambda tensor, *_, **__: tensor,
}


class _Shadow(NamedTuple):
    fake: Tensor
    made_at: CodeLocation


class Recording(TorchFunctionMode):
    """Mode that records the torch calls of a step of `model` inside `running`, for the autocast of `device`.

    `findings` are those so far, `num_calls` counts the calls, `modules_run` are the names of the modules that ran.
    `say` is called with the progress every second. Weights and buffers in half precision are cast to fp32 in place.
    """

    def __init__(self, model: nn.Module, device: AutocastDevice, say: Say = lambda _: None) -> None:
        super().__init__()
        self._say, self._said_at = say, time.monotonic()
        self.findings: list[Finding] = []
        self.num_calls = 0
        self.modules_run: set[str] = set()
        self._device = device
        self._names = {module: name for name, module in modules_by_name(model).items()}
        self._inside: list[str] = []
        self._levels: list[torch.dtype | None] = [None]  # dtypes of nested autocasts, the innermost last; None if off
        self._asked: dict[int, torch.dtype | None] = {}  # dtype that each autocast was made with, by its id
        self._is_repeating = self._is_in_call = False
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake_mode:
            self._at = torch.empty(0, device=device).device
        self._operands = OperandCheck(device)
        self._reached: list[torch.dtype] = []  # dtypes given to the last operation of a failed call
        self._kept_in: set[torch.dtype] = set()  # half-precision dtypes of the weights
        self._shadows: Any = WeakTensorKeyDictionary()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (fake := self._faked(tensor, tensor.dtype)) is not None:
                self._shadows[tensor] = _Shadow(fake, CodeLocation(name.rpartition(".")[0], None, None))
            if tensor.dtype in HALF_DTYPES:
                self._kept_in.add(tensor.dtype)
                tensor.data = tensor.data.float()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the calls made in this context, and leave torch as it was."""
        with ExitStack() as stack:
            log = logging.getLogger("torch._subclasses.fake_tensor")  # it logs each call that raises
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
            for module in self._names:
                if can_be_wrapped(module):
                    stack.callback(module.register_forward_pre_hook(self._enter_module).remove)
                    stack.callback(module.register_forward_hook(self._leave_module, always_call=True).remove)
            stack.enter_context(_replaced(torch.autocast, "__init__", self._new_autocast(torch.autocast.__init__)))
            stack.enter_context(_replaced(torch.autocast, "__enter__", lambda context: self._enter_autocast(context)))
            stack.enter_context(_replaced(torch.autocast, "__exit__", lambda *_: self._leave_autocast()))
            stack.enter_context(_replaced(_last_before_cpp(), "apply", classmethod(self._apply_function)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # Activation checkpointing would compare the dtypes of the forward pass, which are the shadows', with those
            # of its repetition in the backward pass, in which nothing is recorded.
            checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
            stack.callback(checks.__setitem__, "default", checks["default"])
            checks["default"] = checks["none"]
            stack.enter_context(self._showing(None))
            stack.enter_context(self)
            yield

    def __deepcopy__(self, _: Any) -> Recording:
        """Return the recording itself: a copy that the step makes of the model has the same hooks."""
        return self

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Enter the autocast of the training step itself, to fp16."""
        self._levels.append(LOW)
        try:
            with self._showing(LOW):
                yield
        finally:
            self._levels.pop()

    def see_loss(self, loss: Tensor) -> None:
        """Add a finding if the loss, from which the backward pass starts, is in half precision."""
        self._say(f"{self.num_calls:,} calls recorded; the backward pass")
        shadow = self._shadows.get(loss)
        if shadow is not None and shadow.fake.dtype in HALF_DTYPES:
            self.findings.append(make_finding(rules.LOSS, shadow.made_at))

    # -- each call ---------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_repeating:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is torch.Tensor.dtype:
            shadow = self._shadows.get(args[0])
            return func(*args) if shadow is None else shadow.fake.dtype
        self.num_calls += 1
        if (now := time.monotonic()) - self._said_at >= SAY_SECONDS:
            self._said_at = now
            self._say(f"{self.num_calls:,} calls recorded, now in {(self._inside or [''])[-1] or 'the step itself'}")
        here = _HERE.get(name, func)
        self._is_in_call, was_in_call = True, self._is_in_call
        try:
            with self._showing(None):
                result = here(*_here(args), **_here(kwargs))
        finally:
            self._is_in_call = was_in_call
        if name in CASTS and any(result is leaf for leaf in args):
            result = result.view_as(result)  # a cast that changes nothing here may change the shadow's dtype
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made or name in ("__setitem__", "allclose"):
            self._follow(name, func, args, kwargs, made)
        return result

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
        place = self._place()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        asked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.dtype)]
        fakes, error = self._repeated(name, func, args, kwargs)
        dtypes_given = [self._dtype(tensor) for tensor in given]
        for index, tensor in enumerate(made):
            if any(tensor is one for one in given) and tensor in self._shadows:
                continue  # changed in place, and its shadow likewise
            fake = fakes[index] if index < len(fakes) else None
            dtype = self._guessed(name, tensor, asked, self._reached or dtypes_given) if fake is None else fake.dtype
            if fake is None or not self._is_usable(fake, tensor):
                fake = self._faked(tensor, dtype)
            if fake is not None:
                self._shadows[tensor] = _Shadow(fake, place)
        first = self._shadows.get(given[0]) if given else None
        call = Call(
            name=name,
            arguments=(args, kwargs),
            given=given,
            made=made,
            dtypes_given=dtypes_given,
            dtypes_made=[self._dtype(tensor) for tensor in made or given[:1]],
            error=error,
            place=place,
            made_at=CodeLocation() if first is None else first.made_at,
            kept_in=frozenset(self._kept_in),
        )
        self.findings += call_findings(call, self._device)

    def _repeated(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], str | None]:
        """Return the tensors that a call gives for the shadows, and None or the message of the error that it raises."""
        self._reached = self._operands.reached = []
        if name == "__getitem__" or name in _LOWERED:  # they need the device itself
            is_lowered = name == "__getitem__" or self._levels[-1] is not None
            return [], None if is_lowered or len(self._dtypes((args, kwargs))) < 2 else _MIXED
        try:
            with self._repeating(self._levels[-1]):
                given, named = tree_map(self._on_device, (args, kwargs))
                result = func(*given, **named)
        except Exception as error:  # the device's error, or one of fake tensors alone
            message, self._reached = str(error), self._operands.reached
            if rules.rule_of(message) is None and _DTYPES.search(message) and self._runs_in_fp32(func, args, kwargs):
                message = _MIXED if len(self._dtypes((args, kwargs))) > 1 else _NO_KERNEL
            return [], message
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)], None

    def _runs_in_fp32(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call works if all shadows among its arguments are cast to fp32."""
        with suppress(Exception), self._repeating(None):  # an error here too is not about dtypes
            given, named = tree_map(_in_fp32, tree_map(self._on_device, (args, kwargs)))
            func(*given, **named)
            return True
        return False

    @contextmanager
    def _repeating(self, dtype: torch.dtype | None) -> Iterator[None]:
        self._is_repeating = True
        is_caching = torch.is_autocast_cache_enabled()
        # The cache would keep a cast of a shadow that requires grad: C++ frees it outside the fake mode, and aborts.
        torch.set_autocast_cache_enabled(False)
        try:
            with (
                warnings.catch_warnings(),
                self._fake_mode,
                torch.no_grad(),
                self._showing(dtype, only_device=True),
                self._operands,
            ):
                warnings.simplefilter("ignore")  # the call has warned already
                yield
        finally:
            torch.set_autocast_cache_enabled(is_caching)
            self._is_repeating = False

    def _on_device(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._shadow(leaf)
        return self._at if isinstance(leaf, torch.device) else leaf

    def _shadow(self, tensor: Tensor) -> Tensor:
        if (known := self._shadows.get(tensor)) is not None:
            fake: Tensor = known.fake
            return fake
        made = self._faked(tensor, tensor.dtype)
        if made is None:
            raise NotImplementedError(f"a tensor of layout {tensor.layout} has no shadow")
        self._shadows[tensor] = _Shadow(made, self._place())
        return made

    def _faked(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        if like.layout != torch.strided or like.is_nested or nn.parameter.is_lazy(like):
            return None
        with self._fake_mode:
            return torch.empty(like.shape, dtype=dtype, device=self._device)

    def _is_usable(self, fake: Tensor, tensor: Tensor) -> bool:
        """Whether calls can be repeated on `fake` in place of `tensor`.

        It must be contiguous, since copying one that is not needs the device itself.
        """
        return fake.shape == tensor.shape and fake.device.type == self._device and fake.is_contiguous()

    def _dtypes(self, arguments: Any) -> set[torch.dtype]:
        """Return the floating-point dtypes that the tensors among the arguments would have on the device."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        return {dtype for dtype in map(self._dtype, tensors) if dtype.is_floating_point}

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        shadow = self._shadows.get(tensor)
        dtype: torch.dtype = tensor.dtype if shadow is None else shadow.fake.dtype
        return dtype

    def _guessed(self, name: str, tensor: Tensor, asked: Sequence[torch.dtype], given: Sequence[torch.dtype]) -> Any:
        """Return the dtype of a result whose call cannot be repeated: the one `asked` for, else from those `given`."""
        if asked:
            return asked[0]
        floating = [dtype for dtype in given if dtype.is_floating_point]
        if not (tensor.is_floating_point() and floating):
            return tensor.dtype
        if name in _LOWERED and self._levels[-1] is not None:
            return self._levels[-1]
        return floating[0] if name in ("batch_norm", "instance_norm") else reduce(torch.promote_types, floating)

    # -- modules, autocasts and autograd.Functions -------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self.modules_run.add(name)
        elif self._inside:  # a copy of a module, made by the step
            name = self._inside[-1]
        self._inside.append(name or "")

    def _leave_module(self, *_: Any) -> None:
        self._inside.pop()

    def _new_autocast(self, initialise: Callable[..., None]) -> Callable[..., None]:
        def remembered(
            context: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
        ) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warning that there is no such device
                initialise(context, device_type, dtype, enabled, *rest, **more)
            self._asked[id(context)] = (dtype or LOW) if enabled else None

        return remembered

    def _enter_autocast(self, context: Any) -> Any:
        made_before = context.fast_dtype if context._enabled else None
        asked = self._asked.get(id(context), made_before)
        if asked is not None and self._levels[-1] is not None and not _restores_autocast(sys._getframe(2)):
            place = self._place()
            self.findings.append(make_finding(rules.NESTED_AUTOCAST, place, mend=fixes.of_autocast(place.code)))
        self._levels.append(asked)
        self._show_level()
        return context

    def _leave_autocast(self) -> None:
        self._levels.pop()
        self._show_level()

    def _show_level(self) -> None:
        if not self._is_in_call:  # a call records nothing: in backward(), checkpointing repeats the forward pass
            _show(self._levels[-1], ("cpu", self._device))

    def _apply_function(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a Function in place of its `apply`, and repeat its forward and backward on shadows.

        Add a finding if they raise under autocast, or if autocast changes the dtypes of the outputs.
        """
        result = _apply_of(kind)(*args, **kwargs)
        if self._levels[-1] is None or kwargs or _is_decorated(kind) or kind.__module__.startswith("torch."):
            return result
        try:
            dtypes = self._function_dtypes(kind, args, self._levels[-1])
            is_lowered = dtypes != self._function_dtypes(kind, args, None)
            severity: Severity | None = "hurts" if is_lowered else None
        except Exception as error:  # the device's error, or one of fake tensors alone
            severity = "breaks" if rules.rule_of(str(error)) is not None else None
        if severity is not None:
            code = kind.forward.__code__
            place = CodeLocation(self._place().module, code.co_filename, _line_of_def(code))
            mend = fixes.of_function(self._device)
            self.findings.append(make_finding(rules.AUTOGRAD_FUNCTION, place, severity, mend=mend))
        return result

    def _function_dtypes(self, kind: Any, args: Sequence[Any], dtype: torch.dtype | None) -> list[torch.dtype]:
        """Return the dtypes of a Function's outputs for the arguments' shadows, with forward under autocast to `dtype`.

        The backward is run too, without autocast. Errors of both propagate.
        """
        context = _FunctionContext()
        with self._repeating(dtype):
            given = [self._on_device(leaf) for leaf in args]
            if kind.setup_context is torch.autograd.Function.setup_context:
                output = kind.forward(context, *given)
            else:
                output = kind.forward(*given)
                kind.setup_context(context, tuple(given), output)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        with self._repeating(None):
            kind.backward(context, *map(torch.ones_like, made))
        return [leaf.dtype for leaf in made]

    def _place(self) -> CodeLocation:
        frame = sys._getframe(1)
        while frame is not None and _is_inner(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        module = self._inside[-1] if self._inside else ""
        return CodeLocation(module, *((None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)))

    @contextmanager
    def _showing(self, dtype: torch.dtype | None, *, only_device: bool = False) -> Iterator[None]:
        """Set autocast to `dtype` (None: off) on the device and, unless `only_device`, on the CPU; restore it after."""
        places = (self._device,) if only_device else ("cpu", self._device)
        before = [(place, torch.is_autocast_enabled(place), torch.get_autocast_dtype(place)) for place in places]
        _show(dtype, places)
        try:
            yield
        finally:
            for place, was_on, dtype_before in before:
                torch.set_autocast_enabled(place, was_on)
                torch.set_autocast_dtype(place, dtype_before)


class _Always:
    """Stand-in for a tuple of True of any length."""

    def __getitem__(self, index: int) -> bool:
        return True


class _FunctionContext:
    """Stand-in for the context of an autograd.Function; the tensors saved in it can be read."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: Any = _Always()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *_: Any) -> None: ...

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore


def _apply_of(kind: Any) -> Any:
    """Return the C++ `apply` of a Function class, past the one that the recording puts in its place."""
    return super(_last_before_cpp(), kind).apply


def _last_before_cpp() -> Any:
    """Return the class whose `apply` every Function's `apply` calls last before C++.

    Before torch 2.14, `Function.apply` is Python and calls that of its base class. From 2.14 on, an `apply` that was
    taken from its class before the recording began is not seen.
    """
    kind: Any = torch.autograd.Function
    is_python = hasattr(kind.apply, "__func__")
    return torch.autograd.function._SingleLevelFunction if is_python else kind


def _line_of_def(code: CodeType) -> int:
    """Return the line of a function's ``def``, below its decorators."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    return code.co_firstlineno + next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)


def _is_decorated(kind: Any) -> bool:
    """Whether a Function's forward is decorated with custom_fwd."""
    code = getattr(kind.forward, "__code__", None)
    return code is not None and code.co_filename == torch.amp.autocast_mode.__file__


def _restores_autocast(frame: FrameType) -> bool:
    """Whether `frame`, which enters an autocast, is torch's own, as in activation checkpointing's backward pass.

    torch.amp does not count: there the autocast of a function that the user decorated is entered.
    """
    file = frame.f_code.co_filename
    return file.startswith(_TORCH) and file != torch.amp.autocast_mode.__file__


def _show(dtype: torch.dtype | None, devices: Iterable[str]) -> None:
    for device in devices:
        torch.set_autocast_enabled(device, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def raised_at(error: Exception) -> CodeLocation:
    """Return the innermost line of the user's own code that an exception passed through, else an empty location."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((CodeLocation("", file, line) for file, line in reversed(lines) if not _is_inner(file)), CodeLocation())


def _is_inner(file: str) -> bool:
    """Whether a file belongs to torch, this package or the standard library, where the user cannot fix anything."""
    if file.startswith(_TORCH) or file.startswith("<frozen"):
        return True
    if Path(file).is_relative_to(_OWN):
        return Path(file).name != "workloads.py"
    return file.startswith(_STDLIB) and not file.startswith(_PACKAGES)


def _here(arguments: Any) -> Any:
    """Return the arguments with fp32 in place of half-precision dtypes, and the CPU in place of other devices."""
    changed = [leaf for leaf in tree_leaves(arguments) if _leaf_here(leaf) is not leaf]
    return tree_map(_leaf_here, arguments) if changed else arguments


def _in_fp32(leaf: Any) -> Any:
    is_lower = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.float32, copy=True) if is_lower else leaf


def _leaf_here(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES:
        return torch.float32
    if isinstance(leaf, torch.device) and leaf.type != "cpu":
        return torch.device("cpu")
    return "cpu" if isinstance(leaf, str) and _DEVICE.fullmatch(leaf) else leaf
