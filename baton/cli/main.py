"""The command line. Each command is thin: options in, one function called, its result shown."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table
from typer.core import TyperGroup

from baton.cli import kv, sglang
from baton.cli.again import me, up_again
from baton.cli.api_key import authorization
from baton.cli.errors import CliError
from baton.cli.home import HOME, Home, find_home, project_root
from baton.cli.model import app as model_app
from baton.cli.process import settings
from baton.cli.show import LiveProgress, err, notes, out, print_json, seconds, show_error
from baton.cli.stack import ENGINES, Options
from baton.cli.terms import MORE, TERMS, explain_help


class _Group(TyperGroup):
    """Turns CliError, wherever it comes from, into its lines and exit code 1; a file that cannot be had likewise.
    Arguments are text: what is no UTF-8 could be sent to nobody."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for arg in args:
            if arg != arg.encode(errors="replace").decode():
                raise typer.BadParameter(f"{arg!a} is no UTF-8")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            show_error(error)
            raise typer.Exit(1) from None
        except OSError as error:
            if error.filename is None and error.errno != errno.ENOSPC:
                raise
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
            show_error(CliError(what, f"files lie in {find_home().root}; {HOME} names another folder"))
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            err.print("; ".join(["interrupted", *notes(interrupt)]), markup=False)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Serve language models with prefill and decode in separate processes.

    `baton up` starts everything on this machine and prints how to call it; `baton status` shows it;
    `baton down` ends it. Files lie in `.baton` (or `$BATON_HOME`).""",
)

app.add_typer(kv.app, name="kv")
app.add_typer(sglang.app, name="sglang")
app.add_typer(model_app, name="model")


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"baton {version('baton')}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    shown: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print it and end.")
    ] = False,
) -> None:
    pass


Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")]


@app.command()
def up(
    model: Annotated[
        str,
        typer.Option(
            help="A .gguf file, or a directory with *.safetensors, of the Llama, Qwen2 or Qwen3 family. "
            "Left out: SmolLM2-135M-Instruct, fetched once (100 MB).",
            metavar="DIR|FILE.gguf",
        ),
    ] = "",
    served_name: Annotated[
        str, typer.Option(help="The model name that clients send. Left out: from the file's name.")
    ] = "",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the OpenAI API; 0 chooses one.")] = 8000,
    etcd_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of etcd; 0 chooses one.")] = 2379,
    prefill: Annotated[int, typer.Option(min=0, help="How many prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="How many decode workers.")] = 1,
    merged: Annotated[int, typer.Option(min=0, help="How many merged workers (prefill and decode in one).")] = 1,
    engine: Annotated[
        str,
        typer.Option(help="What workers compute with: torch (built in), or vllm (installed beside, once: 2 GB)."),
    ] = "torch",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    cores: Annotated[
        str,
        typer.Option(
            help="Pin the workers' engines to these cores in turn, as in 0,1. Left out: vllm to all, torch to none.",
            metavar="N,N",
        ),
    ] = "",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens that a worker computes in one step.")] = 256,
    prefill_chunk_tokens: Annotated[
        int, typer.Option(min=0, help="The same of prefill workers, which freeze no stream; 0: as --chunk-tokens.")
    ] = 0,
    fallback: Annotated[
        str, typer.Option(help="auto: run a request elsewhere when its plan breaks. strict: answer an error instead.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Start etcd, router, kvstore, workers and frontend; return when a real completion came back.

    Safe to repeat: what runs is left alone, what died is started again. When a start fails, everything this
    command started is ended again.

    Examples: `baton up` · `baton up --model ~/models/Qwen2.5-0.5B-Instruct --decode 2` · `baton up --engine vllm`
    """
    from baton.cli.up import up as bring_up

    options = Options(
        model=str(Path(model).expanduser().resolve()) if model else "",
        served_name=served_name,
        http_port=http_port,
        etcd_port=etcd_port,
        prefill=prefill,
        decode=decode,
        merged=merged,
        engine=_one_of("--engine", engine, ENGINES),
        dtype=_one_of("--dtype", dtype, ("bfloat16", "float32")),
        cores=_cores(cores, engine),
        chunk_tokens=chunk_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
        fallback=_one_of("--fallback", fallback, ("auto", "strict")),
        settings=settings(os.environ),
    )
    if not decode + merged:
        raise CliError("nothing could stream: --decode and --merged are both 0", "ask for one decode or merged worker")
    home = find_home()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what was started is ended again
    with LiveProgress() as progress:
        running = bring_up(home, options, progress)
    if as_json:
        print_json(
            {
                "url": running.url,
                "model": running.model,
                "already_running": running.already,
                "started": running.started,
                "seconds": round(running.seconds, 1),
                "logs": str(home.logs),
            }
        )
        return
    first = "already running" if running.already else f"up in {seconds(running.seconds)}"
    body = json.dumps({"model": running.model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    # The key itself is not for a terminal's history.
    key = '    -H "authorization: Bearer $KEY" \\\n' if authorization() else ""
    out.print(f"[green]●[/] {first}: [bold]{running.url}/v1[/]  model [bold]{running.model}[/]")
    out.print(
        f"\n  curl -N {running.url}/v1/chat/completions -H 'content-type: application/json' \\\n{key}"
        f"    -d '{body[:-1]}, \"stream\": true}}'\n",
        markup=False,
        soft_wrap=True,
    )
    again = me(home)
    out.print(f"  logs: {home.shown(home.logs)}/   status: {again} status   end: {again} down", soft_wrap=True)


@app.command()
def down(as_json: Json = False) -> None:
    """End everything that `baton up` started. Requests that run are finished first, for some seconds."""
    from baton.cli.down import down as bring_down

    done = bring_down(find_home())
    if as_json:
        print_json({"stopped": done.stopped, "killed": done.killed})
    elif not done.stopped and not done.killed:
        out.print("nothing was running")
    else:
        out.print(f"stopped: {', '.join([*done.stopped, *(f'{name} (killed)' for name in done.killed)])}")


@app.command()
def status(as_json: Json = False) -> None:
    """Show each process: where it listens, what it uses, and how the router sees it.

    Exit code 0 when all of them run, or left because they were told to (`drained`); 1 when one is dead or nothing runs.
    What is drained or dead, `baton up` starts again.
    """
    from baton.cli.status import DRAINED, Row
    from baton.cli.status import status as measure

    home = find_home()
    found = measure(home)
    if as_json:
        print_json(found.as_json())
    elif not found.rows:
        out.print("nothing is running; start with `baton up`")
    else:
        titles = ("name", "engine", "id", "pid", "address", "state", "RSS", "CPU", "up", "router")
        table = Table(*titles, box=None, pad_edge=False)
        for column in table.columns[:-1]:
            column.no_wrap = True

        def seen(row: Row) -> str:
            if not row.router:
                return ""
            return "{state}, {running} running, {waiting} waiting, KV {blocks_free}/{blocks_total} free".format(
                **row.router
            )

        colours = {"running": "green", DRAINED: "yellow"}
        for row in found.rows:
            gone = row in found.gone
            table.add_row(
                row.name,
                row.engine,
                row.id,
                "" if gone else str(row.pid),
                row.address.removeprefix("127.0.0.1"),
                f"[{colours.get(row.state, 'red')}]{row.state}[/]",
                "" if gone else f"{row.memory_bytes / 2**20:.0f} MiB",
                "" if gone else f"{row.cpu_percent:.1f}%",
                "" if gone else seconds(row.uptime_s),
                seen(row),
            )
        out.print(table)
        out.print(f"registry: {found.registry}", style="dim", markup=False)
        if found.gone:
            names = ", ".join(f"{row.name} ({row.state})" for row in found.gone)
            out.print(f"start again {names}: {up_again(home)}", markup=False, soft_wrap=True)
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def logs(
    name: Annotated[str, typer.Argument(help="A process, as `baton status` names it. Left out: all.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines from the end.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines are written.")] = False,
) -> None:
    """Print the end of the logs."""
    home = find_home()
    files = sorted(home.logs.glob("*.log"))
    if name:
        if home.log(name) not in files:
            known = ", ".join(file.stem for file in files) or "none yet; start with `baton up`"
            raise CliError(f"there is no log of {name}", f"logs: {known}")
        files = [home.log(name)]
    if not files:
        raise CliError("there are no logs yet", "start with `baton up`")
    command = ["tail", "-n", str(lines), *(["-F"] if follow else []), *map(str, files)]
    raise typer.Exit(subprocess.call(command))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which one; left out: list them.")] = "",
) -> None:
    """Run a benchmark: `baton bench NAME [its options]`. `baton bench NAME --help` tells its options."""
    root = project_root()
    folder = root / "bench" if root else None
    # The others are their parts: they take no options.
    known = sorted(file.stem for file in folder.glob("*.py") if "ArgumentParser(" in file.read_text()) if folder else []
    if name in ("", "-h", "--help"):
        out.print("usage: baton bench NAME [its options]\n", markup=False)
        out.print("benchmarks: " + (", ".join(known) or "none (a checkout carries them)"), markup=False)
        return
    if name not in known:
        raise CliError(f"there is no benchmark {name}", f"benchmarks: {', '.join(known) or 'none here'}")
    _become([sys.executable, "-m", f"bench.{name}", *context.args])


@app.command(help=explain_help())
def explain(
    prompt: Annotated[str, typer.Argument(help="The text of a user's message.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="As in the request.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Take the text as it is, without the chat template.")] = False,
    as_json: Json = False,
) -> None:
    """See `explain_help`."""
    from baton.cli.explain import explain as ask_router

    reply = ask_router(find_home(), prompt, max_tokens=max_tokens, raw=raw)
    if as_json:
        print_json(reply)
        return
    table = Table("", "mode", "worker", "prefill", "total ms", "terms", "cached", box=None, pad_edge=False)
    for one in reply["candidates"]:
        terms = "  ".join(f"{term} {value:.1f}" for term, value in one["terms_ms"].items() if value)
        sign = "[green]●[/]" if one["chosen"] else ""
        why = f"[red]{one['excluded']}[/]" if one["excluded"] else f"{one['total_ms']:.1f}"
        stored = f" ({one['stored_tokens']} in {one['store']}, {one['store_tier']})" if one["store"] else ""
        table.add_row(sign, one["mode"], one["worker"], one["prefill"], why, terms, f"{one['cached_tokens']}{stored}")
    out.print(table)
    out.print(f"{reply['prompt_tokens']} tokens: {reply['summary']}", markup=False)
    for one in reply["excluded_stores"]:
        out.print(f"nothing is loaded from {one['store']}: {one['why']}", markup=False)
    shown = {term for one in reply["candidates"] for term, value in one["terms_ms"].items() if value}
    legend = Table(box=None, pad_edge=False, show_header=False, style="dim")
    for term, meaning in TERMS.items():
        if term in shown:
            legend.add_row(term, meaning)
    if shown:
        out.print(f"\nterms, in ms of cost; the lowest total wins (`baton explain --help`, {MORE})", style="dim")
        out.print(legend)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
)
def merged(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="What the upstream calls its model; without --upstream, a .gguf file or a directory.")
    ],
    engine: Annotated[str, typer.Option(help="openai: a server at --upstream. torch: compute here.")] = "openai",
    upstream: Annotated[
        str, typer.Option(help="Any OpenAI-compatible server that has /v1/completions.", metavar="URL")
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option(
            help="The upstream's model directory or .gguf file (its text side counts). Left out: that of the run.",
            metavar="DIR|FILE.gguf",
        ),
    ] = "",
    served_name: Annotated[
        str, typer.Option(help="The model name that clients send. Left out: that of the run, else --model.")
    ] = "",
    api_key_file: Annotated[str, typer.Option(help="A file with the upstream's API key.", metavar="FILE")] = "",
    etcd: Annotated[str, typer.Option(help="Where the cluster is. Left out: the etcd of the run.")] = "",
) -> None:
    """Run one more merged worker, in the foreground, beside what `baton up` started or in any cluster.

    Every other option of the service may be given as well; `python -m services.merged --help` tells them.

    Example: `baton merged --engine openai --upstream http://127.0.0.1:8080/v1 --model my-model`
    """
    from baton.cli.merged import Asked, command

    asked = Asked(engine, model, upstream, tokenizer, served_name, api_key_file, etcd)
    _become(command(find_home(), asked, context.args))


