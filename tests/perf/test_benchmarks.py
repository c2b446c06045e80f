"""The peers that the benchmarks compare with do the same work, and do it right."""

from __future__ import annotations

import urllib.request

import numpy as np

from ensembles.text_embedding.demo import FOLDER, SENTENCES, reference_embeddings
from perf.benchmarks.plain_server import PlainHandler
from perf.benchmarks.served_vs_plain import figures, plain_server
from perf.load_generator import Target, run_closed
from perf.workload import Workload


def _body(text: str) -> tuple[bytes, dict[str, str]]:
    content = text.encode()
    tensor = len(content).to_bytes(4, "little") + content
    header = b'{"inputs":[{"name":"text","shape":[1,1],"datatype":"BYTES"}]}'
    return header + tensor, {"Inference-Header-Content-Length": str(len(header))}


def test_the_plain_server_answers_as_the_model_does():
    want = reference_embeddings(SENTENCES)
    with plain_server(FOLDER, 1) as address:
        for index, sentence in enumerate(SENTENCES):
            data, headers = _body(sentence)
            request = urllib.request.Request(f"http://{address}/v2/models/text_embedding/infer", data, headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                at = int(response.headers["Inference-Header-Content-Length"])
                got = np.frombuffer(response.read()[at:], dtype=np.float32)
            assert np.abs(got - want[index]).max() < 1e-5
        # The load generator understands it, too.
        data, headers = _body(SENTENCES[0])
        head = "".join(f"{k}: {v}\r\n" for k, v in {**headers, "Content-Length": len(data)}.items())
        payload = f"POST /v2/models/text_embedding/infer HTTP/1.1\r\nHost: {address}\r\n{head}\r\n".encode() + data
        records = run_closed(Target(address, "http"), Workload((payload,), 1, ""), 4, request_count=12)
    assert records.completed == 12
    rate, p50, p99, failed = figures(records)
    assert rate > 0 and 0 < p50 <= p99 and failed == 0


def test_the_plain_server_does_not_wait_for_acknowledgements():
    """Header and body in two packets would cost 40 ms a request, and flatter every ratio."""
    assert PlainHandler.disable_nagle_algorithm and PlainHandler.wbufsize != 0
