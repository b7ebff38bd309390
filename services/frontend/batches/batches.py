"""Files and batches of one directory: what there is, what runs, and what goes on after a restart."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import structlog

from baton.errors import BatonError, Reason
from baton.rpc.tasks import Background
from services.frontend.batches.answer import Answerer
from services.frontend.batches.batch import Batch, Status
from services.frontend.batches.disk import Space, lock, storage_full, to_end, write_whole
from services.frontend.batches.expiry import DEFAULT_S
from services.frontend.batches.files import UPLOAD, Files, new_id
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.batches.results import Results
from services.frontend.batches.run import Run

MAX_ACTIVE = 100
EXPIRE_EVERY_S = 30.0
"""How often bytes of files whose time has passed are looked for: that they are no more is told at once."""
MAX_KEPT = 10_000
"""Records: of those that are over the oldest go first. Their files stay."""

_log = structlog.get_logger()


class Batches:
    """The batches of this frontend. `open` first, `stop` when it leaves, `close` when it has."""

    def __init__(
        self,
        directory: Path,
        model: str,
        max_file_bytes: int,
        max_bytes: int,
        answerer: Answerer,
        lines: Callable[[], int],
        background: Background,
        metrics: BatchMetrics,
    ) -> None:
        """`lines`: how many lines of all batches together it is worth to have ready."""
        self._directory = directory
        self._model = model
        self._space = Space(max_bytes)
        self.files = Files(directory / "files", self._space, max_file_bytes)
        self.files.in_use = self._user_of
        self._answerer = answerer
        self._lines = lines
        self._background = background
        self.metrics = metrics
        self._known: dict[str, Batch] = {}
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._expiring: asyncio.Task[None] | None = None
        self._lock = -1
        self._saving = threading.Lock()
        self._closed = False

    async def open(self) -> None:
        """Take the directory, and go on with what is there. Raises BatonError."""
        try:
            self._lock = await lock(self._directory)
            found = await asyncio.to_thread(self._read)
        except OSError as error:
            raise BatonError(Reason.INVALID_REQUEST, f"--batch-dir {self._directory}: {error}") from error
        self.count()
        for batch in sorted(self._known.values(), key=lambda batch: batch.created):
            if not batch.status.over:
                _log.info("batch goes on", batch=batch.id, status=batch.status.value)
                self._start(batch, found[batch.id])
        self._expiring = self._background.spawn(self._expire(), "files expire")

    async def stop(self) -> None:
        """Stop what runs, to be gone on with after a restart. Idempotent."""
        self._closed = True
        tasks = [task for _, task in self._runs.values()]
        tasks += [self._expiring] if self._expiring is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop, and let the directory go. Idempotent."""
        await self.stop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def count(self) -> None:
        """Show what is kept."""
        self.metrics.file_bytes.set(self._space.used)
        self.metrics.files.set(len(self.files))

    def get(self, id: str, tenant: str) -> Batch:
        """The tenant's batch. Raises BatonError(NOT_FOUND)."""
        batch = self._known.get(id)
        if batch is None or batch.tenant != tenant:
            raise BatonError(Reason.NOT_FOUND, f"No such Batch object: {id[:80]}", param="id")
        return batch

    def all(self, tenant: str) -> list[Batch]:
        """Every batch of the tenant, newest first."""
        return _newest_first(batch for batch in self._known.values() if batch.tenant == tenant)

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        metadata: dict[str, str] | None,
        output_seconds: int = DEFAULT_S,
        *,
        tenant: str,
    ) -> Batch:
        """A batch over a file that the tenant uploaded; it starts at once. Its results stay so many seconds.

        Raises BatonError.
        """
        file = self.files.get(input_file_id, tenant, "input_file_id")
        if file.purpose != UPLOAD:
            raise BatonError(
                Reason.INVALID_REQUEST,
                f"{file.id} has the purpose {file.purpose!r}; a batch reads files of 'batch'.",
                param="input_file_id",
            )
        if self._closed:
            raise BatonError(Reason.DRAINING, "This server is being stopped.")
        if len(self._runs) >= MAX_ACTIVE:
            raise BatonError(Reason.NO_CAPACITY, f"{MAX_ACTIVE} batches are under way here; try again later.")
        id, now = new_id("batch_"), int(time.time())
        batch = Batch(
            id, endpoint, file.id, metadata, now, output_seconds=output_seconds, model=self._model, tenant=tenant
        )
        self._known[batch.id] = batch  # from here on its input cannot be deleted
        try:
            await to_end(self._save, batch)
        except OSError as error:
            del self._known[batch.id]
            raise storage_full(error) from error
        if not self._closed:
            self._start(batch, self._results(batch))
        await self._prune()
        return batch

    async def cancel(self, id: str, tenant: str) -> Batch:
        """Begin to end a batch of the tenant's. Raises BatonError: NOT_FOUND, INVALID_REQUEST when it is over."""
        batch = self.get(id, tenant)
        if batch.status.over or batch.status is Status.FINALIZING:
            raise BatonError(Reason.INVALID_REQUEST, f"Cannot cancel a batch with status '{batch.status}'.", param="id")
        if batch.status is not Status.CANCELLING:
            batch.status, batch.ends = Status.CANCELLING, Status.CANCELLED
            batch.at.setdefault(Status.CANCELLING.value, int(time.time()))
            try:
                await to_end(self._save, batch)
            except OSError as error:
                _log.error("a batch's record could not be written", batch=id, error=str(error))
        if id in self._runs:
            self._runs[id][0].cancel()
        return batch

    async def expire(self) -> None:
        """Remove the files whose time has passed."""
        if removed := await self.files.expire():
            self.metrics.expired.inc(removed)
            self.count()

    async def _expire(self) -> None:
        while True:
            await self.expire()
            await asyncio.sleep(EXPIRE_EVERY_S)

    def _results(self, batch: Batch) -> Results:
        return Results(self._directory / "batches", batch.id, self._space)

    def _start(self, batch: Batch, results: Results) -> None:
        run = Run(batch, self.files, results, self._answerer, self._save, self._share, self.metrics)
        task = self._background.spawn(run.run(), f"batch {batch.id}")
        self._runs[batch.id] = (run, task)
        task.add_done_callback(lambda _: self._ended(batch.id))

    def _share(self) -> int:
        return max(1, self._lines() // max(1, len(self._runs)))

    def _ended(self, id: str) -> None:
        self._runs.pop(id, None)
        self.count()

    def _user_of(self, file_id: str) -> str | None:
        users = (b.id for b in self._known.values() if b.input_file_id == file_id and not b.status.over)
        return next(users, None)

    def _read(self) -> dict[str, Results]:
        """What is on the disk; the results so far of batches that are not over. Blocking."""
        found: dict[str, Results] = {}
        self._record("").parent.mkdir(parents=True, exist_ok=True)
        self.files.open()
        for path in self._record("").parent.glob("*.json"):
            try:
                batch = msgspec.json.decode(path.read_bytes(), type=Batch)
            except (OSError, msgspec.MsgspecError) as error:
                _log.error("a batch's record cannot be read", path=path.name, error=str(error))
                continue
            self._known[batch.id] = batch
            results = self._results(batch)
            if not batch.status.over:
                results.open()
                if batch.status in (Status.VALIDATING, Status.IN_PROGRESS):  # later ones know what counts
                    results.tell(batch)
                found[batch.id] = results
            elif batch.status is not Status.FAILED or batch.output_file_id:
                # Interrupted before it removed what are files now. A failed batch's may be nowhere else.
                results.remove()
        return found

    async def _prune(self) -> None:
        over = _newest_first(batch for batch in self._known.values() if batch.status.over)
        for batch in over[MAX_KEPT:]:
            del self._known[batch.id]
            await asyncio.to_thread(self._record(batch.id).unlink, missing_ok=True)

    def _save(self, batch: Batch) -> None:
        with self._saving:
            write_whole(self._record(batch.id), msgspec.json.encode(batch))

    def _record(self, id: str) -> Path:
        return self._directory / "batches" / f"{id}.json"


def _newest_first(batches: Iterable[Batch]) -> list[Batch]:
    # Sorting keeps the order in which those of the same second came.
    return sorted(batches, key=lambda batch: batch.created)[::-1]
