"""The servers of the served benchmarks: ours on Triton with its OpenAI front end, vLLM's, llama.cpp's.

They end with their block.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perf.benchmarks.llm.json_child import JsonChild

MODEL = "smollm2"  # its name on all of them
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 2048
_START_S = 900.0  # vLLM compiles its kernels on its first start
_STOP_S = 30.0


@dataclass(frozen=True)
class Ours:
    """Addresses of a running `compile serve`, as `host:port`."""

    grpc: str
    openai: str


@dataclass(frozen=True)
class OpenAiServer:
    """A running server with the OpenAI API.

    Attributes:
        address: `host:port`.
        keeps_connections: False where a connection ends with a streamed answer that said it would stay.
    """

    address: str
    keeps_connections: bool = True


def publish(model: Path, repository: Path, threads: int) -> Path:
    """Runs `compile llm`, which does nothing where all is as it was; returns the version's folder."""
    limits = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(MAX_MODEL_LEN))
    command = [sys.executable, "-m", "compiler.cli", "llm", str(model), "--name", MODEL, "-r", str(repository)]
    done = subprocess.run(
        [*command, *limits, "--num-threads", str(threads), "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    versions = [int(folder.name) for folder in (repository / MODEL).iterdir() if folder.name.isdigit()]
    return repository / MODEL / str(max(versions))


@contextmanager
def serve_ours(repository: Path, log: Path) -> Iterator[Ours]:
    """Runs `compile serve` with the OpenAI front end on free ports until the block ends; the log has each request."""
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--openai-port", "0")
    command = [sys.executable, "-m", "compiler.cli", "serve", str(repository), *ports, "--json"]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line or "ready" not in (ready := json.loads(line)):
                raise SystemExit(f"compile serve did not start: {line.strip()}\n{log.read_text()}")
            yield Ours(ready["grpc"], ready["openai"].removeprefix("http://").removesuffix("/v1"))
        finally:
            process.send_signal(signal.SIGTERM)


@contextmanager
def serve_vllm(python: str, folder: Path, threads: int, log: Path) -> Iterator[str]:
    """Runs vLLM's OpenAI server on a Hugging Face folder until the block ends; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model": str(folder),
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "bfloat16",
        "max-model-len": str(MAX_MODEL_LEN),
        "max-num-seqs": str(MAX_NUM_SEQS),
        "uvicorn-log-level": "warning",
    }
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    with log.open("w") as output:
        # A session of its own: its engine and workers are ended with it.
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}/v1/models", process, log)
            yield f"127.0.0.1:{port}"
        finally:
            _end_group(process)


@contextmanager
def serve_llama_cpp(python: str, model: Path, threads: int) -> Iterator[OpenAiServer]:
    """Runs llama.cpp's OpenAI server on the same file until the block ends."""
    script = Path(__file__).parent / "peers" / "llama_cpp_server.py"
    with JsonChild([python, str(script), str(model), str(threads), str(MAX_NUM_SEQS), MODEL]) as server:
        yield OpenAiServer(server.ready["address"], keeps_connections=False)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise SystemExit(f"vLLM did not start; the end of {log}:\n{end}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
