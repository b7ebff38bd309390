"""Wiring of the decode worker."""

from __future__ import annotations

import sys

from baton.worker.runtime import run_worker
from baton.worker.settings import WorkerSettings
from services.decode.service import DECODE


def main() -> None:
    """Run until told to stop."""
    run_worker(DECODE, WorkerSettings.parse(sys.argv[1:]))
