"""Weight files: read as plain data wherever that is possible, and refused where only a pickle would open them.

safetensors never run code. PyTorch files are opened with `weights_only`; that is no sandbox, and there is
no fall-back to an unsafe load: only `--trust-pickle` allows one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.errors import EnvironmentLacks, ModelRefused

if TYPE_CHECKING:
    import torch

# Before 2.10 a crafted file could write outside the tensors it declares, even under weights_only.
SAFE_TORCH = (2, 10)
PICKLES = (".pt", ".pth", ".bin")


def read_weights(path: Path, shown: str, trust_pickle: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """Reads a mapping from names to tensors.

    Args:
        path: the file.
        shown: how errors name it, such as `source.weights w.pt`.
        trust_pickle: whether a file that `weights_only` refuses may run its code.

    Returns:
        The tensors, and whether the file was let run code.

    Raises:
        ModelRefused: the file is damaged, holds code or something else than named tensors.
        EnvironmentLacks: this torch cannot open a pickle safely.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path, shown), False
    if path.suffix not in PICKLES:
        raise ModelRefused(f"{shown} has the suffix '{path.suffix}'; allowed: .safetensors, {', '.join(PICKLES)}")
    state, trusted = _unpickle(path, shown, trust_pickle)
    return _named_tensors(state, shown), trusted


def read_safetensors(path: Path, shown: str) -> dict[str, torch.Tensor]:
    """Reads all tensors of a safetensors file; its header is checked against the file's size by the library."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ModelRefused(f"{shown} is not a valid safetensors file: {error}") from error


def read_tensor_pickle(path: Path, shown: str) -> dict[str, torch.Tensor]:
    """Reads a PyTorch file with `weights_only` on, whatever is trusted."""
    return _named_tensors(_unpickle(path, shown, trust_pickle=False)[0], shown)


def pickle_notes(name: str) -> tuple[str, ...]:
    """Returns what to say of weights that were opened as a pickle, though with `weights_only`."""
    if not name.endswith(PICKLES):
        return ()
    return (f"note: {name} is a pickle; weights_only, with which it was opened, is no sandbox: prefer .safetensors",)


def _unpickle(path: Path, shown: str, trust_pickle: bool) -> tuple[Any, bool]:
    import torch

    version = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    if version < SAFE_TORCH and not trust_pickle:
        raise EnvironmentLacks(
            f"{shown} is a pickle and torch {torch.__version__} cannot open it safely (2.10 can)",
            hint="convert the weights to .safetensors, or upgrade torch",
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True), False
    except Exception as error:
        cause = " ".join(str(error).split())[:160]
        if not trust_pickle:
            raise ModelRefused(
                f"{shown} was refused: it is damaged or holds code besides tensors ({cause})",
                hint="convert it to .safetensors in a place where you trust it; "
                "`compile build --trust-pickle` runs its code, and is for files that you wrote yourself",
            ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False), True
    except Exception as error:
        raise ModelRefused(
            f"{shown} is damaged: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        ) from error


def _named_tensors(state: Any, shown: str) -> dict[str, torch.Tensor]:
    import torch

    # What torch.save(model) wrote; only --trust-pickle lets one through.
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        inner = [k for k, v in state.items() if isinstance(v, dict)] if isinstance(state, dict) else []
        found = f"it holds {some([repr(k) for k in inner])}: save one of these; " if inner else ""
        raise ModelRefused(
            f"{shown} holds {type(state).__name__}, not a mapping from names to tensors",
            hint=f"{found}save model.state_dict(), or better a .safetensors file",
        )
    return state


def some(names: list[str]) -> str:
    """Returns the first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
