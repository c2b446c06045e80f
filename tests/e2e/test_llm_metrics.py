"""Metrics of a language model on a real tritonserver, and the dashboard and alerts that ask for them."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import yaml
from prometheus_client.parser import text_string_to_metric_families

from backends.llm.serving.metric_families import COUNTERS, GAUGES, histograms
from compiler.addresses import ServerOptions
from compiler.server import TritonServer
from tests.backends.llm.gguf_files import tiny_with_text
from tests.promql import Selector, grouping_labels, selectors
from tests.serving import ROOT, write_llm, write_python_model

GRAFANA = ROOT / "docs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "llm.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())
MODEL_LABELS = {"model_name": "chat", "engine": "0", "model": "chat", "version": "1"}
CONTEXT = 32768  # so long that nothing ends before it is seen to wait
PATIENCE_S = 120
Samples = dict[str, list[tuple[dict[str, str], float]]]

# What vLLM's own dashboards (examples/observability and examples/online_serving/prometheus_grafana) ask for.
VLLM_DASHBOARDS = (
    *(f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
    *(f"vllm:{name}_tokens_total" for name in ("prompt", "generation")),
    *("vllm:request_success_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *(
        f"vllm:{name}_{part}"
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
        for part in ("bucket", "sum", "count")
    ),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *(f"vllm:request_{phase}_time_seconds_sum" for phase in ("queue", "prefill", "decode")),
    "vllm:request_max_num_generation_tokens_sum",
)


@dataclass
class Live:
    """A running server, and its metrics as Prometheus reads them."""

    server: TritonServer
    client: grpc.InferenceServerClient
    arrived: SimpleQueue[tuple[Any, Any]] = field(default_factory=SimpleQueue)

    def text(self) -> str:
        with urllib.request.urlopen(self.server.addresses.metrics, timeout=PATIENCE_S) as response:
            return str(response.read().decode())

    def samples(self) -> Samples:
        """Returns name on the wire -> (labels, value) of each of its series."""
        found: Samples = {}
        text = self.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # This parser, unlike Prometheus, adds _total to the name of a counter that has none.
                name = sample.name if f"\n{sample.name}{{" in text else sample.name.removesuffix("_total")
                found.setdefault(name, []).append((sample.labels, sample.value))
        return found

    def value(self, name: str, **labels: str) -> float:
        """Returns the one number of the model with these labels."""
        wanted = {**MODEL_LABELS, **labels}
        (found,) = (v for have, v in self.samples()[name] if have == wanted)
        return found

    def wait_for(self, met: Callable[[], bool]) -> None:
        """Returns when it is so: numbers are sent now and then, not at once."""
        deadline = time.monotonic() + PATIENCE_S
        while not met():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def send(self, prompt: str, **sampling: object) -> None:
        """Sends a request over the stream."""
        inputs = []
        for name, value in (("text_input", prompt), ("sampling_parameters", json.dumps(sampling))):
            tensor = grpc.InferInput(name, [1], "BYTES")
            tensor.set_data_from_numpy(np.array([value.encode()], dtype=object))
            inputs.append(tensor)
        self.client.async_stream_infer("chat", inputs, enable_empty_final_response=True)

    def errors(self, count: int) -> list[str]:
        """Waits for so many requests to end; returns the errors among their ends."""
        errors = []
        while count:
            result, error = self.arrived.get(timeout=PATIENCE_S)
            if error is not None:
                errors.append(str(error))
                count -= 1
            else:
                count -= result.get_response().parameters["triton_final_response"].bool_param
        return errors

    def open_stream(self) -> None:
        """Opens a stream of which nothing has arrived yet; what an earlier one still says goes to nobody."""
        arrived = self.arrived = SimpleQueue()
        self.client.start_stream(lambda result, error: arrived.put((result, error)))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A tiny language model that computes two requests at a time and lets ten wait, and an echo beside it."""
    repository = tmp_path_factory.mktemp("metrics") / "repository"
    gguf = tiny_with_text(CONTEXT).write(repository.parent / "tiny.gguf")
    options = {
        "kv_cache_bytes": 64 << 20,
        "max_model_len": CONTEXT,
        "max_num_seqs": 2,
        "max_waiting": 10,
        "num_draft_tokens": 2,
    }
    write_llm(repository, "chat", gguf, **options)
    write_python_model(repository, "echo")
    with (
        TritonServer(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)) as server,
        grpc.InferenceServerClient(server.addresses.grpc) as client,
    ):
        yield Live(server, client)


@pytest.fixture(scope="module")
def served(live: Live) -> Live:
    """The server after ten requests had to wait, one was refused, all were cancelled, and four were answered."""
    live.open_stream()
    for number in range(12):
        live.send("ab" * (number + 1), max_tokens=CONTEXT, ignore_eos=True)
        if number == 1:  # the two that run, before any that waits
            live.wait_for(lambda: live.value("vllm:num_requests_running") == 2)
    live.wait_for(lambda: live.value("vllm:num_requests_waiting") == 10)
    live.send("one too many")
    assert live.errors(1)[0].find("[overloaded]") >= 0
    live.client.stop_stream(cancel_requests=True)
    live.wait_for(lambda: live.value("vllm:request_success_total", finished_reason="abort") == 12)
    before = {s: live.value(f"vllm:{s}_tokens_total") for s in ("prompt", "generation")}
    live.open_stream()
    live.send("hello", max_tokens=8, ignore_eos=True)
    live.send("again", max_tokens=8, ignore_eos=True, n=2)
    live.send("refuse me", temperature=-1)
    assert len(live.errors(3)) == 1
    live.client.stop_stream()
    live.wait_for(lambda: live.value("vllm:request_success_total", finished_reason="length") == 3)
    # The last number that a flush writes: 5 of the cancelled and all answers have 5 prompt tokens or less.
    live.wait_for(lambda: live.value("vllm:request_prefill_kv_computed_tokens_bucket", le="5.0") == 8)
    assert live.value("vllm:generation_tokens_total") == before["generation"] + 24
    assert live.value("vllm:prompt_tokens_total") == before["prompt"] + 15
    return live


