"""`baton model`: from one kind of model files to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from baton.cli.errors import CliError
from baton.cli.show import err, out, print_json

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Prepare models: `baton model convert`.")

BYTES = {"float32": 4, "bfloat16": 2}


@app.callback()
def _group() -> None:
    """Keeps `convert` a command of its own while it is the only one."""


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A .gguf file of the Llama, Qwen2 or Qwen3 family.", metavar="FILE.gguf")
    ],
    directory: Annotated[Path, typer.Argument(help="Where the model's files go; made if need be.", metavar="DIR")],
    dtype: Annotated[
        str,
        typer.Option(
            help="float32: exactly what the file means, so the fleet takes both for one model. "
            "bfloat16: half the size, rounded, a model of its own."
        ),
    ] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Write over a model that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")] = False,
) -> None:
    """Write a GGUF file as a directory of safetensors, config and tokenizer: what vLLM and transformers load.

    Quantised weights are dequantised. Written whole or not at all.

    Example: `baton model convert some-llama.Q8_0.gguf some-llama`
    """
    from baton.convert.gguf import DTYPES, convert
    from baton.errors import BatonError
    from baton.model.errors import ModelError

    if dtype not in DTYPES:
        raise CliError(f"--dtype {dtype} is not known", f"one of: {', '.join(DTYPES)}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(f"writing {directory}", total=None)
        width = BYTES[dtype]
        try:
            convert(
                source.expanduser(),
                directory.expanduser().absolute(),
                dtype=dtype,
                replace=force,
                progress=lambda done, of: progress.update(task, completed=done * width, total=of * width),
            )
        except ModelError as error:
            full = "not empty" in str(error)
            raise CliError(str(error), "--force writes over it" if full else "it takes a .gguf file") from error
        except BatonError as error:
            raise CliError(error.message, "Llama, Qwen2 and Qwen3 models are converted") from error
    if as_json:
        print_json({"directory": str(directory.expanduser().absolute()), "dtype": dtype})
    else:
        out.print(f"{directory}: ready for --model", markup=False, soft_wrap=True)
