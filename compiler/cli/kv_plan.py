"""`compile kv-plan`: how many requests of which length fit into a memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compiler.cli.common import EXIT_CODES, common
from perf.finite_range import FiniteRange

if TYPE_CHECKING:
    from backends.llm.capacity import KvPlan

BLOCK_SIZES = (8, 16, 32, 64, 128)
LENGTHS = (512, 2048, 8192)


def _bytes(context: click.Context, parameter: click.Parameter, text: str) -> int:
    from compiler.units import bytes_from_text

    count = bytes_from_text(text)
    if not count:
        raise click.BadParameter(f"{text[:40]!r} is not of the form 24GiB, 512MiB; allowed: KiB, MiB, GiB, TiB")
    return count


@click.command("kv-plan", epilog=EXIT_CODES)
@click.option("--model", required=True, type=click.Path(path_type=Path), help="GGUF file, folder or config.json.")
@click.option("--memory", required=True, callback=_bytes, metavar="SIZE", help="Of the device: 24GiB, 80GiB.")
@click.option(
    "--utilization",
    default=0.9,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True),
    help="Share of the memory for weights and KV cache; the rest is for what a step computes.",
)
@click.option(
    "--dtype",
    default="f16",
    show_default=True,
    type=click.Choice(["f32", "f16", "bf16", "u8"]),
    help="Of the numbers in the KV cache; u8 with its scales, as OpenVINO keeps them.",
)
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1, 1024), help="Tokens in one block.")
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=click.IntRange(1),
    help="Tokens of a request, prompt and answer; may be repeated.  [default: 512, 2048, 8192 and the longest]",
)
@click.option(
    "--weight-bits",
    type=FiniteRange(1, 64),
    help="Bits of one weight, with its share of scales.  [default: the files' own, else 16]",
)
@common
def command(
    model: Path,
    memory: int,
    utilization: float,
    dtype: str,
    block_size: int,
    lengths: tuple[int, ...],
    weight_bits: float | None,
    as_json: bool,
) -> None:
    """Say what a model's weights and KV cache take, and how many requests fit.

    A config.json is enough; no weights are read. Counted are the heads of keys and values, which are
    fewer than those of queries in most models, and whole blocks.

    \b
    Examples:
      compile kv-plan --model model.gguf --memory 8GiB
      compile kv-plan --model llama-70b/config.json --memory 80GiB --weight-bits 4.5 --length 4096
      compile kv-plan --model model/ --memory 24GiB --json | jq .fits
    """
    from backends.llm.capacity import num_parameters, plan_kv_cache
    from backends.llm.loaders.description import read_description

    config, stored = read_description(model)
    if weight_bits is not None or stored is None:
        stored = int(num_parameters(config) * (weight_bits or 16) / 8)
    longest = config.max_position_embeddings
    plan = plan_kv_cache(
        config,
        usable_bytes=int(memory * utilization),
        weight_bytes=stored,
        block_size=block_size,
        dtype=dtype,
        lengths=lengths or sorted({*(n for n in LENGTHS if n < longest), longest}),
    )
    if as_json:
        click.echo(json.dumps({"model": str(model), "memory": memory, **_to_json(plan)}))
    else:
        _print(plan)


def _to_json(plan: KvPlan) -> dict[str, Any]:
    from backends.llm.capacity import mean_waste

    waste = [
        {"block_size": size, "length": fit.length, "tokens": tokens, "share": share}
        for size in BLOCK_SIZES
        for fit in plan.fits
        for tokens, share in [mean_waste(size, fit.length)]
    ]
    return {
        **dataclasses.asdict(plan),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_block": plan.kv_bytes_per_block,
        "waste": waste,
    }


def _print(plan: KvPlan) -> None:
    from backends.llm.capacity import KV_DTYPES, mean_waste
    from compiler.units import shown_bytes

    c = plan.config
    numbers = f"{KV_DTYPES[plan.dtype]} bytes ({plan.dtype}){' and scales' if plan.dtype == 'u8' else ''}"
    click.echo(
        f"{c.architecture}: {plan.parameters / 1e6:,.0f} million parameters, {shown_bytes(plan.weight_bytes)}\n"
        f"KV cache: 2 x {c.num_hidden_layers} layers x {c.num_key_value_heads} heads x {c.head_dim} x "
        f"{numbers} = {plan.kv_bytes_per_token:,} bytes a token, "
        f"{plan.kv_bytes_per_block:,} a block of {plan.block_size}\n"
        f"of {shown_bytes(plan.usable_bytes)} the weights leave {plan.num_blocks:,} blocks: "
        f"{plan.num_blocks * plan.block_size:,} tokens\n"
    )
    if not plan.num_blocks:
        click.echo("nothing fits: the weights alone leave no room for one block\n")
    click.echo(f"{'length':>9} {'blocks':>8} {'KV of one request':>18} {'requests':>9}")
    for fit in plan.fits:
        note = (
            "" if fit.length <= c.max_position_embeddings else f"  (the model was made for {c.max_position_embeddings})"
        )
        shown = shown_bytes(fit.kv_bytes)
        click.echo(f"{fit.length:>9,} {fit.num_blocks:>8,} {shown:>18} {fit.requests:>9,}{note}")
    if c.sliding_window and any(c.windowed_layers):
        needed = ", ".join(f"{shown_bytes(f.kv_bytes_needed)} at {f.length:,}" for f in plan.fits)
        click.echo(
            f"\n{sum(c.windowed_layers)} of {c.num_hidden_layers} layers read the last {c.sliding_window:,} tokens "
            f"only. This engine keeps all tokens of all layers;\nread are: {needed}"
        )
    click.echo("\nunfilled end of a request's last block, on average:")
    click.echo(f"{'block':>9} {'tokens':>8}" + "".join(f"{f'at {f.length:,}':>12}" for f in plan.fits))
    for size in BLOCK_SIZES:
        shares = "".join(f"{mean_waste(size, f.length)[1]:>12.2%}" for f in plan.fits)
        click.echo(f"{size:>9} {mean_waste(size, 1)[0]:>8.1f}{shares}")