def test_h18_waiting_requests_are_a_gauge_of_their_own(served: Live) -> None:
    # The fixture has seen 10 there while they waited; they were computed by nobody, and Triton's counters say nothing.
    assert served.value("vllm:num_requests_waiting") == 0
    assert served.value("vllm:num_requests_running") == 0
    assert served.value("vllm:request_queue_time_seconds_count") == 15


def test_what_was_counted(served: Live) -> None:
    assert served.value("modelkiln:requests_refused_total", reason="overloaded") == 1
    assert served.value("modelkiln:requests_refused_total", reason="invalid_request") == 1
    assert served.value("vllm:kv_cache_usage_perc") == 0
    assert served.value("modelkiln:kv_blocks", state="used") == 0
    assert served.value("vllm:request_params_n_count") == 14
    assert served.value("vllm:time_to_first_token_seconds_count") >= 5, "three answers, and the two that ran before"
    (info,) = served.samples()["vllm:cache_config_info"]
    assert info[1] == 1 and info[0].items() >= MODEL_LABELS.items()
    assert int(info[0]["num_gpu_blocks"]) == served.value("modelkiln:kv_blocks", state="free")


def test_every_metric_is_there_with_the_models_labels_and_no_other(served: Live) -> None:
    samples = served.samples()
    for family in (*GAUGES, *COUNTERS):
        if family.name == "modelkiln:spec_decode_acceptance_rate":
            continue  # appears with the first draft
        labels = set(MODEL_LABELS) | ({family.label} if family.label else set())
        for have, _ in samples[family.name]:
            assert set(have) == labels or family.name == "vllm:cache_config_info"
    ours = {name for name in samples if name.startswith(("vllm:", "modelkiln:"))}
    parts = {f"{f.name}_{part}" for f in histograms(CONTEXT) for part in ("bucket", "sum", "count")}
    assert parts <= ours
    assert ours <= parts | {family.name for family in (*GAUGES, *COUNTERS)}


def test_histograms_are_prometheus_histograms(served: Live) -> None:
    samples = served.samples()
    for family in histograms(CONTEXT):
        buckets = {float(labels["le"]): value for labels, value in samples[f"{family.name}_bucket"]}
        assert tuple(sorted(buckets)) == (*family.buckets, math.inf), family.name
        counts = [buckets[bound] for bound in sorted(buckets)]
        assert counts == sorted(counts), family.name
        assert counts[-1] == served.value(f"{family.name}_count"), family.name


def test_what_vllms_dashboards_ask_for_is_there(served: Live) -> None:
    samples = served.samples()
    assert [name for name in VLLM_DASHBOARDS if name not in samples] == []


def expressions() -> dict[str, str]:
    """Returns all that dashboard and alerts ask for, by a name to show."""
    panels = {
        f"{panel['id']} {panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    }
    return panels | {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}


def test_what_dashboard_and_alerts_ask_for_is_on_the_wire(served: Live) -> None:
    samples = served.samples()
    assert len(expressions()) > 60
    for expression in expressions().values():
        check(expression, samples)


def check(expression: str, samples: Samples) -> None:
    """Everything that an expression asks for is there."""
    asked = selectors(expression)
    assert asked
    for selector in asked:
        assert selector.metric in samples, selector.metric
        check_matchers(selector, [labels for labels, _ in samples[selector.metric]])
    labels = {label for selector in asked for have, _ in samples[selector.metric] for label in have}
    assert grouping_labels(expression) <= labels


def check_matchers(selector: Selector, have: list[dict[str, str]]) -> None:
    """Each label exists, and each value that is asked for by name does."""
    for label, operator, value in selector.matchers:
        found = {labels[label] for labels in have if label in labels}
        assert found, f"{selector.metric} has no label {label}"
        if not value.startswith("$") and operator in ("=", "=~"):
            assert set(value.split("|")) <= found, f"{selector.metric} has {label} {found}"


def test_the_check_sees_what_is_missing(served: Live) -> None:
    for wrong in (
        'vllm:num_requests_running{modelname="chat"}',
        'vllm:request_success_total{finished_reason="ended"}',
        "vllm:num_requests_runing",
        "sum by (model_nam) (vllm:num_requests_running)",
    ):
        with pytest.raises(AssertionError):
            check(wrong, served.samples())


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert DASHBOARD["id"] is None and DASHBOARD["uid"] is None, "Grafana gives them"
    assert DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie over each other"
    assert max(x for x, _ in cells) == 23
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"] == source and panel["description"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert all(target["datasource"] == source for target in panel["targets"])


def test_rows_of_the_dashboard() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        *("Latency", "Throughput", "Queue", "KV cache", "Prefix cache", "Speculation", "Structured output"),
        *("Errors", "Triton (all models)"),
    ]


def test_every_metric_is_explained() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = [family.name for family in (*GAUGES, *COUNTERS, *histograms(1))]
    names += [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_an_unloaded_model_leaves_no_numbers_behind(served: Live) -> None:
    """Runs last: the others need the model."""
    control = served.server.control
    control.unload("chat")
    served.wait_for(lambda: not any(name.startswith(("vllm:", "modelkiln:")) for name in served.samples()))
    control.unload("chat")
    control.load("chat")
    assert served.value("vllm:generation_tokens_total") == 0
    assert served.value("vllm:kv_cache_usage_perc") == 0
