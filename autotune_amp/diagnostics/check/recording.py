"""Records one fp32 step, and repeats each call on tensors without data under the device's autocast.

Each tensor of the step has a shadow: a fake tensor on the device, with the dtype that the tensor would have there. The
autocast of the installed torch decides which operations run in half precision, which in fp32, and which raise. The step
itself stays in fp32 where its model is, a Workload's on the CPU, whatever its code asks for, but its code sees the
dtype of the shadow, so that it takes the same branches as on the device.
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
from functools import partial, reduce
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
from autotune_amp.diagnostics.check.judging import AUTOCAST_DTYPE, CAST_METHODS, Call, call_findings
from autotune_amp.diagnostics.check.operands import OperandCheck
from autotune_amp.precision import rules
from autotune_amp.precision.forward_wrapper import can_be_wrapped, modules_by_name
from autotune_amp.precision.rules import AutocastDevice, Severity
from autotune_amp.precision.torch_state import HALF_DTYPES, is_packed

ProgressCallback: TypeAlias = Callable[[str], None]
PROGRESS_SECONDS = 1.0  # least time between two reports of the progress
_PACKAGE_FOLDER = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])

# Functions that cannot be repeated without the device itself; autocast runs all of them in half precision.
_HALF_UNDER_AUTOCAST: Final = {"lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"}
_MIXED, _NO_KERNEL = "the same dtypes are wanted", "not implemented for 'Half'"  # as the rules' patterns match them
_DTYPES = re.compile(r"dtype|scalar type|Half|float|not implemented for", re.IGNORECASE)
_DEVICE = re.compile(r"(cuda|mps|xpu)(:\d+)?")
# Replacements for tensor methods, by name, that keep the recorded step in fp32.
_FP32_METHODS: Final[dict[str, Callable[..., Any]]] = {"half": Tensor.float, "bfloat16": Tensor.float}


class _Shadow(NamedTuple):
    """Fake tensor that stands for a tensor of the step, and the line of code that created the tensor."""

    fake: Tensor
    created_at: CodeLocation


class StepRecorder(TorchFunctionMode):
    """Mode that records the torch calls of a step of `model` inside `recording`, for the autocast of `device`.

    `findings` are those so far, `num_calls` counts the calls, `modules_run` are the names of the modules that ran.
    `on_progress` is called with a line of text at most once a second. Weights and buffers in half precision
    are cast to fp32 in place.
    """

    def __init__(
        self, model: nn.Module, device: AutocastDevice, on_progress: ProgressCallback = lambda _: None
    ) -> None:
        super().__init__()
        self._on_progress, self._reported_at = on_progress, time.monotonic()
        self.findings: list[Finding] = []
        self.num_calls = 0
        self.modules_run: set[str] = set()
        self._device = device
        self._is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._names = {module: name for name, module in modules_by_name(model).items()}
        self._module_stack: list[str] = []
        # Dtypes of the nested autocasts that the step has entered, the innermost last; None for a disabled one.
        self._autocast_dtypes: list[torch.dtype | None] = [None]
        self._requested_dtypes: dict[int, torch.dtype | None] = {}  # of each autocast, by its id
        self._is_repeating = self._is_in_call = False
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake_mode:
            self._fake_device = torch.empty(0, device=device).device
        self._operands = OperandCheck(device)
        self._operand_dtypes: list[torch.dtype] = []  # of the last operation of a failed call
        self._weight_dtypes: set[torch.dtype] = set()  # half-precision dtypes of the weights
        self._shadows: Any = WeakTensorKeyDictionary()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (fake := self._make_fake(tensor, tensor.dtype)) is not None:
                self._shadows[tensor] = _Shadow(fake, CodeLocation(name.rpartition(".")[0], None, None))
            if tensor.dtype in HALF_DTYPES and not is_packed(tensor):
                self._weight_dtypes.add(tensor.dtype)
                tensor.data = tensor.data.float()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in this context; afterwards remove all hooks and patches from torch and the model."""
        with ExitStack() as stack:
            log = logging.getLogger("torch._subclasses.fake_tensor")  # it logs each call that raises
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
            for module in self._names:
                if can_be_wrapped(module):
                    stack.callback(module.register_forward_pre_hook(self._enter_module).remove)
                    stack.callback(module.register_forward_hook(self._leave_module, always_call=True).remove)
            stack.enter_context(
                _attribute_replaced(torch.autocast, "__init__", self._recording_init(torch.autocast.__init__))
            )
            stack.enter_context(
                _attribute_replaced(torch.autocast, "__enter__", lambda context: self._enter_autocast(context))
            )
            stack.enter_context(_attribute_replaced(torch.autocast, "__exit__", lambda *_: self._leave_autocast()))
            stack.enter_context(
                _attribute_replaced(_class_of_last_python_apply(), "apply", classmethod(self._apply_function))
            )
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # Activation checkpointing would compare the dtypes of the forward pass, which are the shadows', with those
            # of its repetition in the backward pass, in which nothing is recorded.
            checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
            stack.callback(checks.__setitem__, "default", checks["default"])
            checks["default"] = checks["none"]
            stack.enter_context(self._autocast_set_to(None))
            stack.enter_context(self)
            yield

    def __deepcopy__(self, _: Any) -> StepRecorder:
        """Return self, so that a copy that the step makes of the model is recorded too."""
        return self

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context manager for the forward pass: autocast to fp16, as the training loop would enable it."""
        self._autocast_dtypes.append(AUTOCAST_DTYPE)
        try:
            with self._autocast_set_to(AUTOCAST_DTYPE):
                yield
        finally:
            self._autocast_dtypes.pop()

    def check_loss(self, loss: Tensor) -> None:
        """Add a finding if the loss, from which the backward pass starts, is in half precision."""
        self._on_progress(f"{self.num_calls:,} calls recorded; the backward pass")
        shadow = self._shadows.get(loss)
        if shadow is not None and shadow.fake.dtype in HALF_DTYPES:
            self.findings.append(make_finding(rules.LOSS, shadow.created_at))

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
        if (now := time.monotonic()) - self._reported_at >= PROGRESS_SECONDS:
            self._reported_at = now
            self._on_progress(
                f"{self.num_calls:,} calls recorded, now in {(self._module_stack or [''])[-1] or 'the step itself'}"
            )
        recorded_func = _FP32_METHODS.get(name, func)
        if name == "cuda" and self._is_on_cpu:
            recorded_func = _unmoved
        self._is_in_call, was_in_call = True, self._is_in_call
        try:
            with self._autocast_set_to(None):
                result = recorded_func(*self._as_recorded(args), **self._as_recorded(kwargs))
        finally:
            self._is_in_call = was_in_call
        if name in CAST_METHODS and any(result is leaf for leaf in args):
            result = result.view_as(result)  # a cast that changes nothing here may change the shadow's dtype
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if outputs or name in ("__setitem__", "allclose"):
            self._record_call(name, func, args, kwargs, outputs)
        return result

    def _as_recorded(self, arguments: Any) -> Any:
        """Return the arguments with fp32 in place of half-precision dtypes and, if the step runs on the CPU, with the
        CPU in place of other devices.
        """
        leaf_as_recorded = partial(_leaf_as_recorded, is_on_cpu=self._is_on_cpu)
        changed = [leaf for leaf in tree_leaves(arguments) if leaf_as_recorded(leaf) is not leaf]
        return tree_map(leaf_as_recorded, arguments) if changed else arguments

    def _record_call(self, name: str, func: Any, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        """Repeat a call on the shadows, give its `outputs` shadows, and add the findings of the call."""
        location = self._user_location()
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        requested_dtypes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.dtype)]
        fake_outputs, error = self._repeat_call(name, func, args, kwargs)
        input_dtypes = [self._dtype(tensor) for tensor in inputs]
        for index, tensor in enumerate(outputs):
            if any(tensor is input_ for input_ in inputs) and tensor in self._shadows:
                continue  # changed in place, as is its shadow
            fake = fake_outputs[index] if index < len(fake_outputs) else None
            dtype = (
                self._guess_dtype(name, tensor, requested_dtypes, self._operand_dtypes or input_dtypes)
                if fake is None
                else fake.dtype
            )
            if fake is None or not self._is_usable(fake, tensor):
                fake = self._make_fake(tensor, dtype)
            if fake is not None:
                self._shadows[tensor] = _Shadow(fake, location)
        shadow = self._shadows.get(inputs[0]) if inputs else None
        call = Call(
            name=name,
            arguments=(args, kwargs),
            inputs=inputs,
            outputs=outputs,
            input_dtypes=input_dtypes,
            output_dtypes=[self._dtype(tensor) for tensor in outputs or inputs[:1]],
            error=error,
            location=location,
            input_created_at=CodeLocation() if shadow is None else shadow.created_at,
            weight_dtypes=frozenset(self._weight_dtypes),
        )
        self.findings += call_findings(call, self._device)

    def _repeat_call(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], str | None]:
        """Run a call on its arguments' shadows under autocast; return its outputs, and its error message or None."""
        self._operand_dtypes = self._operands.last_dtypes = []
        if name == "__getitem__" or name in _HALF_UNDER_AUTOCAST:  # not possible without the device
            has_known_dtype = name == "__getitem__" or self._autocast_dtypes[-1] is not None
            return [], None if has_known_dtype or len(self._dtypes((args, kwargs))) < 2 else _MIXED
        try:
            with self._repeating_calls(self._autocast_dtypes[-1]):
                fake_args, fake_kwargs = tree_map(self._on_device, (args, kwargs))
                result = func(*fake_args, **fake_kwargs)
        except Exception as error:  # as on the device, or a limitation of fake tensors
            message, self._operand_dtypes = str(error), self._operands.last_dtypes
            if rules.rule_of(message) is None and _DTYPES.search(message) and self._runs_in_fp32(func, args, kwargs):
                message = _MIXED if len(self._dtypes((args, kwargs))) > 1 else _NO_KERNEL
            return [], message
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)], None

    def _runs_in_fp32(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call works if all shadows among its arguments are cast to fp32."""
        with suppress(Exception), self._repeating_calls(None):  # an error here too is not about dtypes
            fake_args, fake_kwargs = tree_map(_leaf_in_fp32, tree_map(self._on_device, (args, kwargs)))
            func(*fake_args, **fake_kwargs)
            return True
        return False

    @contextmanager
    def _repeating_calls(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Run calls on fake tensors in this context, under the device's autocast to `dtype` (None: off)."""
        self._is_repeating = True
        is_caching = torch.is_autocast_cache_enabled()
        # The cache would keep a cast of a shadow that requires grad: C++ frees it outside the fake mode, and aborts.
        torch.set_autocast_cache_enabled(False)
        try:
            with (
                warnings.catch_warnings(),
                self._fake_mode,
                torch.no_grad(),
                self._autocast_set_to(dtype, only_device=True),
                self._operands,
            ):
                warnings.simplefilter("ignore")  # the call has warned already
                yield
        finally:
            torch.set_autocast_cache_enabled(is_caching)
            self._is_repeating = False

    def _on_device(self, leaf: Any) -> Any:
        """Return the shadow of a tensor, and the recorded device for any device; other leaves unchanged."""
        if isinstance(leaf, Tensor):
            return self._shadow(leaf)
        return self._fake_device if isinstance(leaf, torch.device) else leaf

    def _shadow(self, tensor: Tensor) -> Tensor:
        if (shadow := self._shadows.get(tensor)) is not None:
            fake: Tensor = shadow.fake
            return fake
        new_fake = self._make_fake(tensor, tensor.dtype)
        if new_fake is None:
            raise NotImplementedError(f"a tensor of layout {tensor.layout} has no shadow")
        self._shadows[tensor] = _Shadow(new_fake, self._user_location())
        return new_fake

    def _make_fake(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
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

    def _guess_dtype(
        self, name: str, tensor: Tensor, requested_dtypes: Sequence[torch.dtype], input_dtypes: Sequence[torch.dtype]
    ) -> Any:
        """Return the dtype of a result whose call cannot be repeated: the requested one, else that of the inputs."""
        if requested_dtypes:
            return requested_dtypes[0]
        floating = [dtype for dtype in input_dtypes if dtype.is_floating_point]
        if not (tensor.is_floating_point() and floating):
            return tensor.dtype
        if name in _HALF_UNDER_AUTOCAST and self._autocast_dtypes[-1] is not None:
            return self._autocast_dtypes[-1]
        return floating[0] if name in ("batch_norm", "instance_norm") else reduce(torch.promote_types, floating)

    # -- modules, autocasts and autograd.Functions -------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self.modules_run.add(name)
        elif self._module_stack:  # a copy of a module, made by the step
            name = self._module_stack[-1]
        self._module_stack.append(name or "")

    def _leave_module(self, *_: Any) -> None:
        self._module_stack.pop()

    def _recording_init(self, initialise: Callable[..., None]) -> Callable[..., None]:
        def init(
            context: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
        ) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warning that there is no such device
                initialise(context, device_type, dtype, enabled, *rest, **more)
            self._requested_dtypes[id(context)] = (dtype or AUTOCAST_DTYPE) if enabled else None

        return init

    def _enter_autocast(self, context: Any) -> Any:
        dtype = self._region_dtype(context)
        if dtype is not None and self._autocast_dtypes[-1] is not None and not _restores_autocast(sys._getframe(2)):
            location = self._user_location()
            self.findings.append(
                make_finding(rules.NESTED_AUTOCAST, location, mend=fixes.autocast_advice(location.code))
            )
        self._autocast_dtypes.append(dtype)
        self._apply_innermost_autocast()
        return context

    def _region_dtype(self, context: Any) -> torch.dtype | None:
        """Return the dtype that an autocast asks for, None for a disabled one."""
        dtype_before_recording = context.fast_dtype if context._enabled else None
        return self._requested_dtypes.get(id(context), dtype_before_recording)

    def _leave_autocast(self) -> None:
        self._autocast_dtypes.pop()
        self._apply_innermost_autocast()

    def _apply_innermost_autocast(self) -> None:
        if not self._is_in_call:  # a call records nothing: in backward(), checkpointing repeats the forward pass
            _set_autocast(self._autocast_dtypes[-1], ("cpu", self._device))

    def _apply_function(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Replacement for `autograd.Function.apply`: run the Function, then its forward and backward on shadows.

        Add a finding if they raise under autocast, or if autocast changes the dtypes of the outputs.
        """
        result = _original_apply(kind)(*args, **kwargs)
        if self._autocast_dtypes[-1] is None or kwargs or _is_decorated(kind) or kind.__module__.startswith("torch."):
            return result
        try:
            dtypes = self._function_dtypes(kind, args, self._autocast_dtypes[-1])
            is_changed = dtypes != self._function_dtypes(kind, args, None)
            severity: Severity | None = "hurts" if is_changed else None
        except Exception as error:  # as on the device, or a limitation of fake tensors
            severity = "breaks" if rules.rule_of(str(error)) is not None else None
        if severity is not None:
            code = kind.forward.__code__
            location = CodeLocation(self._user_location().module, code.co_filename, _line_of_def(code))
            mend = fixes.function_advice(self._device)
            self.findings.append(make_finding(rules.AUTOGRAD_FUNCTION, location, severity, mend=mend))
        return result

    def _function_dtypes(self, kind: Any, args: Sequence[Any], dtype: torch.dtype | None) -> list[torch.dtype]:
        """Return the dtypes of a Function's outputs for the arguments' shadows, with forward under autocast to `dtype`.

        The backward is run too, without autocast. Errors of both propagate.
        """
        context = _FunctionContext()
        with self._repeating_calls(dtype):
            fake_args = [self._on_device(leaf) for leaf in args]
            if kind.setup_context is torch.autograd.Function.setup_context:
                output = kind.forward(context, *fake_args)
            else:
                output = kind.forward(*fake_args)
                kind.setup_context(context, tuple(fake_args), output)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        with self._repeating_calls(None):
            kind.backward(context, *map(torch.ones_like, outputs))
        return [leaf.dtype for leaf in outputs]

    def _user_location(self) -> CodeLocation:
        """Return the running module and the innermost line of the user's code on the stack."""
        frame = sys._getframe(1)
        while frame is not None and _is_library_file(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        module = self._module_stack[-1] if self._module_stack else ""
        return CodeLocation(module, *((None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)))

    @contextmanager
    def _autocast_set_to(self, dtype: torch.dtype | None, *, only_device: bool = False) -> Iterator[None]:
        """Set autocast to `dtype` (None: off) on the device and, unless `only_device`, on the CPU; restore it after."""
        device_types = (self._device,) if only_device else ("cpu", self._device)
        before = [
            (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in device_types
        ]
        _set_autocast(dtype, device_types)
        try:
            yield
        finally:
            for device_type, was_enabled, dtype_before in before:
                torch.set_autocast_enabled(device_type, was_enabled)
                torch.set_autocast_dtype(device_type, dtype_before)


class _AlwaysTrue:
    """Stand-in for a tuple of True of any length."""

    def __getitem__(self, index: int) -> bool:
        return True


class _FunctionContext:
    """Replacement for the `ctx` of an autograd.Function, without autograd."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: Any = _AlwaysTrue()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *_: Any) -> None: ...

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore


def _original_apply(kind: Any) -> Any:
    """Return the original `apply` of a Function class, which the recorder has replaced."""
    return super(_class_of_last_python_apply(), kind).apply


def _class_of_last_python_apply() -> Any:
    """Return the class whose `apply` is the last one in Python that every Function calls before C++.

    Before torch 2.14, `Function.apply` is Python and calls that of its base class. From 2.14 on, an `apply` that was
    taken from its class before the recording began is not recorded.
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


def _set_autocast(dtype: torch.dtype | None, devices: Iterable[str]) -> None:
    """Set autocast to `dtype` (None: off) on these device types."""
    for device in devices:
        torch.set_autocast_enabled(device, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


@contextmanager
def _attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute within the context."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def location_of_error(error: Exception) -> CodeLocation:
    """Return the innermost line of the user's own code that an exception passed through, else an empty location."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next(
        (CodeLocation("", file, line) for file, line in reversed(lines) if not _is_library_file(file)), CodeLocation()
    )


def _is_library_file(file: str) -> bool:
    """Whether a file belongs to torch, this package or the standard library, where the user cannot fix anything."""
    if file.startswith(_TORCH) or file.startswith("<frozen"):
        return True
    if Path(file).is_relative_to(_PACKAGE_FOLDER):
        return Path(file).name != "workloads.py"
    return file.startswith(_STDLIB) and not file.startswith(_PACKAGES)


def _unmoved(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the tensor, in place of a copy of it on a GPU."""
    return tensor


def _leaf_in_fp32(leaf: Any) -> Any:
    is_lower = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.float32, copy=True) if is_lower else leaf


def _leaf_as_recorded(leaf: Any, *, is_on_cpu: bool) -> Any:
    """Return fp32 for a half-precision dtype and, if the step `is_on_cpu`, the CPU for a device; else the leaf."""
    if isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES:
        return torch.float32
    if isinstance(leaf, torch.device) and leaf.type != "cpu" and is_on_cpu:
        return torch.device("cpu")
    return "cpu" if is_on_cpu and isinstance(leaf, str) and _DEVICE.fullmatch(leaf) else leaf
