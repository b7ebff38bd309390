"""What a run consists of: from options to processes and their command lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.cli.ports import HOST
from baton.cli.process import service

CLUSTER = "local"
ENGINES = ("torch", "vllm")
STOP_ORDER = ("frontend", "router", "decode", "merged", "prefill", "kvstore", "etcd")
"""Who hears of the end first: no new requests, then no new plans, then who reads before who is read from."""


@dataclass(frozen=True)
class Options:
    """What `baton up` was asked for. Two runs are the same run when these are equal."""

    model: str = ""
    served_name: str = ""
    http_port: int = 8000
    etcd_port: int = 2379
    prefill: int = 1
    decode: int = 1
    merged: int = 1
    engine: str = "torch"
    dtype: str = "bfloat16"
    cores: tuple[int, ...] = ()
    chunk_tokens: int = 256
    prefill_chunk_tokens: int = 0
    fallback: str = "auto"
    settings: dict[str, str] = field(default_factory=dict)
    """Of the environment, for every process."""

    def differences(self, other: dict[str, object]) -> list[str]:
        """Flags and settings whose value is another one in `other` (as saved), in words."""
        mine, theirs = _flat(asdict(self)), _flat(other)
        names = [name for name in {**mine, **theirs} if mine.get(name, "") != theirs.get(name, "")]
        return [f"{name} {_word(theirs.get(name, ''))} -> {_word(mine.get(name, ''))}" for name in names]


def up_flags(saved: Mapping[str, Any]) -> list[str]:
    """What `baton up` is to be given for the run that is saved so: every flag that is not as it is by default."""
    default = _flat(asdict(Options()))
    flags = [(k, _word(v)) for k, v in _flat(saved).items() if k.startswith("--") and v != default.get(k)]
    return [word for flag in flags for word in flag]


@dataclass(frozen=True)
class Spec:
    """One process of the run."""

    name: str
    role: str
    command: tuple[str, ...]


def etcd_spec(binary: str, data: str, port: int, peer_port: int) -> Spec:
    """A single-node etcd on the loopback, sized for a registry."""
    client, peer = f"http://{HOST}:{port}", f"http://{HOST}:{peer_port}"
    flags = ["--name", "baton", "--data-dir", data, "--logger", "zap", "--auto-compaction-retention", "1"]
    flags += ["--listen-client-urls", client, "--advertise-client-urls", client]
    flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"baton={peer}"]
    return Spec("etcd", "etcd", (binary, *flags))


def service_specs(
    options: Options, model: str, etcd: str, python: str = sys.executable, batches: str = ""
) -> list[Spec]:
    """Every service of the run, the frontend last.

    `model` is the file or folder, `etcd` host:port, `python` the interpreter in whose environment workers run,
    `batches` where the frontend keeps files and batches.
    """
    shared = ["--etcd", etcd, "--cluster", CLUSTER]
    engine = ["--engine", options.engine] if options.engine != "torch" else []
    named = ["--served-name", options.served_name] if options.served_name else []
    specs = [
        Spec("router", "router", tuple(service("router", *shared))),
        Spec("kvstore", "kvstore", tuple(service("kvstore", *shared))),
    ]
    cores = _cores(options.cores)
    for role, count in (("prefill", options.prefill), ("decode", options.decode), ("merged", options.merged)):
        chunk = (options.prefill_chunk_tokens if role == "prefill" else 0) or options.chunk_tokens
        for n in range(1, count + 1):
            flags = [*shared, "--model", model, *named, "--dtype", options.dtype, *next(cores)]
            flags += [*engine, "--chunk-tokens", str(chunk)]
            specs.append(Spec(f"{role}-{n}", role, tuple(service(role, *flags, python=python))))
    flags = [*shared, "--model", model, *named, "--port", str(options.http_port), "--fallback", options.fallback]
    flags += ["--linger-s", "0"]  # no balancer looks
    flags += ["--batch-dir", batches] if batches else []
    specs.append(Spec("frontend", "frontend", tuple(service("frontend", *flags))))
    return specs


def shared_cores(options: Options, there: Set[int]) -> frozenset[int]:
    """Where everything but the engines runs, of the cores that are `there`; empty: wherever the kernel likes.

    Off the cores that only stream, when prefill engines are pinned to others: a stream feels whatever else its engine's
    core does, a prompt hardly. Measured with one prefill and one decode on two cores (`baton bench pd`): ITL p99 48 ms
    and 57 without, time to the first token 5 % more. A merged engine beside a prefill has no core to itself anyhow.
    Not with vLLM, whose engine is more processes than the pinned one.
    """
    if not options.cores or options.engine != "torch":
        return frozenset()
    pinned = [options.cores[n % len(options.cores)] for n in range(options.prefill + options.decode + options.merged)]
    prefilling, streaming = set(pinned[: options.prefill]), set(pinned[options.prefill :])
    if not prefilling or not streaming - prefilling:
        return frozenset()
    return frozenset(there) - (streaming - prefilling)


def _cores(cores: tuple[int, ...]) -> Iterator[list[str]]:
    """Flags that pin one worker after the other, round robin; none without cores."""
    n = 0
    while True:
        yield ["--core", str(cores[n % len(cores)])] if cores else []
        n += 1


def _flat(options: Mapping[str, Any]) -> dict[str, object]:
    """Values by the names that people know them by: those of flags and of variables."""
    flags = {f"--{k.replace('_', '-')}": v for k, v in options.items() if k != "settings"}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in flags.items()} | dict(options.get("settings", {}))


def _word(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(v) for v in value) or "none"
    return str(value) if value != "" else "default"
