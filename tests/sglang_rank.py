"""One rank of SGLang as far as its storage goes, as a process: the wheel's own factory makes our storage, over a host
pool with the wheel's own methods. One JSON command a line on stdin. `Rank` starts one and talks to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HANG_S = 60.0
PAGES = 12
LAYERS, HEADS, DIM = 4, 2, 16
METHODS = ("get_page_buffer_meta", "get_data_page", "set_from_flat_data_page", "get_dummy_flat_data_page")


def page_bytes(page_size: int) -> int:
    """Of the pool's pages: K and V of bfloat16."""
    return 2 * page_size * LAYERS * HEADS * DIM * 2


def hashes(text: str, count: int) -> list[str]:
    """Page hashes as SGLang makes them: a chain of SHA-256 in hex."""
    chain = []
    last = b""
    for n in range(count):
        last = hashlib.sha256(last + f"{text} {n}".encode()).digest()
        chain.append(last.hex())
    return chain


class Program:
    """The rank's side."""

    def __init__(self, flags: dict[str, Any]) -> None:
        import torch

        from tests.sglang_wheel import host_pool_methods, importable

        importable()
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        self.torch, self.pool_name, self.transfer = torch, PoolName, PoolTransfer
        self.page_size = flags.get("page_size", 32)
        self.pool = self._pool(host_pool_methods(*METHODS), flags)
        extra = {
            "backend_name": "baton",
            "module_path": "baton.engine.sglang.storage",
            "class_name": "BatonStorage",
            "interface_v1": 1,
            "baton": flags["baton"],
        }
        config = HiCacheStorageConfig(
            tp_rank=flags.get("tp_rank", 0),
            tp_size=flags.get("tp_size", 1),
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=flags.get("mla", False),
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="model",
            extra_config={**extra, **flags.get("extra", {})},
        )
        self.storage = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        for name in (PoolName.KV, *flags.get("pools", ())):
            self.storage.register_mem_host_pool_v2(self.pool, name)
        self.storage.on_host_pools_registered()

    def _pool(self, methods: dict[str, Any], flags: dict[str, Any]) -> Any:
        torch = self.torch
        pool = type("Pool", (), methods)()
        pool.layout, pool.page_size, pool.device = flags.get("layout", "page_first"), self.page_size, "cpu"
        pool.pin_memory, pool.dtype = False, getattr(torch, flags.get("dtype", "bfloat16"))
        pool.layer_num, pool.head_num, pool.head_dim = LAYERS, HEADS, DIM
        pool.page_num, pool.size = PAGES, PAGES * self.page_size
        shape = {
            "page_first": (2, pool.size, LAYERS, HEADS, DIM),
            "page_first_direct": (2, PAGES, LAYERS, self.page_size, HEADS, DIM),
            "page_head": (2, PAGES, HEADS, self.page_size, LAYERS, DIM),
            "layer_first": (2, LAYERS, pool.size, HEADS, DIM),
        }[pool.layout]
        pool.kv_buffer = torch.zeros(shape, dtype=pool.dtype)
        return pool

    # ---- commands

    def do_fill(self, hashes: list[str], pages: list[int]) -> None:
        """Write into each page what the page of that hash has."""
        for name, page in zip(hashes, pages, strict=True):
            self.pool.set_from_flat_data_page(page * self.page_size, self._content(name))

    def do_wipe(self) -> None:
        self.pool.kv_buffer.zero_()

    def do_right(self, hashes: list[str], pages: list[int]) -> list[bool]:
        """Whether each page has the bytes of that hash."""
        held = [self.pool.get_data_page(page * self.page_size) for page in pages]
        return [
            bool(self.torch.equal(p.view(self.torch.uint8), self._content(h).view(self.torch.uint8)))
            for h, p in zip(hashes, held, strict=True)
        ]

    def do_untouched(self, pages: list[int]) -> bool:
        """Whether these pages are still wiped."""
        return not any(bool(self.pool.get_data_page(page * self.page_size).any()) for page in pages)

    def do_exists(self, hashes: list[str]) -> int:
        return int(self.storage.batch_exists(hashes))

    def do_set(self, hashes: list[str], pages: list[int]) -> list[bool]:
        return list(self.storage.batch_set_v1(hashes, self._indices(pages)))

    def do_get(self, hashes: list[str], pages: list[int]) -> list[bool]:
        return list(self.storage.batch_get_v1(hashes, self._indices(pages)))

    def do_move_v2(self, verb: str, hashes: list[str], pages: list[int], pool: str = "kv") -> dict[str, list[bool]]:
        one = self.transfer(name=self.pool_name(pool), host_indices=self._indices(pages), keys=hashes)
        return {str(name): results for name, results in getattr(self.storage, f"batch_{verb}_v2")([one]).items()}

    def do_exists_v2(self, hashes: list[str], pool: str = "kv") -> list[Any]:
        found = self.storage.batch_exists_v2(hashes, [self.transfer(name=self.pool_name(pool), keys=hashes)])
        return [found.kv_hit_pages, found.extra_pool_hit_pages]

    def do_flat(self, hashes: list[str]) -> list[Any]:
        """The oldest methods: set, exists and get of flat pages; whether each gave what it should."""
        done = self.storage.batch_set(hashes, [self._content(name) for name in hashes])
        targets = [self.pool.get_dummy_flat_data_page() for _ in hashes]
        got = self.storage.batch_get(hashes, targets)
        same = [t is not None and bool(self.torch.equal(t, self._content(h))) for h, t in zip(hashes, got, strict=True)]
        one = self.storage.get(hashes[0], self.pool.get_dummy_flat_data_page())
        return [done, same, self.storage.exists(hashes[0]), one is not None, self.storage.set(hashes[0], targets[0])]

    def do_clear(self) -> None:
        self.storage.clear()

    def do_close(self) -> None:
        self.storage.close()

    def do_counted(self, name: str, reason: str | None = None) -> float:
        return float(self.storage.counters.value(name, reason))

    def do_identity(self) -> list[Any]:
        client = self.storage._client
        return [client._identity.fingerprint, client.bounce.free, client.bounce.slots]

    def do_keys(self, hashes: list[str]) -> list[str]:
        return [key.hex() for key in self.storage._keys.keys(hashes)]

    def _indices(self, pages: list[int]) -> Any:
        size = self.page_size
        return self.torch.tensor([page * size + n for page in pages for n in range(size)], dtype=self.torch.int64)

    def _content(self, name: str) -> Any:
        raw = bytearray(random.Random(name).randbytes(page_bytes(self.page_size)))
        raw[1::2] = bytes(b & 0x3F for b in raw[1::2])  # finite numbers, so that equal bytes are equal tensors
        return self.torch.frombuffer(raw, dtype=self.pool.dtype)


