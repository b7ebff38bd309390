"""`baton merged`: one more merged worker, told where the run is and what it serves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.ports import HOST
from baton.cli.process import Record, process_of, records, service
from baton.cli.stack import CLUSTER
from baton.cli.vllm_env import vllm_python
from baton.model.errors import ModelError
from baton.model.files import open_model

_AS_IN = "as in --upstream http://127.0.0.1:8080/v1"


@dataclass(frozen=True)
class Asked:
    """What the command was asked for; empty where the run is to tell."""

    engine: str
    model: str
    upstream: str = ""
    tokenizer: str = ""
    served_name: str = ""
    api_key_file: str = ""
    etcd: str = ""


def command(home: Home, asked: Asked, more: Sequence[str]) -> list[str]:
    """The command line of the worker; `more` are further flags. Raises CliError for what is missing."""
    run = {record.role: record for record in records(home) if process_of(record)}
    etcd = asked.etcd or _etcd(run.get("etcd"))
    flags = ["--engine", asked.engine, "--model", asked.model, "--etcd", etcd, "--cluster", CLUSTER]
    frontend = run.get("frontend")
    if asked.engine == "openai":
        flags += _openai(asked, frontend)
    else:
        flags += ["--served-name", asked.served_name] if asked.served_name else []
    python = vllm_python(lambda text: None) if asked.engine == "vllm" else sys.executable
    return service("merged", *flags, *more, python=python)


def _openai(asked: Asked, frontend: Record | None) -> list[str]:
    if not asked.upstream:
        raise CliError("--engine openai needs --upstream", _AS_IN)
    if not asked.upstream.startswith(("http://", "https://")):
        raise CliError(f"--upstream {asked.upstream!r} is no http:// or https:// URL", _AS_IN)
    tokenizer = asked.tokenizer or _flag(frontend, "--model")
    if not tokenizer:
        raise CliError("the upstream's tokenizer is not known", "--tokenizer DIR, or start with `baton up`")
    served = asked.served_name or _served(frontend) or asked.model
    flags = ["--upstream", asked.upstream, "--tokenizer", _path(tokenizer), "--served-name", served]
    return flags + (["--api-key-file", _path(asked.api_key_file)] if asked.api_key_file else [])


def _served(frontend: Record | None) -> str:
    """The name under which the run serves its model; empty without a run."""
    named, model = _flag(frontend, "--served-name"), _flag(frontend, "--model")
    if named or not model:
        return named
    try:
        return open_model(model).default_name
    except ModelError as error:
        raise CliError(f"the model of the run cannot be read: {error}", "--served-name NAME") from error


def _etcd(record: Record | None) -> str:
    if record is None or not record.address:
        raise CliError("nothing is running here, so there is nothing to join", "start with `baton up`, or give --etcd")
    return f"{HOST}:{record.address.rsplit(':', 1)[1]}"


def _flag(record: Record | None, name: str) -> str:
    words = record.command if record is not None else []
    return words[words.index(name) + 1] if name in words[:-1] else ""


def _path(text: str) -> str:
    return str(Path(text).expanduser().resolve())
