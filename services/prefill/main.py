"""Wiring of the prefill worker."""

from __future__ import annotations

import sys

from baton.worker.runtime import run_worker
from baton.worker.settings import WorkerSettings
from services.prefill.service import PREFILL


def main() -> None:
    """Run until told to stop."""
    run_worker(PREFILL, WorkerSettings.parse(sys.argv[1:]))
