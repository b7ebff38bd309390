"""One process from start to exit: what every service does alike.

    start     settings, logs, signals; the service wires itself and says `ready`
    serve     until SIGTERM, SIGINT or `end`
    leave     the service drains, at most `drain_s` + LEAVE_S
    close     the registry, background tasks, and what was opened, in reverse, at most CLOSE_S
    exit      says `left` if it was told to, then `os._exit`: a transport's own teardown may crash

Kubernetes kills a pod 30 s after SIGTERM: with the default `drain_s` the sum stays below that. A second signal ends the
process at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from baton.config import ServiceSettings
from baton.errors import BatonError
from baton.model.errors import ModelError
from baton.observe.logs import setup_logs
from baton.registry import Registry
from baton.rpc.tasks import Background

ANNOUNCE_S = 1.0
"""From telling everybody that this process leaves until it may refuse: by then the news has reached them."""
LEAVE_S = 5.0
"""What leaving may take beyond `drain_s`: handing back, freeing, saying goodbye."""
CLOSE_S = 4.0

_log = structlog.get_logger()


class Process:
    """This process, as its service sees it: a name, an epoch, the registry, and the way out."""

    def __init__(self, role: str, id: str, settings: ServiceSettings) -> None:
        self.role = role
        self.id = id
        self.epoch = secrets.randbits(64) | 1
        self.collectors = CollectorRegistry()
        self.background = Background(id)
        self.registry = Registry(settings.etcd_endpoints, settings.cluster, self.background)
        self._drain_s = settings.drain_s
        self._ready = False
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._opened = AsyncExitStack()

    def closing(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call `close` on the way out, whichever it is; what was opened last is closed first."""
        self._opened.push_async_callback(close)

    def ready(self, address: str, metrics_url: str) -> None:
        """Say on stdout, in one line of JSON, that this process serves, and where."""
        self._ready = True
        line = {"ready": True, "id": self.id, "address": address, "metrics": metrics_url, "pid": os.getpid()}
        print(json.dumps(line), flush=True)
        _log.info("ready", address=address, epoch=self.epoch)

    def end(self, code: int) -> None:
        """End the process with that exit code; the first word stands."""
        if not self._stop.done():
            self._stop.set_result(code)

    async def stopped(self) -> int:
        """Wait until this process is to leave; the exit code (0: told to, so there is time to drain)."""
        return await asyncio.shield(self._stop)

    async def run(self, serve: Coroutine[Any, Any, None]) -> int:
        """Run `serve` to its end; the exit code. Raises what it raised."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(serve, name=f"serve {self.id}")
        try:
            await asyncio.wait((serving, self._stop), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and self._ready:
                await asyncio.wait((serving,), timeout=self._drain_s + LEAVE_S)
                if not serving.done():
                    _log.error("leaving took too long", drain_s=self._drain_s, beyond_s=LEAVE_S)
        finally:
            serving.cancel()
            await self._close(serving)
        if serving.done() and not serving.cancelled():
            serving.result()
        code = self._stop.result() if self._stop.done() else 0
        if self._ready and code == 0:
            # To who looks later (`baton status`): this was no death.
            print(json.dumps({"left": True, "id": self.id}), flush=True)
        _log.info("left")
        return code

    def _on_signal(self) -> None:
        if self._stop.done():
            _log.warning("second signal: leaving now")
            os._exit(1)
        self.end(0)

    async def _close(self, serving: asyncio.Task[None]) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.wait((serving,))
                await self.registry.close()
                await self.background.close()
                await self._opened.aclose()
        except TimeoutError:
            _log.error("clean-up took too long", within_s=CLOSE_S)


def run_process(
    role: str,
    settings: ServiceSettings,
    serve: Callable[[Process], Coroutine[Any, Any, None]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Be a process of that role until it is told to stop or fails; does not return.

    `serve(process)` wires the service, calls `process.ready`, waits for `process.stopped` and drains.
    """
    id = settings.id or f"{role}-{secrets.token_hex(3)}"
    setup_logs(role, id, settings.log_level, settings.log_json)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_run_and_exit(role, id, settings, serve))


async def _run_and_exit(
    role: str, id: str, settings: ServiceSettings, serve: Callable[[Process], Coroutine[Any, Any, None]]
) -> None:
    """Exit from inside the loop: closing the loop would wait for threads and run teardowns that crash."""
    code = 1
    try:
        process = Process(role, id, settings)
        code = await process.run(serve(process))
    except BatonError as error:
        _log.error(f"{role} ends", reason=error.reason.name, message=error.message)
    except ModelError as error:
        _log.error(f"{role} ends: the model cannot be used", error=str(error))
    except BaseException:
        _log.exception(f"{role} ends")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
