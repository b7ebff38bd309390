"""The router's policy in the simulator: its own index, speculation, shortlist, candidates and choice.

What is simulated is only how it is told: caches by events as they change, load by reports each `REPORT_S` and, in
between, by its own placements (the reservations of a router). A node's cache is also the KV store of that node, from
which the others load (README.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.sim.fleet import Job
from bench.sim.world import Placement, World
from services.router.costs import Ask, Parameters, Role, WorkerState
from services.router.index import PrefixIndex
from services.router.policy import Choice, candidates, choose
from services.router.shortlist import Fleet
from services.router.speculation import Speculation
from services.router.stored import StoredRun

REPORT_S = 0.1
"""Workers report when something changes: with chunks of 512 tokens at 6,000 a second each 85 ms."""
EXPECT_S = 2.0
EPOCH = 1
PARAMETERS = Parameters()


class Ours:
    """`loads`: whether prompts may load from other nodes' caches. `ttft_slo_s`: refuse what cannot make it; 0 never."""

    def __init__(self, *, loads: bool = True, ttft_slo_s: float = 0.0) -> None:
        self.name = "ours" if loads else "ours_without_loading"
        self._loads = loads
        self._ttft_slo_s = ttft_slo_s
        self._index = PrefixIndex(1 << 40)
        self._speculation = Speculation(self._index, max_keys=1 << 40)
        self._fleet = Fleet(PARAMETERS)
        self._seqs: dict[int, int] = {}
        self._reported: dict[int, float] = {}
        self._placed = 0
        self._next_report = 0.0

    def stored(self, node: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """A node's cache event."""
        seq = self._seqs[node] = self._seqs.get(node, -1) + 1
        self._index.apply(_prefill(node), EPOCH, seq, stored=stored, removed=removed, cleared=seq == 0)

    def changed(self, world: World, node: int) -> None:
        """A load report, or our own reservation."""
        state, rate = world.prefills[node], world.setting.prefill_tok_s
        if state.down:
            self._speculation.forget(_prefill(node))
        self._fleet.put(
            _state(
                _prefill(node), Role.PREFILL, queued_tokens=state.backlog(world.now) * rate, prefill_tok_s=rate,
                block_size=world.block, block_bytes=world.setting.kv_bytes * world.block,
                unusable="QUARANTINED: down" if state.down else "", as_of=world.now,
            )
        )  # fmt: skip

    def place(self, world: World, job: Job) -> Placement | None:
        """The policy's word."""
        self._report(world)
        self._speculation.expire(world.now)
        self._placed += 1
        keys = b"".join(job.request.keys)
        found = self._index.prefix(keys)
        held = dict(found)  # what can be loaded now: nothing that is only expected
        self._speculation.extend(found, keys)
        ask = Ask(
            uid=str(self._placed), prompt_tokens=job.prompt, output_tokens=128.0, strict=True,
            hits={id: blocks * world.block for id, blocks in found.items()}, ttft_slo_s=self._ttft_slo_s,
            stored=self._stored(world, held), now=world.now,
        )  # fmt: skip
        rate = world.setting.link_bytes_s

        def load_time(store: str, tier: str, worker: str, size: float) -> float:
            return size / rate

        states = self._fleet.shortlist(ask, load_time)
        choice = choose(candidates(states, ask, lambda p, d: rate, PARAMETERS, load_time=load_time), ask, PARAMETERS)
        if not isinstance(choice, Choice) or choice.winner.prefill is None:
            return None
        chosen, terms, load = choice.winner.prefill.id, choice.winner.terms, choice.winner.load
        until = world.now + terms.queue + terms.load + terms.prefill + EXPECT_S
        self._speculation.expect(chosen, keys, found.get(chosen, 0), until)
        decode = _number(choice.winner.worker.id) if world.decodes else -1
        return Placement(_number(chosen), decode, _number(load.store) if load else -1)

    def _stored(self, world: World, held: dict[str, int]) -> list[StoredRun]:
        """The longest run that a node's cache holds: with equal links no other is worth a look."""
        if not self._loads or not held:
            return []
        source = max(held, key=lambda id: (held[id], id))
        return [StoredRun(source, "sim", world.block, {"host": held[source]})]

    def _report(self, world: World) -> None:
        """Every node's load report, when it is due."""
        if world.now < self._next_report and self._placed:
            return
        self._next_report = world.now + REPORT_S
        for node in world.prefills:
            self.changed(world, node.number)
        setting = world.setting
        for decode in world.decodes:
            self._fleet.put(
                _state(
                    f"decode-{decode.number}", Role.DECODE, streams=decode.streams, max_streams=setting.max_streams,
                    step_s=setting.step_s + setting.step_stream_s, stream_s=setting.step_stream_s,
                    block_size=world.block, block_bytes=setting.kv_bytes * world.block,
                    unusable="QUARANTINED: down" if decode.down else "",
                )
            )  # fmt: skip
        if not world.decodes:
            self._fleet.put(_state("decode-0", Role.DECODE, block_size=world.block))


def _prefill(node: int) -> str:
    return f"prefill-{node}"


def _number(id: str) -> int:
    return int(id.partition("-")[2])


def _state(
    id: str,
    role: Role,
    *,
    queued_tokens: float = 0.0,
    prefill_tok_s: float = 6000.0,
    streams: int = 0,
    max_streams: int = 1 << 30,
    step_s: float = 0.001,
    stream_s: float = 0.0,
    block_size: int = 1,
    block_bytes: int = 0,
    unusable: str = "",
    as_of: float = 0.0,
) -> WorkerState:
    return WorkerState(
        id=id, role=role, fingerprint="sim", block_size=block_size, block_bytes=block_bytes, max_context=0,
        max_streams=max_streams, streams=streams, queued_tokens=queued_tokens, blocks_total=0, blocks_free=0,
        prefill_tok_s=prefill_tok_s, step_s=step_s, stream_s=stream_s, unusable=unusable, as_of=as_of,
    )  # fmt: skip
