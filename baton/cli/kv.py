"""`baton kv`: what a store holds, how its tiers do, clearing and checking it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import grpc
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from baton.cli.errors import CliError
from baton.cli.home import find_home
from baton.cli.process import process_of, records
from baton.cli.rpc import ask, running
from baton.cli.show import err, out, print_json, seconds
from baton.v1 import kvstore_pb2 as pb
from baton.v1 import kvstore_pb2_grpc

ANSWER_S = 10.0
CLEAR_S = 60.0
LIST_S = 60.0
VERIFY_S = 4 * 3600.0
"""A terabyte at 100 MB/s takes three hours."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look into a KV store: `baton kv stats`, `baton kv ls`, `baton kv verify`, `baton kv clear`.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")]
Where = Annotated[
    str,
    typer.Option("--store", help="A name or id of `baton status`, or host:port. Left out: the one that runs here."),
]


def _given(value: str | None) -> str | None:
    """An unset variable of a shell must not mean all."""
    if value == "":
        raise typer.BadParameter("it is empty; leave it out for all blocks")
    return value


Tenant = Annotated[str | None, typer.Option(callback=_given, help="Only this tenant's blocks. Left out: everybody's.")]


@app.command()
def stats(store: Where = "", as_json: Json = False) -> None:
    """Show each tier (capacity, use, speed, state) and what became of look-ups and offers."""
    reply = ask(_address(store), lambda channel: _stub(channel).Stats(pb.StatsRequest(), timeout=ANSWER_S))
    if as_json:
        print_json(_stats_json(reply))
        return
    table = Table("tier", "state", "used", "of", "blocks", "pinned", "one block", "rate", box=None, pad_edge=False)
    for tier in reply.tiers:
        table.add_row(
            tier.name,
            f"[{'green' if tier.state.startswith('ok') else 'red'}]{tier.state}[/]",
            _size(tier.used_bytes),
            _size(tier.capacity_bytes),
            str(tier.blocks),
            str(tier.pinned),
            f"{tier.read_latency_s * 1000:.2f} ms" if tier.read_latency_s else "-",
            f"{tier.read_bytes_s / 1e9:.2f} GB/s" if tier.read_bytes_s else "-",
        )
    out.print(table)
    asked = reply.hits + reply.misses
    share = f" ({reply.hits / asked:.0%})" if asked else ""
    out.print(f"look-ups: {reply.hits} of {asked} blocks hit{share}", markup=False)
    for what, counts in (("gone", reply.evicted), ("refused", reply.refused)):
        if counts:
            out.print(f"{what}: " + ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items())), markup=False)


@app.command("ls")
def list_blocks(
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most so many blocks.")] = 50,
    store: Where = "",
    as_json: Json = False,
) -> None:
    """List blocks: key, tenant, tiers, pins, how long unused, how long they have left."""
    blocks, total = ask(_address(store), lambda channel: _list(channel, tenant or "", None if as_json else limit))
    if as_json:
        print_json(
            [
                {
                    "key": block.key.hex(),
                    "tenant": block.tenant,
                    "tiers": list(block.tiers),
                    "pins": block.pins,
                    "idle_s": round(block.idle_s, 3),
                    "ttl_s": round(block.ttl_s, 3),
                }
                for block in blocks
            ]
        )
        return
    table = Table("key", "tenant", "tiers", "pins", "unused for", "left", box=None, pad_edge=False)
    for block in blocks:
        left = seconds(block.ttl_s) if block.ttl_s else ""
        tiers = ", ".join(block.tiers)
        table.add_row(block.key.hex(), block.tenant, tiers, str(block.pins or ""), seconds(block.idle_s), left)
    if blocks:
        out.print(table)
    out.print(f"{total} blocks" if total == len(blocks) else f"{total} blocks, {len(blocks)} shown (-n shows more)")


@app.command()
def clear(
    tenant: Tenant = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(callback=_given, help="Only if the blocks have this layout. Left out: whichever it is."),
    ] = None,
    store: Where = "",
    as_json: Json = False,
) -> None:
    """Forget every block, in every tier. What is being read stays readable to who reads it."""
    request = pb.ClearRequest(tenant=tenant or "", fingerprint=fingerprint or "")
    reply = ask(_address(store), lambda channel: _stub(channel).Clear(request, timeout=CLEAR_S))
    if as_json:
        print_json({"dropped": reply.dropped, "unfinished": reply.unfinished})
        return
    out.print(f"{reply.dropped} blocks forgotten")
    if reply.unfinished:
        out.print("the disk has yet to forget them: the store goes on, a restart before that may find some again")


@app.command()
def verify(store: Where = "", as_json: Json = False) -> None:
    """Read every block of every tier and check it; what fails is dropped. Exit code 1 when a block failed or could not
    be read."""
    last = ask(_address(store), _verify)
    if as_json:
        print_json({name: getattr(last, name) for name in ("checked", "total", "failed", "unreadable")})
    else:
        found = [f"[red]{last.failed} failed[/] and were dropped"] if last.failed else []
        found += [f"[red]{last.unreadable} could not be read[/]"] if last.unreadable else []
        out.print(f"{last.checked} blocks checked, {', '.join(found) or 'all good'}")
        if last.unreadable:
            out.print(
                "see the tiers' state in `baton kv stats` and the store's log; when the disk answers, verify again"
            )
    if last.failed or last.unreadable:
        raise typer.Exit(1)


def _list(channel: grpc.Channel, tenant: str, limit: int | None) -> tuple[list[pb.ListedBlock], int]:
    blocks: list[pb.ListedBlock] = []
    total = 0
    for page in _stub(channel).List(pb.ListRequest(tenant=tenant), timeout=LIST_S):
        total += len(page.blocks)
        blocks.extend(page.blocks if limit is None else page.blocks[: max(0, limit - len(blocks))])
    return blocks, total


def _verify(channel: grpc.Channel) -> pb.VerifyReply:
    last = pb.VerifyReply()
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        work = progress.add_task("checking", total=None)
        for last in _stub(channel).Verify(pb.VerifyRequest(), timeout=VERIFY_S):
            progress.update(work, completed=last.checked, total=last.total)
    return last


def _address(store: str) -> str:
    """Where the store answers. Raises CliError when there is none of that name."""
    home = find_home()
    if not store:
        return running(home, "kvstore").address
    found = [r for r in records(home) if r.role == "kvstore" and r.address and process_of(r)]
    for record in found:
        if store in (record.id, record.name):
            return record.address
    if re.fullmatch(r"([^:\s]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", store):
        return store
    known = ", ".join(f"{record.name} ({record.id})" for record in found) or "none runs here"
    raise CliError(f"there is no store {store}", f"stores: {known}; or give its host:port")


def _stub(channel: grpc.Channel) -> Any:
    return kvstore_pb2_grpc.KvStoreServiceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]


def _stats_json(reply: pb.StatsReply) -> dict[str, Any]:
    names = ("name", "capacity_bytes", "used_bytes", "blocks", "pinned", "read_bytes_s", "read_latency_s", "state")
    return {
        "tiers": [{name: getattr(tier, name) for name in names} for tier in reply.tiers],
        "hits": reply.hits,
        "misses": reply.misses,
        "evicted": dict(reply.evicted),
        "refused": dict(reply.refused),
    }


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in ("B", "KiB") else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
