"""Which eviction policy keeps the most of a prompt's prefix: LRU, S3-FIFO and ARC on the shipped traces.

Mooncake's traces name each prompt's blocks by a chain of hashes, 512 tokens a block. A prompt is looked up, its blocks
up to the first missing one are hits (a block without those before it is of no use), and all of it is kept: the end of
the prompt first, so that of one prompt the end is evicted before the beginning. The figure is hit blocks over all
blocks, at stores of 1 to 50 % of the trace's different blocks. (Azure's traces tell lengths only, no content.)

The second table is the disk below the host: LRU of ten times the host's size, everything that is evicted from the host
written to it, or only what has been sighted twice: hits of both tiers, and blocks written for each block asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.cli.home import project_root
from bench.policies import POLICIES, Lru, Policy

TRACES = ("mooncake_conversation_trace", "mooncake_synthetic_trace")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DISK_RATIO = 10
SIGHTED = 131_072
"""How many keys the second-sighting filter remembers."""

Prompt = Sequence[bytes]


@dataclass(frozen=True)
class Tiered:
    """A host with a disk below it: share of blocks that hit either, and disk writes for each block asked for."""

    hits: float
    writes: float


def read_trace(path: Path) -> list[list[bytes]]:
    """The chain of block hashes of each prompt, in order of arrival."""
    with path.open() as lines:
        prompts = [json.loads(line)["hash_ids"] for line in lines if line.strip()]
    return [[number.to_bytes(8, "big") for number in prompt] for prompt in prompts]


def prefix_hits(prompts: Sequence[Prompt], policy: Policy) -> float:
    """Hit blocks over all blocks: a prompt's hits end at its first missing block."""
    hits = total = 0
    for prompt in prompts:
        total += len(prompt)
        for key in prompt:
            if key not in policy:
                break
            hits += 1
        for key in reversed(prompt):
            policy.use(key)
    return hits / max(1, total)


def tiered(prompts: Sequence[Prompt], host_blocks: int, twice: bool) -> Tiered:
    """A host and a disk, both LRU; `twice`: a block is written to disk at its second sighting, else when it is new."""
    host, disk, sighted = Lru(host_blocks), Lru(host_blocks * DISK_RATIO), Lru(SIGHTED)
    hits = writes = total = 0
    for prompt in prompts:
        total += len(prompt)
        for key in prompt:
            if key not in host and key not in disk:
                break
            hits += 1
        for key in reversed(prompt):
            seen = sighted.use(key)
            host.use(key)
            if key in disk:
                disk.use(key)
            elif seen or not twice:
                disk.use(key)
                writes += 1
    return Tiered(hits / max(1, total), writes / max(1, total))


def main() -> None:
    """Run every policy at every size on every trace that is there."""
    parser = argparse.ArgumentParser(prog="baton bench eviction", description=__doc__)
    root = project_root()
    beside = (root.parent if root else Path.cwd()) / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=beside, help="The folder of the traces.")
    parser.add_argument("--json", action="store_true", help="Print JSON on stdout, for programs.")
    options = parser.parse_args()
    found = {name: options.traces / f"{name}.jsonl" for name in TRACES}
    found = {name: path for name, path in found.items() if path.is_file()}
    if not found:
        sys.exit(f"error: no trace in {options.traces}\nhint: give their folder with --traces")
    report = _measure(found)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _show(report)


def _measure(found: dict[str, Path]) -> dict[str, object]:
    hits: dict[str, dict[str, dict[str, float]]] = {}
    disks: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    err = Console(stderr=True)
    with Progress(console=err, transient=True) as progress:
        work = progress.add_task("simulating", total=len(found) * len(SHARES) * (len(POLICIES) + 2))
        for name, path in found.items():
            prompts = read_trace(path)
            different = len({key for prompt in prompts for key in prompt})
            hits[name], disks[name] = {}, {}
            for share in SHARES:
                blocks = max(10, int(share * different))
                row: dict[str, float] = {}
                for policy in POLICIES:
                    row[policy.name] = round(prefix_hits(prompts, policy(blocks)), 4)
                    progress.advance(work)
                hits[name][str(share)] = row
                disks[name][str(share)] = {}
                for admission in ("always", "twice"):
                    disks[name][str(share)][admission] = asdict(tiered(prompts, blocks, admission == "twice"))
                    progress.advance(work)
    means = {
        policy.name: round(
            sum(row[policy.name] for one in hits.values() for row in one.values()) / len(SHARES) / len(hits), 4
        )
        for policy in POLICIES
    }
    return {"winner": max(means, key=lambda name: means[name]), "mean": means, "hits": hits, "disk": disks}


def _show(report: dict[str, object]) -> None:
    out = Console(highlight=False)
    hits, disks = report["hits"], report["disk"]
    assert isinstance(hits, dict)
    assert isinstance(disks, dict)
    for name, rows in hits.items():
        table = Table("store / blocks", *(p.name for p in POLICIES), title=name, box=None)
        for share, row in rows.items():
            best = max(row.values())
            table.add_row(share, *(f"[bold]{v:.3f}[/]" if v == best else f"{v:.3f}" for v in row.values()))
        out.print(table)
        table = Table("host / blocks", "always: hits", "writes", "twice: hits", "writes", title="with a disk", box=None)
        for share, row in disks[name].items():
            cells = [f"{row[a][field]:.3f}" for a in ("always", "twice") for field in ("hits", "writes")]
            table.add_row(share, *cells)
        out.print(table)
    out.print(f"mean over traces and sizes: {report['mean']}; winner: [bold]{report['winner']}[/]")


if __name__ == "__main__":
    main()
