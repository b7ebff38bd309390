"""The page of live state: whole whenever it is read, also when its writer is stopped in the middle of a write."""

from __future__ import annotations

import threading

from baton.engine.page import _BODY, StatsPage, _body
from baton.engine.port import EngineStats


def test_a_new_page_is_all_zero() -> None:
    assert StatsPage.create().read() == (EngineStats(), 0)


def test_a_write_that_was_not_finished_is_not_seen() -> None:
    writer = StatsPage.create()
    reader = StatsPage(writer.fd)
    for steps in range(1, 5):
        writer.write(EngineStats(steps=steps, step_started=float(steps)), steps)
        half = _body(steps + 1)
        writer._map[half : half + _BODY.size // 2] = b"\x7f" * (_BODY.size // 2)
        assert reader.read() == (EngineStats(steps=steps, step_started=float(steps)), steps)


def test_what_is_read_was_written_as_a_whole() -> None:
    writer = StatsPage.create()
    reader = StatsPage(writer.fd)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            writer.write(EngineStats(running=number, steps=number, output_tokens=number), number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = 0
        for _ in range(2000):
            stats, taken = reader.read()
            assert stats.running == stats.steps == stats.output_tokens == taken >= last
            last = stats.steps
    finally:
        stop.set()
        thread.join()
    assert last > 0
