"""Grammars of this engine's requests, compiled in a thread of their own: a request waits for its grammar, no step does.

The compiler frees the GIL. Of what was compiled last some is kept: the requests of one application share a grammar.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.port import Grammar
from baton.errors import BatonError
from baton.grammar.compile import Program
from baton.grammar.follow import Follower

MAX_KEPT = 8
"""What outputs have met of a grammar stays with it: tens of MiB of a large one."""


@dataclass(eq=False)
class Compiled:
    """A grammar on its way. `program` once it is there; `error` instead when it cannot be."""

    grammar: Grammar
    program: Program | None = None
    error: str = ""

    def follower(self) -> Follower:
        """For one output, at its beginning. The grammar must be there."""
        assert self.program is not None
        return Follower(self.program)


class Grammars:
    """`compile` runs in the thread, which starts with the first grammar; `done` is called there after each.

    Unbounded in itself: each request asks once, and requests are bounded.
    """

    def __init__(self, compile: Callable[[Grammar], Program], done: Callable[[], None]) -> None:
        self._compile = compile
        self._done = done
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._queue: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def get(self, grammar: Grammar) -> Compiled:
        """The grammar, compiled or soon to be. Called under the engine's lock."""
        compiled = self._kept.get(grammar)
        if compiled is None:
            compiled = self._kept[grammar] = Compiled(grammar)
            self._queue.put(compiled)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        self._kept.move_to_end(grammar)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return compiled

    def drop(self, compiled: Compiled) -> None:
        """Compile it anew for the next request: what one output made of it was too much."""
        if self._kept.get(compiled.grammar) is compiled:
            del self._kept[compiled.grammar]

    def _run(self) -> None:
        while True:
            compiled = self._queue.get()
            try:
                compiled.program = self._compile(compiled.grammar)
            except BatonError as error:
                compiled.error = error.message
            except (
                BaseException
            ) as error:  # a panic of the compiler is no Exception, and the next grammar needs the thread
                compiled.error = f"{type(error).__name__}: {error}"
            self._done()
