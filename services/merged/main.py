"""Wiring of the merged worker."""

from __future__ import annotations

import sys

from baton.worker.runtime import run_worker
from baton.worker.settings import WorkerSettings
from services.merged.service import MERGED


def main() -> None:
    """Run until told to stop."""
    run_worker(MERGED, WorkerSettings.parse(sys.argv[1:]))
