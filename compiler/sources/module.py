"""An nn.Module as a factory returns it, made plain: wrappers taken off, what is no plain model refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiler.errors import ModelRefused
from compiler.sources.weights import some

if TYPE_CHECKING:
    import torch


def unwrapped(module: Any, shown: str) -> torch.nn.Module:
    """Returns the module inside torch.compile, DataParallel and their like: eager PyTorch is the oracle.

    Args:
        module: what the factory returned.
        shown: how errors name the factory.

    Raises:
        ModelRefused: it is no nn.Module, or one that holds no plain PyTorch any more.
    """
    import torch

    while isinstance(module, torch.nn.Module) and (inner := _inside(module)) is not None:
        module = inner
    if not isinstance(module, torch.nn.Module):
        raise ModelRefused(f"{shown} returned {type(module).__name__}, not a torch.nn.Module")
    scripted = [n for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise ModelRefused(
            f"{shown} returned a torch.jit module{f' (in {scripted[0]})' if scripted[0] else ''}: it has no Python "
            "code left to export",
            hint="return the nn.Module that was scripted or traced, with its weights",
        )
    quantised = [f"{n} ({type(m).__name__})" for n, m in module.named_modules() if "quantized" in type(m).__module__]
    if quantised:
        raise ModelRefused(
            f"{shown} returned a model that torch.ao quantised: {some(quantised)}",
            hint="return the float model; precision: int8 or int8_dynamic in the spec quantises it for the target",
        )
    return module


def _inside(module: torch.nn.Module) -> Any:
    import torch

    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return module.module
    # torch.compile's wrapper, by what it has: its class is private.
    return getattr(module, "_orig_mod", None)


def ready(module: torch.nn.Module, shown: str) -> torch.nn.Module:
    """Returns the module on the CPU, in eval mode and without compiled parts, once it has its weights.

    Raises:
        ModelRefused: weights without numbers, or layers that stay in training mode.
    """
    import torch

    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    lazy = [n for n, p in tensors.items() if isinstance(p, torch.nn.parameter.UninitializedTensorMixin)]
    if lazy:
        raise ModelRefused(
            f"{shown}: weights that have no shape yet: {some(lazy)}",
            hint="a lazy layer gets it from its first call: call the model once in the factory",
        )
    empty = [n for n, p in tensors.items() if p.is_meta]
    if empty:
        raise ModelRefused(
            f"{shown}: weights on the meta device, which hold no numbers: {some(empty)}",
            hint="build the model on the CPU, or give it numbers: model.to_empty(device='cpu'), then its weights",
        )
    for part in module.modules():
        part._compiled_call_impl = None  # module.compile(): the oracle is eager
        for name, child in part.named_children():
            if (inner := getattr(child, "_orig_mod", None)) is not None:
                setattr(part, name, inner)
    module = module.cpu().eval()
    layers = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase, torch.nn.RReLU)
    training = [f"{n} ({type(m).__name__})" for n, m in module.named_modules() if isinstance(m, layers) and m.training]
    if training:
        raise ModelRefused(
            f"{shown}: layers that stay in training mode after eval(): {some(training)}",
            hint="their answer is random or depends on the other rows of a batch: eval() and train() of the module "
            "must reach them",
        )
    return module
