"""The router's policy in the simulator: its own index, speculation, shortlist, candidates and choice.

What is simulated is only how it is told: caches by events as they change, load by reports each `REPORT_S` and, in
between, by its own placements (the reservations of a router), loads by what they took. Without tiers a node's cache is
also the KV store of that node, from which the others load (README.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.sim.fleet import Job
from bench.sim.tiers import HOST, NVME
from bench.sim.work import Work
from bench.sim.world import Placement, World
from services.router.costs import Ask, Parameters, Role, WorkerState
from services.router.index import Found, PrefixIndex
from services.router.loads import LoadRates
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
        self._rates = LoadRates()
        self._seqs: dict[str, int] = {}
        self._reported: dict[int, float] = {}
        self._placed = 0
        self._next_report = 0.0

    def stored(self, node: int, stored: Sequence[bytes], removed: Sequence[bytes], tier: str = "") -> None:
        """An event of a node's cache or store."""
        source = _store(node) if tier else _prefill(node)
        seq = self._seqs[source] = self._seqs.get(source, -1) + 1
        self._index.apply(source, EPOCH, seq, stored=stored, removed=removed, cleared=seq == 0, tier=tier)

    def loaded(self, world: World, node: int, begun: Work) -> None:
        """The outcome of a load, as a frontend reports it."""
        if begun.source is not None:
            tier, size = NVME if begun.disk else HOST, begun.loaded * world.setting.kv_bytes
            self._rates.loaded(_store(begun.source.number), tier, _prefill(node), size, begun.load_s, world.now)

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
        known = self._index.look_up(keys)
        stored = self._stored(world, known)  # what can be loaded now: nothing that is only expected
        found = known.workers
        self._speculation.extend(found, keys)
        ask = Ask(
            uid=str(self._placed), prompt_tokens=job.prompt, output_tokens=128.0, strict=True,
            hits={id: blocks * world.block for id, blocks in found.items()}, ttft_slo_s=self._ttft_slo_s,
            stored=stored, now=world.now,
        )  # fmt: skip
        rate, tiers = world.setting.link_bytes_s, world.setting.tiers

        def load_time(store: str, tier: str, worker: str, size: float) -> float:
            return self._rates.seconds(store, tier, worker, size, world.now) if tiers else size / rate

        states = self._fleet.shortlist(ask, load_time)
        choice = choose(candidates(states, ask, lambda p, d: rate, PARAMETERS, load_time=load_time), ask, PARAMETERS)
        if not isinstance(choice, Choice) or choice.winner.prefill is None:
            return None
        chosen, terms, load = choice.winner.prefill.id, choice.winner.terms, choice.winner.load
        until = world.now + terms.queue + terms.load + terms.prefill + EXPECT_S
        self._speculation.expect(chosen, keys, found.get(chosen, 0), until)
        decode = _number(choice.winner.worker.id) if world.decodes else -1
        upto = (load.tokens if load else 0) if tiers else None
        return Placement(_number(chosen), decode, _number(load.store) if load else -1, upto)

    def _stored(self, world: World, known: Found) -> list[StoredRun]:
        """What stores hold. Without tiers the longest run that a node's cache holds: with equal links no other is worth
        a look."""
        if not self._loads:
            return []
        if world.setting.tiers:
            return [StoredRun(store, "sim", world.block, tiers) for store, tiers in known.stores.items()]
        held = known.workers
        if not held:
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
        setting, tiers = world.setting, world.setting.tiers
        if tiers:
            for node in world.prefills:
                self._rates.told(_store(node.number), HOST, setting.link_bytes_s, 0.0)
                self._rates.told(_store(node.number), NVME, tiers.nvme_bytes_s, 0.0)
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


def _store(node: int) -> str:
    return f"store-{node}"


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
