"""Runs ours and the peers in turn, round by round; prints tokens per second and the ratio to the best peer."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perf.benchmarks.llm import workload
from perf.benchmarks.llm.json_child import JsonChild

PEERS = Path(__file__).parent / "peers"
OURS = "modelkiln"
ROUNDS = {
    "1 stream": workload.streams(1),
    "8 streams": workload.streams(8),
    "16 streams": workload.streams(16),
    "32 streams": workload.streams(32),
    "mixed": workload.mixed(),
    "prefill 512": workload.prefill(),
}


@dataclass
class Peer:
    """A running peer: `load_s` and `name` are what it says of itself."""

    child: JsonChild
    name: str
    load_s: float

    def run(self, work: workload.Round) -> float:
        """Returns tokens per second of one round: of the answers, or of the prompt where there is one new token."""
        answer = self.child.ask(work)
        prompt = sum(len(r["token_ids"]) for r in work["requests"])
        single = all(r["max_tokens"] == 1 for r in work["requests"])
        return float((prompt if single else answer["output_tokens"]) / answer["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file that all peers can write beside")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of each column, after one that does not count")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer and its interpreter")
    parser.add_argument("--column", action="append", choices=list(ROUNDS), help="only these columns")
    arguments = parser.parse_args()
    interpreters = {OURS: sys.executable, **dict(pair.split("=", 1) for pair in arguments.peer)}
    peers = {n: _start(n, python, arguments.model, arguments.threads) for n, python in interpreters.items()}
    try:
        rounds = {name: work for name, work in ROUNDS.items() if name in (arguments.column or ROUNDS)}
        _print_table(peers, {name: _measure(peers, work, arguments.rounds) for name, work in rounds.items()})
    finally:
        for peer in peers.values():
            peer.child.close()
    return 0


def _measure(peers: Mapping[str, Peer], work: workload.Round, rounds: int) -> dict[str, list[float]]:
    """Returns tokens per second by peer; in turn, so that what disturbs the machine disturbs all of them."""
    found: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 1):
        for name, peer in peers.items():
            speed = peer.run(work)
            if number:
                found[name].append(speed)
    return found


def _print_table(peers: Mapping[str, Peer], columns: Mapping[str, Mapping[str, list[float]]]) -> None:
    print("| tokens/s, median (lowest-highest) | " + " | ".join(columns) + " | load s |")
    print("|---" * (len(columns) + 2) + "|")
    for name, peer in peers.items():
        cells = [_cell(columns[column][name]) for column in columns]
        print(f"| {peer.name} | " + " | ".join(cells) + f" | {peer.load_s:.1f} |")
    if len(peers) > 1:
        ratios = []
        for speeds in columns.values():
            best = max((name for name in peers if name != OURS), key=lambda name: statistics.median(speeds[name]))
            ratio = statistics.median(a / b for a, b in zip(speeds[OURS], speeds[best], strict=True))
            ratios.append(f"**{ratio:.2f}x** {best}")
        print("| to the best peer | " + " | ".join(ratios) + " | |")


def _cell(speeds: list[float]) -> str:
    return f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"


def _start(name: str, python: str, model: Path, threads: int) -> Peer:
    print(f"starting {name}", file=sys.stderr)
    child = JsonChild([python, str(PEERS / f"{name}.py"), str(model.resolve()), str(threads)])
    return Peer(child, child.ready["name"], child.ready["load_s"])


if __name__ == "__main__":
    sys.exit(main())
