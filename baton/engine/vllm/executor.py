"""vLLM's model in EngineCore's own process, on one CPU core.

vLLM's default on a CPU is a process for the scheduler and one for each rank, which wait for each other by spinning:
with one rank that is a second core spent on waiting, and a process of a gigabyte more. It exists there to set up
OpenMP, which one thread does not need.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

CORE = "baton_core"
"""The core to compute on: key of `kv_connector_extra_config`."""


class OneCoreExecutor(UniProcExecutor):
    """One rank, in this process, on the core that the configuration names. OMP_NUM_THREADS is 1 in its environment."""

    def _init_executor(self) -> None:
        config: Any = self.vllm_config
        os.sched_setaffinity(0, {config.kv_transfer_config.kv_connector_extra_config[CORE]})
        super()._init_executor()
