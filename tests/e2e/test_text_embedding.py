"""The main job, through a real tritonserver and Triton's own clients, against the plain PyTorch model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from compiler.sources.factory import load_module
from compiler.spec import model_spec_from_file
from compiler.triton_config import CONFIG_FILE, config_from_text
from ensembles.text_embedding.demo import SENTENCES, reference_embeddings
from tests.e2e.conftest import SPECS
from tests.serving import environment, run_compile, serve


def _infer(module, url: str, texts: list[bytes], model: str = "text_embedding") -> np.ndarray:
    """Sends texts as one request of `len(texts)` rows with Triton's own client."""
    with module.InferenceServerClient(url) as client:
        tensor = module.InferInput("text", [len(texts), 1], "BYTES")
        tensor.set_data_from_numpy(np.array(texts, dtype=object).reshape(-1, 1))
        return client.infer(model, [tensor]).as_numpy("embedding")


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return reference_embeddings(SENTENCES)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_each_sentence_is_the_references(served, reference, protocol):
    module, url = (grpc_client, served.grpc) if protocol == "grpc" else (http_client, served.http)
    got = _infer(module, url, [s.encode() for s in SENTENCES])
    assert got.shape == (5, 384) and got.dtype == np.float32
    assert (_cosines(got, reference) >= 0.99999).all()
    assert np.abs(got - reference).max() < 1e-5


def test_a_wrong_order_would_be_noticed(served, reference):
    """The comparison above can fail: other sentences are far from the reference."""
    got = _infer(grpc_client, served.grpc, [s.encode() for s in reversed(SENTENCES)])
    assert (_cosines(got, reference) >= 0.99999).sum() == 1  # the one in the middle


def test_requests_that_are_batched_together_get_their_own_answers(served, reference):
    def ask(index: int) -> np.ndarray:
        return _infer(grpc_client, served.grpc, [SENTENCES[index % 5].encode()])[0]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(160)))
    for index, answer in enumerate(answers):
        assert np.abs(answer - reference[index % 5]).max() < 1e-5
    with grpc_client.InferenceServerClient(served.grpc) as client:
        stats = client.get_inference_statistics("minilm_encoder", as_json=True)["model_stats"][0]
    assert int(stats["execution_count"]) < int(stats["inference_count"])  # the dynamic batcher merged some


@pytest.mark.parametrize("text", ["", " ", "é ü 漢字 🎉", "x" * 5000, "word " * 3000, "\x00"])
def test_odd_texts_get_a_unit_vector(served, text):
    got = _infer(http_client, served.http, [text.encode()])
    assert np.linalg.norm(got[0]) == pytest.approx(1, abs=1e-4)


def test_text_is_cut_at_256_tokens(served):
    long, longer = ("word " * 254).encode(), ("word " * 600).encode()
    assert np.array_equal(*(_infer(grpc_client, served.grpc, [t]) for t in (long, longer)))


def test_text_that_is_no_utf8_gets_a_clear_error(served):
    with pytest.raises(InferenceServerException, match="text is not valid UTF-8: invalid start byte at byte 1"):
        _infer(grpc_client, served.grpc, [b"a\xff"])
    assert _infer(grpc_client, served.grpc, [b"still here"]).shape == (1, 384)


def _encode(url: str, ids: list[list[int]]) -> np.ndarray:
    with grpc_client.InferenceServerClient(url) as client:
        array = np.array(ids, dtype=np.int64)
        tensors = []
        for name, value in (("input_ids", array), ("attention_mask", np.ones_like(array))):
            tensors.append(grpc_client.InferInput(name, list(array.shape), "INT64"))
            tensors[-1].set_data_from_numpy(value)
        return client.infer("minilm_encoder", tensors).as_numpy("embedding")


def test_a_bad_request_fails_alone_in_its_batch(served):
    """An id outside the vocabulary; its batch mates, merged with it by the server, get right answers."""
    want = _encode(served.grpc, [[101, 7592, 102]])

    def ask(index: int) -> np.ndarray | InferenceServerException:
        try:
            return _encode(served.grpc, [[101, 30522 if index % 8 == 3 else 7592, 102]])
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(64)))
    for index, answer in enumerate(answers):
        if index % 8 == 3:
            assert isinstance(answer, InferenceServerException)
            assert "indices element out of data bounds" in str(answer) and "/onnxruntime/" not in str(answer)
        else:
            assert np.abs(answer - want).max() < 1e-6


def test_the_served_encoder_is_the_module_at_every_batch_and_mask(served):
    import torch

    model = load_module(model_spec_from_file(SPECS / "encoder.yaml"))
    rng = np.random.default_rng(0)
    for batch, length in ((1, 1), (3, 17), (32, 64)):
        ids = rng.integers(0, 30522, (batch, length))
        with torch.inference_mode():
            want = model(torch.from_numpy(ids), torch.ones(batch, length, dtype=torch.int64)).numpy()
        assert np.abs(_encode(served.grpc, ids.tolist()) - want).max() < 1e-5


def test_c05_the_server_loads_the_same_config_with_and_without_auto_complete(served, repository):
    def configs(url: str) -> dict[str, object]:
        with http_client.InferenceServerClient(url) as client:
            return {name: client.get_model_config(name) for name in served.models}

    with serve(repository, "--server-arg=--disable-auto-complete-config") as strict:
        assert configs(strict.http) == configs(served.http)


def test_a_second_build_does_nothing_and_never_imports_torch(repository):
    code = (
        "import sys; from compiler.cli import main; main(sys.argv[1:], standalone_mode=False); "
        "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules), 'a heavy import'"
    )
    before = {p: p.stat().st_mtime_ns for p in repository.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", code, "build", str(SPECS), "-r", str(repository), "--json"],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    assert [(m["model"], m["version"], m["built"]) for m in models] == [
        ("minilm_encoder", 1, False),
        ("minilm_tokenizer", 1, False),
        ("text_embedding", 1, False),
    ]
    assert {p: p.stat().st_mtime_ns for p in repository.rglob("*")} == before


def test_the_published_configs_say_what_they_should(repository):
    encoder = config_from_text((repository / "minilm_encoder" / CONFIG_FILE).read_text(), CONFIG_FILE)
    assert (encoder.name, encoder.backend, encoder.max_batch_size) == ("minilm_encoder", "onnxruntime", 32)
    ensemble = config_from_text((repository / "text_embedding" / CONFIG_FILE).read_text(), CONFIG_FILE)
    assert ensemble.max_batch_size == 32
    assert list(ensemble.output[0].dims) == [384] and list(ensemble.input[0].dims) == [1]
    manifest = json.loads((repository / "minilm_encoder" / "1" / "manifest.json").read_text())
    fused = {k: v for p in manifest["passes"] for k, v in p["counts"].items()}
    assert (fused["attention"], fused["skip_layer_normalization"], fused["bias_gelu"]) == (6, 12, 6)
    assert not any(p["dropped"] for p in manifest["passes"])
    assert re.fullmatch(r"[0-9a-f]{64}", manifest["build_key"])


def test_the_repository_has_no_findings(repository):
    done = run_compile("check", repository, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["findings"] == []


def test_metrics_are_served(served):
    import urllib.request

    with urllib.request.urlopen(served.metrics, timeout=10) as response:
        text = response.read().decode()
    assert 'nv_inference_request_success{model="text_embedding",version="1"}' in text


def test_specs_of_the_demo_lie_where_the_readme_says():
    assert sorted(p.name for p in Path(SPECS).glob("*.yaml")) == ["encoder.yaml", "ensemble.yaml", "tokenizer.yaml"]
