"""Large bodies that are on their way keep nobody out but other large ones."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from baton.model.card import Model
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, running
from tests.unit.frontend.test_failures import HI, says

pytestmark = pytest.mark.timeout(60)
LARGEST = 1 << 20


async def test_clients_that_send_large_bodies_slowly_keep_no_small_one_out(model: Model) -> None:
    """Each says how much it will send, and then takes its time."""
    async with running(model, ScriptedWorker("a", says(model)), max_body_held=2 * LARGEST) as stack:
        host, _, port = stack.url.removeprefix("http://").partition(":")
        slow = []
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port))
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {LARGEST}\r\n\r\n{{".encode())
            slow.append(writer)
        await asyncio.sleep(0.3)
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http:
            asked = {"model": model.name, "messages": HI}
            reply = await http.post(f"{stack.url}/v1/chat/completions", json=asked)
        for writer in slow:
            writer.close()
    assert reply.status_code == 200, reply.text
