"""What a candidate does when it is served: a real tritonserver, real requests, and the spec's SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.addresses import ServerOptions
from compiler.cases import make_case
from compiler.errors import EnvironmentLacks, ModelRefused, RepositoryError
from compiler.goals import SloSpec
from compiler.repository import Repository
from compiler.server import TritonServer, require_numpy_1
from compiler.spec import ModelSpec
from compiler.tensors import BATCH_DIM
from compiler.triton_install import find_triton

if TYPE_CHECKING:
    from compiler.candidates import Candidate
    from perf.measurement import Measurement

NUM_REQUESTS = 16  # distinct ones: a server that caches must not see one only
WINDOW_S, MAX_WINDOWS = 2.0, 6


@dataclass(frozen=True)
class Served:
    """A candidate under load.

    Attributes:
        p50_ms, percentile_ms: of the latencies of one request, client to client; the SLO's percentile.
        throughput_rps: requests that were answered per second.
        goodput_rps: those within the SLO's limit per second.
        samples: how many answers the latencies stand on.
        failed: requests that were answered with an error.
        stable: whether the last windows agree.
    """

    p50_ms: float
    percentile_ms: float
    throughput_rps: float
    goodput_rps: float
    samples: int
    failed: int
    stable: bool

    def meets(self, slo: SloSpec) -> bool:
        return self.failed == 0 and self.percentile_ms <= slo.limit_ms

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def require_server() -> None:
    """Raises EnvironmentLacks with the install command, before anything slow, where no server can be started."""
    require_numpy_1()
    find_triton()


def serve_candidates(
    candidates: Sequence[Candidate],
    spec: ModelSpec,
    slo: SloSpec,
    config_of: Callable[[Candidate], str],
    work: Path,
    on_candidate: Callable[[int, int], None] = lambda done, total: None,
) -> list[Candidate]:
    """Serves the proved candidates one after the other and measures each; the others come back as they are.

    Args:
        candidates: what was built.
        spec: the model's spec; requests are of one row at the opt sizes.
        slo: the load, and the limit that goodput counts by.
        config_of: gives a candidate's config.pbtxt.
        work: a folder for the repositories.
        on_candidate: called with (done, total).
    """
    found: list[Candidate] = []
    for done, candidate in enumerate(candidates, start=1):
        if not candidate.refused:
            repository = Repository(work / f"repository-{done}" / "models")
            repository.publish(spec.name, config_of(candidate), candidate.folder, {})
            try:
                candidate = replace(candidate, served=_measure(repository.path, spec, slo))
            except (ModelRefused, RepositoryError, EnvironmentLacks) as error:
                candidate = replace(candidate, refused=f"it cannot be served here: {error.message}")
        found.append(candidate)
        on_candidate(done, len(candidates))
    return found


def choose_served(candidates: Sequence[Candidate], slo: SloSpec, table: Callable[[], list[str]]) -> Candidate:
    """Returns the candidate with the greatest goodput among those that meet the SLO.

    Raises:
        ModelRefused: none does; the message has the table.
    """
    meeting = [(c.served.goodput_rps, c) for c in candidates if not c.refused and c.served and c.served.meets(slo)]
    if not meeting:
        raise ModelRefused(
            f"no candidate meets {slo}:\n  " + "\n  ".join(table()),
            hint="allow more time, fewer requests at once, or more candidates (--target auto --precision auto)",
        )
    return max(meeting, key=lambda pair: pair[0])[1]


def _measure(repository: Path, spec: ModelSpec, slo: SloSpec) -> Served:
    """Starts a server on free ports and sends requests in a closed loop."""
    from clients.errors import ClientError
    from perf.arrivals import ClosedLoop
    from perf.errors import PerfError
    from perf.load_generator import Target
    from perf.measurement import Settings, measure_level

    settings = Settings(
        interval_s=WINDOW_S,
        max_trials=MAX_WINDOWS,
        warmup_requests=4 * slo.concurrency,
        percentile=slo.percentile,
        goodput_limits_ms={"request_latency": slo.limit_ms},
    )
    with TritonServer(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)) as server:
        target = Target(server.addresses.http, "http")
        try:
            workload = _workload(spec, target.address)
            return _figures(measure_level(target, workload, ClosedLoop(slo.concurrency), settings), slo)
        except (PerfError, ClientError) as error:
            raise ModelRefused(str(error)) from error


def _workload(spec: ModelSpec, address: str) -> Any:
    """Makes requests of one row at the opt sizes, with the values that the spec allows."""
    from clients.http import HttpClient
    from perf.workload import Workload, batch_samples, serialise

    with HttpClient(address) as client:
        metadata = client.metadata(spec.name)
    wanted = [tensor.name for tensor in metadata.inputs]  # a pass may have pruned one
    sizes = {name: 1 if name == BATCH_DIM else dim.opt for name, dim in spec.dims.items()}
    cases = [make_case(spec, f"served_{n}", sizes, padded=False) for n in range(NUM_REQUESTS)]
    batched = spec.max_batch_size > 0
    samples = [{n: case.inputs[n][0] if batched else case.inputs[n] for n in wanted} for case in cases]
    payloads = serialise(metadata, batch_samples(metadata, samples, 1), "http", address)
    return Workload(payloads, 1, f"{len(payloads)} requests at the opt sizes")


def _figures(measured: Measurement, slo: SloSpec) -> Served:
    latency = measured.latency
    if latency is None:
        raise ModelRefused("; ".join(measured.warnings) or "no request was answered")
    return Served(
        p50_ms=round(latency.percentiles["p50"], 3),
        percentile_ms=round(latency.percentiles[f"p{slo.percentile:g}"], 3),
        throughput_rps=round(measured.throughput_rps, 2),
        goodput_rps=round(measured.goodput_rps or 0.0, 2),
        samples=latency.samples,
        failed=measured.failed,
        stable=bool(measured.stable),
    )