@app.command()
def drain(
    process: Annotated[str, typer.Argument(help="An id or name, as `baton status` shows it.")],
    deadline: Annotated[
        float, typer.Option(min=0, help="Seconds until a worker's requests are moved to another.")
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Let a process take nothing new, finish or move what it has, and leave.

    `baton up`, with the options of the run, starts it again. Exit code 1 when requests were left unfinished.
    """
    from baton.cli.drain import drain as ask_process

    home = find_home()
    remaining = ask_process(home, process, deadline, lambda streams: err.print(f"{process}: {_requests(streams)} left"))
    if as_json:
        print_json({"process": process, "remaining": remaining})
    else:
        left = f"{process} has left" + (f" {_requests(remaining)} unfinished" if remaining else "")
        out.print(f"{left}; start it again: {up_again(home)}", markup=False, soft_wrap=True)
    if remaining:
        raise typer.Exit(1)


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


@app.command()
def fetch(
    engine: Annotated[
        str, typer.Option(help="vllm: its environment too (2 GB), and the default model as it loads it.")
    ] = "torch",
    as_json: Json = False,
) -> None:
    """Fetch what a run needs and a checkout does not carry: the default model, and etcd if the machine has none."""
    from baton.cli.converted import as_directory
    from baton.cli.fetch import default_model, find_etcd
    from baton.cli.vllm_env import vllm_python

    vllm = _one_of("--engine", engine, ENGINES) == "vllm"
    home: Home = find_home()
    with LiveProgress() as progress:
        model = default_model(home, lambda text: progress.step("model", text))
        if vllm:
            model = as_directory(home, model, lambda text: progress.step("model", text))
        progress.step("model", "ready", done=True)
        etcd = find_etcd(home, lambda text: progress.step("etcd", text))
        progress.step("etcd", "ready", done=True)
        python = vllm_python(lambda text: progress.step("vllm", text)) if vllm else ""
        if vllm:
            progress.step("vllm", "ready", done=True)
    if as_json:
        print_json({"model": str(model), "etcd": etcd, **({"vllm": python} if vllm else {})})
        return
    lines = [f"model: {home.shown(model)}", f"etcd:  {etcd}", *([f"vllm:  {python}"] if vllm else [])]
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise CliError(f"{option} {value} is not known", f"one of: {', '.join(allowed)}")
    return value


def _cores(text: str, engine: str) -> tuple[int, ...]:
    if not text.strip() and engine == "vllm":
        # Its threads spin while they wait: engines that share cores take each other's time.
        return tuple(sorted(os.sched_getaffinity(0)))
    try:
        cores = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise CliError(f"--cores {text} is no list of cores", "write it as 0,1") from None
    there = os.sched_getaffinity(0)
    if missing := [core for core in cores if core not in there]:
        raise CliError(f"core {missing[0]} is not there", f"cores: {', '.join(map(str, sorted(there)))}")
    return cores


def _become(command: list[str]) -> NoReturn:
    out.file.flush()
    if root := project_root():
        os.chdir(root)
    os.execv(command[0], command)


if __name__ == "__main__":
    app()
