"""How live tensors, arrays, modules, optimizers and loaders are read: shapes, dtypes and settings, never values."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from autotune_amp.fingerprint.code import digest, text
from autotune_amp.fingerprint.definitions import COMPILED_FROM, class_link, compiled
from autotune_amp.fingerprint.instances import settled
from autotune_amp.fingerprint.peek import instance_dict
from autotune_amp.fingerprint.values import sampled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune_amp.fingerprint.values import Handler
    from autotune_amp.fingerprint.walk import Walk

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_OPTIMIZER_STATE = frozenset({"state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called"})
# Set while a loader is iterated.
_LOADER_STATE = frozenset({"_iterator", "_IterableDataset_len_called"})


def live_handlers() -> dict[int, Handler]:
    """The handlers for what is imported; a library that is not imported can have no object in a workload."""
    found: dict[int, Handler] = {id(random.Random): lambda walk, obj: class_link(walk, type(obj))}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found |= {
            id(torch.Tensor): _tensor,
            id(torch.Generator): lambda _, obj: text("generator", str(obj.initial_seed()), str(obj.device)),
            id(torch.layout): lambda _, obj: text("layout", str(obj)),
            id(torch.nn.Module): _module,
            # A trial has none around its model.
            id(torch.nn.parallel.DistributedDataParallel): lambda walk, obj: walk.value(
                instance_dict(obj)["_modules"]["module"]
            ),
            id(torch.optim.Optimizer): _optimizer,
            id(torch.utils.data.DataLoader): _loader,
        }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found |= {
            id(numpy.ndarray): _array,
            id(numpy.ufunc): lambda _, obj: text("ufunc", obj.__name__),
        }
    numpy_random: Any = sys.modules.get("numpy.random")  # loaded when first used
    if numpy_random is not None:
        found |= {
            id(numpy_random.Generator): _numpy_generator,
            id(numpy_random.RandomState): lambda walk, obj: class_link(walk, type(obj)),
        }
    return found


def _tensor(walk: Walk, tensor: Any) -> bytes:
    """A tensor counts by its number in this part, so that tied weights show; its shape goes to the shapes."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may run code of the user's where an attribute is read
        kind = [str(tensor.dtype), tensor.device.type, str(tensor.layout), str(tensor.requires_grad)]
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            kind.append("uninitialized")
        elif tensor.layout is not torch.strided or tensor.is_nested:
            kind.append(str(tensor.dim()) if tensor.is_nested else str(tuple(tensor.shape)))
        else:
            kind += [str(tuple(tensor.shape)), str(tensor.stride())]
    return digest("tensor", class_link(walk, type(tensor)), walk.shape(text("tensor", *kind)))


def _array(walk: Walk, array: Any) -> bytes:
    numpy: Any = sys.modules["numpy"]
    get = numpy.ndarray.__dict__
    dtype, shape = get["dtype"].__get__(array), get["shape"].__get__(array)
    children = [walk.shape(text("array", str(dtype), str(shape)))]
    if dtype.hasobject and not dtype.names:
        elements = numpy.ndarray.ravel(array)
        children += [walk.child("[...]", element) for element in sampled(elements.tolist(), elements.size)]
    return digest("array", class_link(walk, type(array)), *children)


def _numpy_generator(walk: Walk, generator: Any) -> bytes:
    """By its seed. One drawn from the operating system, recognised by its size, is as good as any other."""
    sequence = getattr(generator.bit_generator, "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    is_drawn = isinstance(entropy, int) and entropy >> 64 > 0
    return digest("numpy generator", class_link(walk, type(generator)), walk.value(None if is_drawn else entropy))


def _hooks(walk: Walk, attributes: Mapping[str, Any]) -> bytes:
    found = [(name, tuple(attributes[name].values())) for name in _HOOKS if attributes.get(name)]
    return digest("hooks", *(digest(name, walk.child(f".{name}", hooks)) for name, hooks in found))


def _module(walk: Walk, module: Any) -> bytes:
    attributes = instance_dict(module)
    if COMPILED_FROM in attributes:
        return compiled(walk, attributes["_modules"]["_orig_mod"], attributes.get("dynamo_ctx"))
    own = {name: value for name, value in attributes.items() if name not in _module_internals()}
    groups = [attributes.get(name) or {} for name in ("_parameters", "_buffers", "_modules")]
    return digest(
        "module",
        class_link(walk, type(module)),
        walk.value(attributes.get("training")),
        walk.value(attributes.get("_non_persistent_buffers_set")),
        *(
            digest("entry", text("name", name), walk.child(f".{name}", value))
            for group in groups
            for name, value in group.items()
        ),
        _hooks(walk, attributes),
        walk.attributes(settled(type(module), own)),
    )


_internals: frozenset[str] = frozenset()


def _module_internals() -> frozenset[str]:
    """The attributes that every module has, in this version of torch."""
    global _internals
    if not _internals:
        torch: Any = sys.modules["torch"]
        _internals = frozenset(vars(torch.nn.Module()))
    return _internals


def _optimizer(walk: Walk, optimizer: Any) -> bytes:
    attributes = instance_dict(optimizer)
    own = {
        name: value
        for name, value in attributes.items()
        if name not in _OPTIMIZER_STATE and not name.endswith("_hooks") and not name.startswith("_warned")
    }
    groups = [
        {name: len(value) if name == "params" else value for name, value in group.items()}
        for group in attributes.get("param_groups", ())
    ]
    return digest(
        "optimizer",
        class_link(walk, type(optimizer)),
        walk.child(".param_groups", groups),
        _hooks(walk, attributes),
        walk.attributes(own),
    )


def _loader(walk: Walk, loader: Any) -> bytes:
    own = {name: value for name, value in instance_dict(loader).items() if name not in _LOADER_STATE}
    return digest("loader", class_link(walk, type(loader)), walk.attributes(own))
