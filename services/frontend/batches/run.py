"""One batch from where it stands to its end: check the input, answer the lines that are left, make its results files.

Each step may be done again: a batch that was interrupted anywhere goes on from its record and its results.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import structlog

from baton.errors import BatonError, Reason
from services.frontend.batches.answer import Answerer, line_of
from services.frontend.batches.batch import Batch, Status
from services.frontend.batches.disk import storage_full, to_end
from services.frontend.batches.files import Files
from services.frontend.batches.lines import MAX_LINE_BYTES, Index, LineError, check_lines, read_line
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.batches.results import ERRORS, OUTPUT, Results

_ENDED = {
    Status.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    Status.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was executed."),
}

LOOK_S = 0.25
"""How often it is asked how many lines may be ready."""
TOGETHER = 256
"""Lines that never ran, told at once."""
REST_EVERY = 64
"""Lines that are checked in one go: others want the interpreter's lock too."""

_log = structlog.get_logger()


class Run:
    """Runs one batch. `save` writes its record (blocking, OSError), `lines` is how many of its lines may be ready."""

    def __init__(
        self,
        batch: Batch,
        files: Files,
        results: Results,
        answerer: Answerer,
        save: Callable[[Batch], None],
        lines: Callable[[], int],
        metrics: BatchMetrics,
    ) -> None:
        self.batch = batch
        self._files = files
        self._results = results
        self._answerer = answerer
        self._save = save
        self._lines = lines
        self._metrics = metrics
        self._stop = asyncio.Event()

    def cancel(self) -> None:
        """End it early; what is done is kept. Idempotent."""
        self._stop.set()

    async def run(self) -> None:
        """To the end. Cancelling it leaves it to be gone on with after a restart."""
        try:
            await self._run()
        except (BatonError, OSError) as error:
            failure = storage_full(error) if isinstance(error, OSError) else error
            await self._keep_results()
            await self._fail([LineError(failure.reason.name.lower(), failure.message)])
        except Exception:
            _log.exception("batch failed", batch=self.batch.id)
            await self._fail([LineError("internal_error", "The server had an error while running the batch.")])
        finally:
            await self._results.close()

    async def _run(self) -> None:
        batch = self.batch
        if batch.status is not Status.FINALIZING:
            index, errors = await asyncio.to_thread(self._check)
            if errors:
                await self._fail(errors)
                return
            batch.total = len(index)
            await to_end(self._results.open)
            if batch.status is Status.VALIDATING:
                await self._become(Status.IN_PROGRESS)
            batch.ends = await self._answer_all(index)
            if batch.ends is not Status.COMPLETED:
                await self._tell_rest(index, *_ENDED[batch.ends])
            await self._become(Status.FINALIZING if batch.ends is not Status.CANCELLED else Status.CANCELLING)
        else:
            await to_end(self._results.open)
        await self._finalize()

    # ---- the input

    def _check(self) -> tuple[Index, list[LineError]]:
        try:
            with self._path().open("rb") as file:
                return check_lines(_lines_of(file), self.batch.endpoint)
        except FileNotFoundError:
            return Index(), [LineError("file_not_found", f"{self.batch.input_file_id} is no more.")]

    def _path(self) -> Path:
        return self._files.path(self.batch.input_file_id)

    # ---- the lines

    async def _answer_all(self, index: Index) -> Status:
        """Answer what is left; how the batch ends."""
        fd = os.open(self._path(), os.O_RDONLY | os.O_CLOEXEC)
        left = iter([(name, n) for name, n in index.custom_ids.items() if name not in self._results.done])
        running: set[asyncio.Task[None]] = set()
        stop = asyncio.create_task(_set(self._stop), name=f"cancel {self.batch.id}")
        more = True
        try:
            while True:
                if self._stop.is_set() or self.batch.status is Status.CANCELLING:
                    return Status.CANCELLED
                remaining = self.batch.expires - time.time()
                if remaining <= 0:
                    return Status.EXPIRED
                while more and len(running) < self._lines():
                    name, n = next(left, ("", -1))
                    more = n >= 0
                    if more:
                        where = (index.starts[n], index.sizes[n])
                        task = asyncio.create_task(self._answer(fd, name, where), name=f"{self.batch.id} {n}")
                        running.add(task)
                if not running:
                    return Status.COMPLETED
                ended, _ = await asyncio.wait(
                    {*running, stop}, timeout=min(remaining, LOOK_S), return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended - {stop}:
                    running.discard(task)
                    task.result()
        finally:
            for task in (*running, stop):
                task.cancel()
            await asyncio.gather(*running, stop, return_exceptions=True)
            os.close(fd)

    async def _answer(self, fd: int, custom_id: str, where: tuple[int, int]) -> None:
        start, size = where
        raw = await asyncio.to_thread(os.pread, fd, size, start)
        try:
            body = bytes(read_line(raw, self.batch.endpoint).body)
        except ValueError as error:  # it was right when it was checked
            raise BatonError(Reason.INTERNAL, f"The line of {custom_id[:80]!r} is no longer what it was.") from error
        answer = await self._answerer.answer(
            custom_id, self.batch.endpoint, body, self.batch.tenant, self.batch.expires
        )
        await self._results.add(OUTPUT if answer.ok else ERRORS, custom_id, answer.line, answer.usage)
        self._metrics.lines.labels(answer.outcome).inc()
        self._count()

    async def _tell_rest(self, index: Index, code: str, message: str) -> None:
        """Lines that never ran are in the error file, each with why."""
        await self._results.settle()
        self._count()  # as they were answered: those that were not are neither
        rest = [name for name in index.custom_ids if name not in self._results.done]
        for start in range(0, len(rest), TOGETHER):
            names = rest[start : start + TOGETHER]
            lines = (line_of(name, error=(code, message)) for name in names)
            adds = (self._results.add(ERRORS, name, line) for name, line in zip(names, lines, strict=True))
            await asyncio.gather(*adds)
            self._metrics.lines.labels(code).inc(len(names))

    def _count(self) -> None:
        self._results.tell(self.batch)

    # ---- the end

    async def _finalize(self) -> None:
        batch = self.batch
        await self._make_files()
        await self._become(batch.ends)
        self._metrics.batches.labels(batch.ends.value).inc()
        try:
            await to_end(self._results.remove)
        except OSError as error:  # they go at the next start
            _log.warning("results not removed", batch=batch.id, error=str(error))

    async def _make_files(self) -> None:
        """Of what there is. Names follow from the batch's: done twice, it is the same file."""
        name = f"file-{self.batch.id.removeprefix('batch_')[:-1]}"
        if self._results.sizes[OUTPUT]:
            self.batch.output_file_id = await self._adopt(OUTPUT, f"{name}0")
        if self._results.sizes[ERRORS]:
            self.batch.error_file_id = await self._adopt(ERRORS, f"{name}1")

    async def _adopt(self, kind: str, id: str) -> str:
        batch, known = self.batch, id in self._files
        name = f"{batch.id}_{kind}.jsonl"
        await to_end(self._files.adopt, self._results.paths[kind], id, batch.tenant, name, batch.output_seconds)
        if known:
            self._results.forget(kind)  # it is counted as that file already
        return id

    async def _keep_results(self) -> None:
        """What was done before a batch failed is worth having."""
        await self._results.settle()
        if self.batch.status is Status.IN_PROGRESS:
            self._count()
        try:
            await self._make_files()
        except OSError as error:
            _log.error("a failed batch's results could not be kept", batch=self.batch.id, error=str(error))

    async def _fail(self, errors: list[LineError]) -> None:
        self.batch.errors = errors
        self._metrics.batches.labels(Status.FAILED.value).inc()
        _log.warning("batch failed", batch=self.batch.id, code=errors[0].code, message=errors[0].message)
        try:
            await self._become(Status.FAILED)
        except OSError as error:
            # Nobody can be told for longer than we live: after a restart it goes on from its record.
            _log.error("a batch's end could not be written", batch=self.batch.id, error=str(error))

    async def _become(self, status: Status) -> None:
        self.batch.status = status
        self.batch.at.setdefault(status.value, int(time.time()))
        await to_end(self._save, self.batch)


async def _set(event: asyncio.Event) -> None:
    await event.wait()


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, what is too long for one in pieces; slowly."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")):
        if number % REST_EVERY == 0:
            time.sleep(0.001)
        yield line
