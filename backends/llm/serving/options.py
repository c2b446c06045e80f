"""What config.pbtxt says to the `llm` backend, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.errors import UsageError


@dataclass(frozen=True)
class ServiceOptions:
    """What `parameters` may hold.

    Attributes:
        default_deadline_ms: for requests without a deadline; None is no limit but `max_tokens`. Triton does not notice
            when the client of a plain HTTP request is gone, and this is what ends such an answer.
    """

    default_deadline_ms: float | None = None

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ServiceOptions:
        """Reads them; parameters that are not ours are left alone.

        Raises:
            UsageError: a value is not allowed.
        """
        text = parameters.get("default_deadline_ms")
        if text is None:
            return cls()
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1e12:  # NaN fails too
            raise UsageError(f"default_deadline_ms is '{text}' in config.pbtxt; allowed: a number above 0")
        return cls(value)


def check_instances(groups: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Refuses copies of a model on a device: each would hold it whole, and none batch the others' requests (f07).

    Args:
        groups: (count, gpus) of each instance group; no gpus is the CPU, or each GPU.

    Raises:
        UsageError: more than one instance on a device.
    """
    devices = [device for _, gpus in groups for device in gpus or [-1]]
    if any(count > 1 for count, _ in groups) or len(devices) != len(set(devices)):
        raise UsageError(
            f"instance_group has the counts {[count for count, _ in groups]}; allowed: 1 on a device, which batches "
            "all requests by itself",
            hint="how many requests run side by side is --max-num-seqs of compile llm",
        )
