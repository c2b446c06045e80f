"""`compile explain`: what was done to a model's graph, in words, from its manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.errors import RepositoryError
from compiler.repository import Published


def explanation(published: Published) -> dict[str, Any]:
    """Returns the graph before and after, and what each pass did.

    Raises:
        RepositoryError: an ensemble or a Python step, which have no graph.
    """
    manifest = published.manifest
    graph = manifest.get("graph")
    if not isinstance(graph, dict):
        raise RepositoryError(f"{published.model} version {published.version} has no graph: only compiled models do")
    return {
        "model": published.model,
        "version": published.version,
        "target": manifest["target"],
        "precision": manifest["precision"],
        "sizes": graph["sizes"],
        "before": graph["exported"],
        "after": graph["shipped"],
        "passes": manifest["passes"],
        "candidates": manifest.get("candidates", []),
    }


def explanation_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns the explanation as text for a terminal."""
    before, after = found["before"], found["after"]
    sizes = ", ".join(f"{name} {size}" for name, size in found["sizes"].items()) or "its fixed sizes"
    lines = [f"{found['model']} version {found['version']}: {found['target']}, {found['precision']}", ""]
    lines.append(f"{'at ' + sizes:<34} {'exported':>12} {'shipped':>12}")
    for label, key, scale, unit in (
        ("nodes", "nodes", 1, ""),
        ("parameters", "parameters", 1e6, "M"),
        ("floating-point operations", "flops", 1e9, "G"),
        ("bytes moved between nodes", "bytes_moved", 1e6, "MB"),
    ):
        lines.append(f"{label:<34} {_figure(before[key], scale, unit):>12} {_figure(after[key], scale, unit):>12}")
    lines += ["", f"{'operator':<42} {'exported':>9} {'shipped':>9}"]
    for name in sorted({*before["ops"], *after["ops"]}, key=lambda n: (-before["ops"].get(n, 0), n)):
        lines.append(f"{name:<42} {before['ops'].get(name, 0):>9} {after['ops'].get(name, 0):>9}")
    lines += ["", "passes:"]
    for report in found["passes"]:
        done = ", ".join(f"{k} {v}" for k, v in report["counts"].items() if v) or "nothing to do"
        text = f"dropped, {report['dropped']}" if report["dropped"] else done
        lines.append(f"  {report['name']:<20} {report['nodes_before']:>5} -> {report['nodes_after']:<5} {text}")
        lines += [f"  {'':<20} note: {note}" for note in report["notes"]]
    return lines


def _figure(value: float, scale: float, unit: str) -> str:
    return f"{value:,}" if scale == 1 else f"{value / scale:,.2f} {unit}"
