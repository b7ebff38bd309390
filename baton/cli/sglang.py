"""`baton sglang`: start SGLang's servers and join them to Baton."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.errors import CliError
from baton.cli.ports import free_port
from baton.engine.sglang.launch.command import (
    Join,
    Mode,
    Server,
    join_command,
    pair_command,
    server_command,
    weights_as_run,
)
from baton.engine.sglang.launch.supervise import Child, Supervisor
from baton.engine.sglang.options import Options
from baton.kv.keys import BLOCK_SIZE
from baton.model.errors import ModelError
from baton.model.identity import weights_identity

_MORE = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Start SGLang (0.5.23, on a GPU; installed beside Baton) and join it. "
    "Flags that are not known here go to SGLang.",
)

Model = Annotated[str, typer.Option(help="A directory with *.safetensors and the tokenizer.", metavar="DIR")]
Name = Annotated[str, typer.Option("--served-name", help="The model name that clients send.")]
Host = Annotated[str, typer.Option(help="Address to listen on, and to be reached at by stores and peers.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of SGLang's own server.")]
TensorParallel = Annotated[int, typer.Option("--tp", min=1, help="GPUs that share the model.")]
PageSize = Annotated[int, typer.Option(min=32, help="Tokens in a page, a multiple of 32.")]
Etcd = Annotated[str, typer.Option(help="etcd endpoints, host:port, comma separated.")]
Cluster = Annotated[str, typer.Option(help="Name under which Baton's processes find each other.")]
Tenant = Annotated[str, typer.Option(help="Whose pages these are in the store; tenants share none.")]
NoStore = Annotated[bool, typer.Option("--no-store", help="Without Baton's KV store behind SGLang's cache.")]
BootstrapPort = Annotated[int, typer.Option(min=1, max=65535, help="Where prefill and decode servers meet.")]


@app.command(context_settings=_MORE)
def merged(
    context: typer.Context,
    model: Model,
    served_name: Name,
    host: Host = "127.0.0.1",
    port: Port = 30000,
    tp: TensorParallel = 1,
    page_size: PageSize = 64,
    etcd: Etcd = "127.0.0.1:2379",
    cluster: Cluster = "local",
    tenant: Tenant = "",
    no_store: NoStore = False,
) -> None:
    """Start SGLang and a merged worker in front of it; both end together.

    Example: `baton sglang merged --model ~/models/Qwen3-8B --served-name qwen3-8b --mem-fraction-static 0.8`
    """
    storage = None if no_store else _storage(model, etcd, cluster, tenant, host, context.args)
    server = Server(
        Mode.MERGED, _directory(model), served_name, host, port, tp, _pages(page_size), storage=storage,
        more=context.args,
    )  # fmt: skip
    join = Join(server.url, served_name, server.model, etcd, cluster, host)
    _supervise([_child(server), Child("worker", join_command(join))])


@app.command(context_settings=_MORE)
def prefill(
    context: typer.Context,
    model: Model,
    served_name: Name,
    host: Host = "127.0.0.1",
    port: Port = 30000,
    tp: TensorParallel = 1,
    page_size: PageSize = 64,
    bootstrap_port: BootstrapPort = 8998,
    etcd: Etcd = "127.0.0.1:2379",
    cluster: Cluster = "local",
    tenant: Tenant = "",
    no_store: NoStore = False,
) -> None:
    """Start SGLang's prefill server. It is joined by `baton sglang decode`, which pairs with it.

    Example: `baton sglang prefill --model ~/models/Qwen3-8B --served-name qwen3-8b --host 10.0.0.5`
    """
    storage = None if no_store else _storage(model, etcd, cluster, tenant, host, context.args)
    server = Server(
        Mode.PREFILL, _directory(model), served_name, host, port, tp, _pages(page_size), bootstrap_port, storage,
        context.args,
    )  # fmt: skip
    _supervise([_child(server)])


@app.command(context_settings=_MORE)
def decode(
    context: typer.Context,
    model: Model,
    served_name: Name,
    prefill: Annotated[str, typer.Option(help="The prefill server's URL.", metavar="http://HOST:PORT")],
    host: Host = "127.0.0.1",
    port: Port = 30001,
    tp: TensorParallel = 1,
    page_size: PageSize = 64,
    bootstrap_port: BootstrapPort = 8998,
    etcd: Etcd = "127.0.0.1:2379",
    cluster: Cluster = "local",
) -> None:
    """Start SGLang's decode server, pair it with a prefill server, and join the pair as one merged instance.

    Example: `baton sglang decode --model ~/models/Qwen3-8B --served-name qwen3-8b --prefill http://10.0.0.5:30000`
    """
    if not prefill.startswith(("http://", "https://")):
        raise CliError(f"--prefill {prefill!r} is no URL", "as in --prefill http://10.0.0.5:30000")
    server = Server(
        Mode.DECODE, _directory(model), served_name, host, port, tp, _pages(page_size), bootstrap_port,
        more=context.args,
    )  # fmt: skip
    pair_port = free_port()
    pair_url = f"http://127.0.0.1:{pair_port}"
    pair = pair_command(prefill, bootstrap_port, server.url, "127.0.0.1", pair_port)
    join = Join(pair_url, served_name, server.model, etcd, cluster, host)
    _supervise([_child(server), Child("pair", pair, f"{pair_url}/health"), Child("worker", join_command(join))])


def _child(server: Server) -> Child:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return Child("sglang", server_command(server), f"{server.url}/health", environment=environment)


def _supervise(children: list[Child]) -> None:
    raise typer.Exit(Supervisor(children).run())


def _directory(model: str) -> str:
    path = Path(model).expanduser().resolve()
    if not path.is_dir():
        raise CliError(f"there is no model directory at {model}", "--model takes a directory with *.safetensors")
    return str(path)


def _pages(page_size: int) -> int:
    if page_size % BLOCK_SIZE:
        raise CliError(f"--page-size must be a multiple of {BLOCK_SIZE}, not {page_size}", "64 is a good one")
    return page_size


def _storage(model: str, etcd: str, cluster: str, tenant: str, host: str, more: Sequence[str]) -> Options:
    try:
        weights = weights_as_run(weights_identity(_directory(model)), more)
    except ModelError as error:
        raise CliError(f"--model: {error}", "--model takes a directory with *.safetensors") from None
    return Options(weights=weights, etcd=etcd, cluster=cluster, tenant=tenant, host=host)
