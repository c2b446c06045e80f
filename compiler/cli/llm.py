"""`compile llm`: a language model checked, proved and published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from compiler.cli.build import pin_note
from compiler.cli.common import EXIT_CODES, common, repository_option
from compiler.errors import UsageError
from perf.finite_range import FiniteRange


@click.command("llm", epilog=EXIT_CODES)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="The model's name in the repository.")
@repository_option
@click.option(
    "--runner",
    type=click.Choice(["auto", "numba", "openvino", "torch"]),
    help="What computes it; auto is the faster of numba and openvino on the CPU that it finds.  [default: auto]",
)
@click.option(
    "--kv-cache-memory",
    metavar="SIZE",
    help="Memory of the KV cache, as in 2GiB.  [default: 1GiB; on a GPU what --gpu-memory-utilization leaves]",
)
@click.option("--device", help="torch: cpu, cuda, cuda:N, or auto, a GPU where there is one.  [default: cpu]")
@click.option("--dtype", help="torch: float32, bfloat16 or float16.  [default: float32]")
@click.option("--attention", help="torch: auto, plain, kernel or flashinfer.  [default: auto]")
@click.option(
    "--gpu-memory-utilization", type=float, help="torch: the share of the GPU that may be taken.  [default: 0.9]"
)
@click.option("--max-model-len", type=click.IntRange(2), help="Tokens of a prompt and its answer.  [default: 4096]")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Requests that run side by side.  [default: 64]")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Tokens of one step.  [default: 512]")
@click.option(
    "--max-waiting", type=click.IntRange(0), help="More are refused.  [default: 8 for each of --max-num-seqs]"
)
@click.option("--default-deadline-ms", type=FiniteRange(1), help="Of requests without one.  [default: none]")
@click.option("--weights", help="u8_rows; with OpenVINO u4, u8, bf16, f32 or stored.  [default: u8_rows]")
@click.option("--kv-cache-precision", help="OpenVINO: auto or u8.  [default: auto]")
@click.option("--exact", is_flag=True, default=None, help="OpenVINO: float32 throughout, to the token.")
@click.option("--num-draft-tokens", type=click.IntRange(0, 64), help="Proposed for one request and step.  [default: 0]")
@click.option(
    "--draft-model",
    type=click.Path(path_type=Path),
    help="A smaller GGUF file of the same vocabulary, which proposes tokens where that pays (up to 4).  "
    "[default: prompt lookup]",
)
@click.option("--num-threads", type=click.IntRange(1), help="On the CPU.  [default: the runner's own choice]")
@click.option("--ready-within", metavar="TIME", help="Its start may take so long, as in 10s; `compile serve` measures.")
@click.option("--force", is_flag=True, help="Publish a new version even where nothing changed.")
@common
def command(
    source: Path,
    name: str,
    repository: Path,
    ready_within: str | None,
    force: bool,
    as_json: bool,
    kv_cache_memory: str | None,
    default_deadline_ms: float | None,
    **given: Any,
) -> None:
    """Check a decoder-only language model, prove it, and publish it for the `llm` backend.

    SOURCE is a GGUF file or a Hugging Face folder (safetensors): Llama, Mistral, SmolLM, Qwen2, Qwen3 and Gemma 3.
    The logits of the runner that will serve it are compared with those of a plain decoder in float32.

    \b
    Examples:
      compile llm SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2
      compile llm ./Qwen3-0.6B --name qwen3 --kv-cache-memory 4GiB --max-num-seqs 128
      compile llm model.gguf --name exact --exact
      compile llm ./Qwen3-0.6B --name qwen3 --runner torch --device auto --dtype bfloat16
    """
    from compiler.llm.build import NUM_STAGES, compile_llm
    from compiler.progress import stderr_console, terminal_stages
    from compiler.repository import Repository
    from compiler.units import bytes_from_text, ms_from_text

    options = {key: value for key, value in given.items() if value is not None}
    if kv_cache_memory is not None:
        kv_cache_bytes = bytes_from_text(kv_cache_memory)
        if kv_cache_bytes is None:
            raise UsageError(f"--kv-cache-memory is '{kv_cache_memory}'; allowed: KiB, MiB, GiB or TiB, as in 2GiB")
        options["kv_cache_bytes"] = kv_cache_bytes
    if ready_within is not None and not ms_from_text(ready_within):
        raise UsageError(f"--ready-within is '{ready_within}'; allowed: a time such as 10s or 500ms")
    stage = terminal_stages(name, stderr_console(), NUM_STAGES)
    store = Repository(repository)
    result = compile_llm(
        source,
        name,
        store,
        options,
        ready_within=ready_within,
        default_deadline_ms=default_deadline_ms,
        force=force,
        stage=stage,
    )
    pinned = store.pinned(name)
    if as_json:
        click.echo(json.dumps({**result.to_json(), "pinned": pinned}))
        return
    state = f"built in {result.seconds:.1f} s" if result.built else "up to date"
    version = result.published.version
    click.echo(f"{name} version {version} {state}: {result.published.folder}{pin_note(version, pinned)}")
