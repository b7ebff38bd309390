"""Our KV connector, as vLLM loads it into its own processes (`kv_connector_module_path`).

The scheduler's side plans (`plan.py`), the worker's side of each rank copies (`copying.py`). What a request may load is
in staging, verified, before vLLM sees the request: so a load is a memcpy that cannot fail, is done before the forward
pass that needs it, and nothing of vLLM's paths for asynchronous or failed loads is ever entered.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from baton.engine.page import StatsPage
from baton.engine.port import EngineStats
from baton.engine.predict import StepCost
from baton.engine.vllm import messages as m
from baton.engine.vllm.copying import BlockCopier, block_views
from baton.engine.vllm.plan import Planner, StepPlan
from baton.engine.vllm.rank import HostLink
from baton.kv.arena import Arena

PATH = "baton_socket"
"""Where the worker listens: key of `kv_connector_extra_config`."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What goes from the scheduler's side to every rank."""

    plan: StepPlan = field(default_factory=StepPlan)


class BatonConnector(KVConnectorBase_V1):
    """Both sides: vLLM makes one object for each."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._path: str = self._kv_transfer_config.kv_connector_extra_config[PATH]
        self._link: HostLink | None = None
        self._copier: BlockCopier | None = None
        self._ended: list[int] = []
        self._rank = 0
        if role is KVConnectorRole.SCHEDULER:
            self._planner = Planner(vllm_config.cache_config.block_size)
            self._link = HostLink(self._path, m.Scheduler(), 1)
            self._steps = StepWatch(StatsPage(self._link.descriptors[0]))

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what a preempted request has completed is in staging."""
        return False

    # ---- the scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """What staging adds to vLLM's own prefix hits; never asynchronous."""
        planner, params = self._planner, request.kv_transfer_params
        return planner.matched(request.request_id, params, num_computed_tokens, request.all_token_ids), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks that the load goes to."""
        self._planner.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's copies."""
        planner = self._planner
        for new in scheduler_output.scheduled_new_reqs:
            planner.scheduled(new.req_id, new.num_computed_tokens, new.block_ids[0], anew=True)
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            resumed = request_id in cached.resumed_req_ids
            planner.scheduled(
                request_id, cached.num_computed_tokens[i], blocks[0] if blocks is not None else (), anew=resumed
            )
        assert self._link is not None
        while self._link.spares:
            spare = self._link.spares.popleft()
            planner.spare(spare.job, spare.slot)
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            planner.computes(request_id, tokens)
        self._steps.begin(list(scheduler_output.num_scheduled_tokens.values()), len(cached.resumed_req_ids))
        return StepMetadata(planner.take())

    def update_connector_output(self, connector_output: Any) -> None:
        """The step is over."""
        self._steps.end()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM may have its blocks back at once: what was to be kept is in staging."""
        self._planner.finished(request.request_id, request.kv_transfer_params)
        return False, None

    # ---- a rank's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Say what a block is here, and get the arena."""
        config = self._vllm_config
        blocks = self._kv_cache_config.num_blocks
        views = block_views(list(kv_caches.values()), blocks)
        block = views[0][0]
        rank, world = config.parallel_config.rank, config.parallel_config.world_size
        self._rank = rank
        hello = m.Rank(
            rank=rank,
            pid=os.getpid(),
            layers=len(views),
            shape=list(block.shape),
            order=f"{block.device.type}:{'x'.join(map(str, block.shape))}",
            dtype=str(block.dtype).removeprefix("torch."),
            block_bytes=len(views) * block.numel() * block.dtype.itemsize,
        )
        self._link = HostLink(self._path, hello, 1)
        arena = Arena.attach(self._link.descriptors[0])
        self._copier = BlockCopier(views, arena.buffer, rank, world)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step's plan."""
        super().bind_connector_metadata(connector_metadata)
        self._ended += self._plan.ended

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the forward pass: all of it, at once."""
        assert self._copier is not None
        for copy in self._plan.loads:
            self._copier.load(copy.slots, copy.blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is under way."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, when every layer has them."""

    def wait_for_save(self) -> None:
        """After the forward pass: what it completed goes to staging and is told."""
        assert self._copier is not None
        assert self._link is not None
        for copy in self._plan.saves:
            prompt = m.Sealed(self._rank, copy.job, copy.first, len(copy.slots))
            told = m.Output(self._rank, copy.job, copy.key) if copy.key else prompt
            self._copier.save(copy.blocks, copy.slots, partial(self._link.send, told))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Called at the end of each step, of an empty one too: what came before it is done."""
        ended, self._ended = self._ended, []
        assert self._copier is not None
        assert self._link is not None
        for job in ended:
            self._copier.then(partial(self._link.send, m.Ended(self._rank, job)))
        return None, None

    def broken(self, job: int, message: str) -> None:
        """No token can be drawn for that job: the sampler's word."""
        assert self._link is not None
        self._link.send(m.Broken(job, message))


class StepWatch:
    """Publishes the state of vLLM's steps for whoever wonders whether it gets on."""

    def __init__(self, page: StatsPage) -> None:
        self._page = page
        self._cost = StepCost()
        self._stats = EngineStats()
        self._tokens: tuple[int, int] = (0, 0)

    def begin(self, scheduled: list[int], resumed: int) -> None:
        """A step of so many tokens of each request; `resumed` of them had been preempted."""
        if not scheduled:
            return
        decoding = sum(tokens == 1 for tokens in scheduled)
        self._tokens = sum(scheduled) - decoding, decoding
        self._write(
            step_started=time.time(),
            step_predicted_s=self._cost.predict(*self._tokens),
            preemptions=self._stats.preemptions + resumed,
        )

    def end(self) -> None:
        """The running step's output is there."""
        started = self._stats.step_started
        if not started:
            return
        self._cost.learn(*self._tokens, time.time() - started)
        self._write(
            step_started=0.0,
            step_predicted_s=0.0,
            steps=self._stats.steps + 1,
            prefill_tok_s=self._cost.prefill_tok_s,
            decode_step_s=self._cost.decode_step_s,
        )

    def _write(self, **changes: Any) -> None:
        self._stats = replace(self._stats, **changes)
        self._page.write(self._stats, int(time.time() * 1000))
