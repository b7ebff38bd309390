"""Clients that others wrote, unmodified, each in its own program: text, streams, tools, structured output, errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.clients.conftest import HERE, JS, Run

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_official_python_client(run: Run) -> None:
    run(sys.executable, HERE / "openai_program.py")


def test_official_javascript_client(run: Run, node: str) -> None:
    run(node, HERE / "openai_program.cjs", CLIENTS_JS=str(JS))


def test_anthropics_client(run: Run) -> None:
    run(sys.executable, HERE / "anthropic_program.py")


def test_langchain(run: Run, python: Path) -> None:
    run(python, HERE / "langchain_program.py")


def test_litellm(run: Run, python: Path) -> None:
    run(python, HERE / "litellm_program.py")
