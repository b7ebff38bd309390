"""The engine's process: one thread takes messages, one computes steps, a lock between them.

A reservation is answered between two lines of Python, not between two steps: the lock is free while the model runs.
The process dies with its parent (PR_SET_PDEATHSIG, and the end of the socket) and uses no CPU when idle.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from baton.engine.admission import Limits
from baton.engine.needs import lacked_grammars
from baton.engine.page import StatsPage
from baton.engine.port import EngineSpec, EngineStats, GrammarKind, Request, Resume, TokenEvent
from baton.engine.predict import StepCost
from baton.engine.torch import messages as m
from baton.engine.torch.compute import Computation
from baton.engine.torch.config import ModelConfig, load_config
from baton.engine.torch.grammars import Grammars
from baton.engine.torch.kvpool import KvPool
from baton.engine.torch.model import GivenUp, Model
from baton.engine.torch.options import Options
from baton.engine.torch.scheduler import Scheduler
from baton.engine.torch.sequence import Job
from baton.engine.torch.step import Outcome, Work
from baton.engine.torch.weights import load_weights
from baton.engine.torch.wire import prefilled_message, token_message
from baton.errors import BatonError, Reason
from baton.grammar.compile import Vocabulary
from baton.kv.arena import Arena
from baton.kv.handle import checksum
from baton.kv.keys import BLOCK_SIZE
from baton.kv.layout import LayoutFingerprint
from baton.kv.pool import BlockPool
from baton.model.errors import ModelError
from baton.model.identity import weights_identity
from baton.model.tokenizer import load_tokenizer

PR_SET_PDEATHSIG = 1
BLOCKED_WAIT_S = 0.05
"""How long the step loop sleeps when work is there but no block for it, if no message wakes it."""
JOBS_PER_STREAM = 8


class EngineProcess:
    """Everything of the process after the model is loaded."""

    def __init__(self, options: Options, connection: socket.socket, config: ModelConfig) -> None:
        dtype = getattr(torch, options.dtype)
        self._socket = connection
        self._outbox: deque[object] = deque()
        self._send_lock = threading.Lock()
        self._wake = threading.Condition()
        """The engine's lock, and what the step loop sleeps on."""
        self._arena = Arena.attach(options.arena_fd)
        self._page = StatsPage(options.page_fd)
        self._epoch = options.epoch
        self._kv = KvPool(self._arena.buffer, config, dtype, BLOCK_SIZE)
        self._model = Model(config, load_weights(Path(options.model), config, dtype), self._kv)
        self._pool = BlockPool(self._kv.slots)
        # One block is decode room: a longer request could be taken in and never be finished.
        max_context = min(config.max_context, (len(self._pool) - 1) * BLOCK_SIZE)
        grammars = self._grammars(options, config)
        kinds = tuple(GrammarKind) if grammars is not None else ()
        limits = Limits(
            block_size=BLOCK_SIZE,
            chunk_tokens=options.chunk_tokens,
            max_streams=options.max_streams,
            max_jobs=options.max_streams * JOBS_PER_STREAM,
            max_context=max_context,
            vocab_size=config.vocab,
            eos_token_ids=config.eos_token_ids,
            grammars=kinds,
        )
        self._cost = StepCost()
        self._scheduler = Scheduler(
            self._pool,
            limits,
            self._kv.copy_slot,
            self._kv.zero_tail,
            self._checksum,
            grammars,
            self._cost,
        )
        self._steps = 0
        self._checks: list[int] = []
        self._held_back: list[m.Reserve] = []
        """Reservations that wait for the end of the step: then the batch lane can give its blocks back."""
        self._due = (0.0, 0.0)
        self._taken = 0
        self._requests = msgspec.msgpack.Decoder(Request)
        layout = LayoutFingerprint(
            model=weights_identity(Path(options.model)),
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=options.dtype,
        )
        self.spec = EngineSpec(
            name="torch",
            fingerprint=layout,
            block_size=BLOCK_SIZE,
            max_context=max_context,
            max_streams=options.max_streams,
            pool_blocks=len(self._pool),
            vocab_size=config.vocab,
            resume=Resume.EXACT if options.dtype == "float32" else Resume.TEXT,
            eos_token_ids=config.eos_token_ids,
            lacks=lacked_grammars(kinds),
            yields=True,
            chunk_tokens=limits.chunk_tokens,
            short_tokens=limits.short_tokens,
        )

    def _grammars(self, options: Options, config: ModelConfig) -> Grammars | None:
        """None: the model came without a tokenizer that we can read, or has no end of text to end an output with."""
        if not config.eos_token_ids:
            return None
        vocabulary = Vocabulary(lambda: load_tokenizer(options.model), config.vocab, config.eos_token_ids)
        try:
            vocabulary.built()  # now: it holds the interpreter's lock for 0.2 s, which some step would wait for
        except (ModelError, ValueError) as error:
            print(f"no grammars: {error}", file=sys.stderr)
            return None
        return Grammars(vocabulary.compile, self._grammar_done)

    def _grammar_done(self) -> None:
        with self._wake:
            self._scheduler.grammar_done()
            self._wake.notify()

    def send(self, *messages: object) -> None:
        """To the worker, from whichever thread, in the order in which they were posted."""
        self._outbox.extend(messages)
        self._flush()

    def _flush(self) -> None:
        """Send what was posted under the engine's lock, whose order it keeps: two threads cannot swap two messages.

        Blocks while the worker does not read: that is the outbox's bound.
        """
        with self._send_lock:
            while self._outbox:
                self._socket.sendall(m.frame(self._outbox.popleft()))

    # ---- messages

    def read_messages(self) -> None:
        """Take messages until the worker is gone; then end the process."""
        stream = self._socket.makefile("rb", buffering=1 << 16)
        while True:
            head = stream.read(m.LENGTH.size)
            if len(head) < m.LENGTH.size:
                os._exit(0)
            message = m.to_engine.decode(stream.read(m.LENGTH.unpack(head)[0]))
            with self._wake:
                answers = self._take(message)
                self._taken += 1
                self._publish()  # first: who has the answer finds the state that it speaks of
                self._outbox.extend((*answers, *self._dropped()))
                self._wake.notify()
            self._flush()

    def _take(self, message: m.ToEngine) -> list[object]:
        scheduler = self._scheduler
        match message:
            case m.Reserve():
                return [*self._reserve(message), *self._cache_change()]
            case m.Settle():
                for slot in message.slots:
                    self._pool.settle(slot)
                return []
            case m.Hold():
                slots = scheduler.holds.take(message.call, message.keys)
                return [m.Held(message.call, [self._block(slot) for slot in slots])]
            case m.Unhold():
                scheduler.holds.drop(message.call)
                return []
            case m.Embed():
                try:
                    scheduler.embed(message.job, message.ids, message.deadline, batch=message.batch)
                except BatonError as error:
                    return [m.Failed(message.job, error.reason.name, error.message)]
                return []
            case m.PauseBatch():
                scheduler.pause_batch(message.seconds)
                return []
            case m.Check():
                self._checks.append(message.call)
                return [] if scheduler.stepping else self._check()
            case m.Clear():
                return [m.Answer(message.call, [], self._pool.clear()), *self._cache_change()]
            case _:
                job = scheduler.job(message.job)
                if isinstance(message, m.Release):
                    self._held_back = [held for held in self._held_back if held.job != message.job]
                if job is not None:
                    return self._take_for(message, job)
                return [m.Swapped(message.call, [])] if isinstance(message, m.Swap) else []

    def _take_for(self, message: m.ToEngine, job: Job) -> list[object]:
        scheduler = self._scheduler
        match message:
            case m.Commit():
                scheduler.commit(job, message.tokens)
                return self._cache_change()
            case m.Swap():
                return [m.Swapped(message.call, scheduler.swap(job, message.blocks)), *self._cache_change()]
            case m.Prefill():
                try:
                    scheduler.prefill(job)
                except BatonError as error:
                    return [m.Failed(job.id, error.reason.name, error.message)]
                return self._announce(job)
            case m.StopPrefill():
                scheduler.stop_prefill(job)
            case m.Generate():
                try:
                    scheduler.generate(job, message.first, message.done)
                except BatonError as error:
                    uid, attempt, choice = job.request.uid, job.request.attempt, job.request.choices[0]
                    event = TokenEvent(uid, attempt, choice, 0, error=error.reason, message=error.message)
                    scheduler.release(job)
                    return [m.Step([token_message(event)])]
            case m.Release():
                scheduler.release(job)
        return []

    def _check(self) -> list[object]:
        """Findings between two steps: blocks of a job released during one are given back at its end."""
        calls, self._checks = self._checks, []
        return [m.Answer(call, self._scheduler.check_integrity(), 0) for call in calls]

    def _reserve(self, message: m.Reserve) -> list[object]:
        """The answer; none yet when it is held back."""
        try:
            request = self._requests.decode(message.request)
        except msgspec.ValidationError as error:
            return [m.Refused(message.job, Reason.INVALID_REQUEST.name, str(error), "")]
        scheduler = self._scheduler
        try:
            job = scheduler.reserve(message.job, request, message.keys, message.tail_key, message.decode_room)
        except BatonError as error:
            if error.reason is Reason.NO_CAPACITY and not request.batch and scheduler.batch_in_step:
                scheduler.hurry()
                self._held_back.append(message)
                return []
            return [m.Refused(message.job, error.reason.name, error.message, error.param or "")]
        blocks = -(-len(job.prompt) // BLOCK_SIZE)
        return [m.Reserved(job.id, job.primary.slots[:blocks], job.hit_tokens)]

    def _dropped(self) -> list[object]:
        """What the lane lost to a message, or to a step: told after each."""
        text = "others want the blocks"
        return [m.Failed(job.id, Reason.NO_CAPACITY.name, text) for job in self._scheduler.take_dropped()]

    def _cache_change(self) -> list[object]:
        stored, removed = self._pool.changes()
        return [m.CacheChange(stored, removed)] if stored or removed else []

    def _announce(self, job: Job) -> list[object]:
        """What of the job's prompt is sealed and not told yet."""
        first, blocks = job.announced, []
        for i in range(first, len(job.primary.slots)):
            slot = job.primary.slots[i]
            if i * BLOCK_SIZE >= len(job.prompt) or not self._pool.slot(slot).tokens:
                break
            blocks.append(self._block(slot))
        job.announced += len(blocks)
        return [m.Sealed(job.id, first, blocks)] if blocks else []

    def _block(self, slot: int) -> m.Block:
        record = self._pool.slot(slot)
        return m.Block(slot, record.key, record.generation, record.tokens, record.checksum)

    def _checksum(self, slot: int) -> int:
        record = self._pool.slot(slot)
        payload = self._arena.view(slot * self._kv.block_bytes, self._kv.block_bytes)
        return checksum(record.key, self._epoch, record.generation, payload)

    # ---- steps

    def run_steps(self) -> None:
        """Compute for ever."""
        while True:
            outcome = Outcome()
            with self._wake:
                while not self._scheduler.has_work():
                    self._publish()
                    self._wake.wait()
                work = self._scheduler.plan(outcome)
                self._due = (time.time(), self._cost.predict(*_tokens(work))) if work else (0.0, 0.0)
                self._publish(blocked=not work)
                self._post(outcome)
            self._flush()
            if work:
                self._step(work)
            elif self._scheduler.has_work():
                with self._wake:
                    self._wake.wait(BLOCKED_WAIT_S)

    def _step(self, work: list[Work]) -> None:
        started = time.perf_counter()
        outcome = Outcome()
        try:
            computation = Computation(self._model, work, lambda: self._scheduler.wanted(work))
        except GivenUp:
            self._end_step(outcome, self._scheduler.give_up)
            return
        computation.keep_prompt_logprobs()
        computation.keep_sums()
        with self._wake:
            draws = self._scheduler.computed(work)
        drawn = computation.draw(draws)

        def apply() -> None:
            self._scheduler.apply(work, draws, drawn, outcome)
            self._cost.learn(*_tokens(work), time.perf_counter() - started)

        self._end_step(outcome, apply)

    def _end_step(self, outcome: Outcome, take_in: Callable[[], None]) -> None:
        with self._wake:
            take_in()
            self._steps += 1
            self._due = (0.0, 0.0)
            held, self._held_back = self._held_back, []
            answers = [answer for message in held for answer in self._reserve(message)]
            self._publish()
            self._outbox.extend(answers)
            self._post(outcome)
            self._outbox.extend(self._check())
        self._flush()

    def _post(self, outcome: Outcome) -> None:
        """What a step has to tell, sealed blocks before the end of their prompt. Under the lock."""
        post = self._outbox
        post.extend(self._cache_change())
        post.extend(self._dropped())
        for job in outcome.announce:
            post.extend([] if job.released else self._announce(job))
        post.extend(prefilled_message(job.id, done) for job, done in outcome.prefilled)
        post.extend(m.Failed(job.id, reason.name, text) for job, reason, text in outcome.failed)
        post.extend(_embedded(job) for job in outcome.embedded)
        if outcome.tokens:
            post.append(m.Step([token_message(event) for event in outcome.tokens]))

    def _publish(self, *, blocked: bool = False) -> None:
        """`blocked`: what waits waits for blocks, and no step is due."""
        scheduler, pool = self._scheduler, self._pool
        if not scheduler.has_work() and not scheduler.stepping:
            self._due = (0.0, 0.0)
        elif not self._due[0] and not blocked:
            self._due = (time.time(), self._cost.decode_step_s)
        started, predicted = self._due
        batch_running, batch_waiting, batch_tokens = scheduler.batch
        self._page.write(
            EngineStats(
                running=scheduler.running,
                waiting=scheduler.waiting,
                queued_prefill_tokens=scheduler.queued_tokens,
                queued_short_tokens=scheduler.queued_short_tokens,
                blocks_total=len(pool),
                blocks_free=pool.available,
                blocks_cached=pool.cached,
                blocks_pinned=scheduler.pinned,
                blocks_quarantined=pool.quarantined,
                step_started=started,
                step_predicted_s=predicted,
                steps=self._steps,
                prefill_tok_s=self._cost.prefill_tok_s,
                decode_step_s=self._cost.decode_step_s,
                prompt_tokens=scheduler.prompt_tokens,
                prefill_tokens_computed=scheduler.prefill_tokens_computed,
                cached_prompt_tokens=scheduler.cached_prompt_tokens,
                output_tokens=scheduler.output_tokens,
                preemptions=scheduler.preemptions,
                corrupted_blocks=scheduler.corrupted_blocks,
                batch_running=batch_running,
                batch_waiting=batch_waiting,
                batch_queued_tokens=batch_tokens,
                batch_preemptions=scheduler.batch_preemptions,
                given_up_steps=scheduler.given_up_steps,
                batch_blocks=scheduler.batch_blocks,
            ),
            self._taken,
        )


def _embedded(job: Job) -> m.Embedded:
    """The mean over an input that is computed."""
    assert job.hidden_sum is not None
    mean = job.hidden_sum / len(job.prompt)
    return m.Embedded(job.id, mean.cpu().numpy().astype("<f4").tobytes())


def _tokens(work: list[Work]) -> tuple[int, int]:
    """(prompt tokens, decoding sequences) of a step."""
    decoding = sum(w.count == 1 for w in work)
    return sum(w.count for w in work) - decoding, decoding


def main() -> None:
    """`python -m baton.engine.torch.child OPTIONS`; started by `TorchEngine` only."""
    options = msgspec.json.decode(sys.argv[1], type=Options)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options.parent:
        return
    # Ctrl-C reaches the whole group: the worker decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    connection = socket.socket(fileno=options.socket_fd)
    try:
        config = load_config(Path(options.model))
        process = EngineProcess(options, connection, config)
    except Exception as error:
        text = error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        connection.sendall(m.frame(m.StartFailed(text)))
        raise
    process.send(m.Started(msgspec.msgpack.encode(process.spec)))
    threading.Thread(target=_end_with, args=(process.read_messages,), name="messages", daemon=True).start()
    _end_with(process.run_steps)


def _end_with(body: Callable[[], None]) -> None:
    """Either thread's end is the process's: half an engine serves nobody."""
    try:
        body()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