def refusals(etcd: str, *flags: dict[str, Any]) -> list[str]:
    """Why the storage does not start with each of these flags; "" when it does."""
    each = [json.dumps({**one, "baton": {"weights": "w" * 32, "etcd": etcd, **one.get("baton", {})}}) for one in flags]
    command = [sys.executable, "-m", "tests.sglang_rank", *each]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S)
    said: list[str] = json.loads(done.stdout.splitlines()[-1])
    return said


class Rank:
    """A rank, from the test's side. It starts at once, and is waited for when it is first asked for something."""

    def __init__(self, directory: Path, name: str, etcd: str, **flags: Any) -> None:
        baton = {"weights": "w" * 32, "etcd": etcd, **flags.pop("baton", {})}
        self._log_path = directory / f"{name}.log"
        command = [sys.executable, "-m", "tests.sglang_rank", json.dumps({**flags, "baton": baton})]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._ready = False

    def __getattr__(self, command: str) -> Any:
        return lambda *args, **named: self.ask(command, *args, **named)

    def begin(self, command: str, *args: Any, **named: Any) -> None:
        """Send a command; `finish` brings its answer."""
        if not self._ready:
            assert self._answer() == "ready"
            self._ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, args, named]) + "\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        """The answer to what was begun."""
        return self._answer()

    def ask(self, command: str, *args: Any, **named: Any) -> Any:
        """Send a command and wait for its answer."""
        self.begin(command, *args, **named)
        return self.finish()

    def wait_store(self, probe: str = "probe") -> None:
        """Wait until it knows a store that answers."""
        end = time.monotonic() + HANG_S
        while True:
            before = self.counted("failed_lookups", "STORE_UNAVAILABLE") + self._failures()
            self.exists(hashes(probe, 1))
            if self.counted("failed_lookups", "STORE_UNAVAILABLE") + self._failures() == before:
                return
            assert time.monotonic() < end, self._log_path.read_text(errors="replace")[-4000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """End it. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HANG_S)

    def _failures(self) -> float:
        return float(sum(self.counted("failed_lookups", r) for r in ("KV_TRANSFER_TIMEOUT", "DEADLINE_EXCEEDED")))

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            try:
                return json.loads(line)
            except ValueError:
                continue  # a library that writes to stdout
        raise AssertionError(f"rank ended:\n{self._log_path.read_text(errors='replace')[-4000:]}")


def _refusal(flags: dict[str, Any]) -> str:
    try:
        Program(flags)
    except ValueError as error:
        return str(error)
    return ""


def _main() -> None:
    if len(sys.argv) > 2:
        print(json.dumps([_refusal(json.loads(flags)) for flags in sys.argv[1:]]), flush=True)
        os._exit(0)
    program = Program(json.loads(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    while line := sys.stdin.readline():
        command, args, named = json.loads(line)
        print(json.dumps(getattr(program, f"do_{command}")(*args, **named)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
