"""The thread that drives an agent: posts reads, watches them to their end, and lets peers make progress.

    asleep            nothing in flight, no lease: the thread waits on an event and costs nothing
    lease             one `progress` each millisecond (measured: full speed for peers, 2-4 % of a core)
    reads in flight   polled after a sixteenth of the time already waited, at most each millisecond; late ones each 5 ms

A peer has at most `IN_FLIGHT` reads posted; the rest wait in order. So a stopped peer owes a bounded number of bytes,
and gets no new reads until it has paid. A remote agent is removed only when nothing from it is in flight: NIXL then
reports the request as unknown while its bytes still land.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from baton.transfer.nixl.agent import Agent, AgentError

IN_FLIGHT = 4
LEASE_POLL_S = 0.001
LATE_POLL_S = 0.005
SPIN_S = 0.00005
"""Below this a wait costs more than another look."""

Span = tuple[int, int, int]
"""Address, length, and 0 for host memory: what NIXL takes for a stretch of bytes."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Link:
    """A remote agent as the driver sees it: `name` under which NIXL knows it, what is posted to it and what waits."""

    name: str
    posted: int = 0
    waiting: deque[Transfer] = field(default_factory=deque)
    broken: str | None = None
    closed: bool = False

    def postable(self) -> bool:
        """Whether the next one may be posted. Only the driver's thread takes from `waiting`."""
        return bool(self.waiting) and self.posted < IN_FLIGHT


class Transfer(ABC):
    """One NIXL request. The driver calls `begin` just before it posts it, `settle` when no byte can come any more."""

    __slots__ = ("link", "local", "posted_at", "remote", "request")

    def __init__(self, link: Link, local: list[Span], remote: list[Span]) -> None:
        self.link = link
        self.local = local
        self.remote = remote
        self.request = 0
        self.posted_at = 0.0

    @abstractmethod
    def begin(self) -> bool:
        """False when nobody wants it any more; it is dropped then and never settled."""

    @abstractmethod
    def settle(self, error: str | None) -> None:
        """It is over, in whichever thread saw it. Must not block."""

    @abstractmethod
    def late(self) -> bool:
        """Whether nobody waits for it: it is watched at leisure."""


class Driver:
    """Owns `agent`. `submit`, `call` and `post_now` come from one event loop's thread, the rest is the driver's own."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._turn = threading.Lock()  # whoever holds it may use the agent and the links
        self._wake = threading.Event()
        self._inbox: deque[Callable[[], None]] = deque()
        self._links: set[Link] = set()
        self._posted: list[Transfer] = []
        self._leases = 0
        self._closing = False
        self.failure: str | None = None
        """Why the thread ended unasked, if it did; reads are refused then."""
        self._thread = threading.Thread(target=self._run, name="baton-nixl", daemon=True)
        self._thread.start()

    # --- called by the event loop -------------------------------------------------------------------------------

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread, with the agent to itself."""
        self._inbox.append(work)
        self._wake.set()

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Post each of `transfers` when its link's turn comes."""

        def enqueue() -> None:
            for transfer in transfers:
                self._enqueue(transfer)

        self.call(enqueue)

    def post_now(self, link: Link, local: list[Span], remote: list[Span]) -> int | None:
        """Post a read here and now. 0: it is done; a request: it is in flight and must be given to `watch`; None: the
        agent is busy or others wait for this link, nothing was done. Raises AgentError when the read failed.

        For small reads: the hops to the thread and back cost as much as copying a megabyte.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            if link.waiting or link.posted >= IN_FLIGHT or link.broken is not None:
                return None
            return self._start(link, local, remote)
        finally:
            self._turn.release()

    def watch(self, transfer: Transfer, request: int) -> None:
        """See `transfer`, posted by `post_now`, to its end."""
        transfer.begin()
        transfer.request = request
        self.call(lambda: self._track(transfer))

    def lease(self, change: int) -> None:
        """One more (+1) or one fewer (-1) reason to let peers make progress."""
        self._leases += change
        if self._leases == 1:
            self._wake.set()

    def knows(self, name: str) -> bool:
        """Whether an agent of that name is still there, perhaps only because reads from it are in flight (`call`)."""
        return any(link.name == name for link in self._links)

    def adopt(self, link: Link, said: str) -> None:
        """Look after `link`; `said` is the name its metadata carried. In the driver's thread (`call`)."""
        if said == link.name:
            self._links.add(link)
            return
        link.broken = f"the metadata is that of {said}, not of {link.name}"
        if not self.knows(said):
            self._agent.remove(said)

    def drop(self, link: Link) -> None:
        """Fail what waits on `link` and remove its agent as soon as nothing from it is in flight (`call`)."""
        link.closed = True
        link.broken = link.broken or "dropped"
        self._fail_waiting(link)
        self._remove_if_drained(link)

    def close(self) -> None:
        """Stop the thread; with reads in flight it stays until they end, for their requests must not go before them."""
        self._closing = True
        self._wake.set()
        if not self._posted:
            self._thread.join(timeout=5.0)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()  # before looking: what is asked from here on ends the wait below
                busy = self._pass()
                if self._closing and not self._posted and not self._inbox:
                    return
                pause = 0.0 if busy else self._pause()
                if pause is None or pause > SPIN_S:
                    self._wake.wait(pause)
        except Exception as error:
            self.failure = repr(error)
            log.critical("nixl driver ended", error=self.failure, exc_info=True)

    def _pass(self) -> bool:
        """One round: orders, a post for each link, a look at what is in flight. True when more can be posted."""
        with self._turn:
            while self._inbox:
                self._inbox.popleft()()
        for link in list(self._links):
            if link.postable():
                with self._turn:  # by itself: a post may take as long as copying a chunk, and others want the agent
                    self._post(link.waiting.popleft())
        with self._turn:
            for transfer in list(self._posted):
                self._look(transfer)
            if self._leases > 0:
                self._agent.progress()
        return bool(self._inbox) or any(link.postable() for link in self._links)

    def _pause(self) -> float | None:
        pause = LEASE_POLL_S if self._leases > 0 else None
        now = time.monotonic()
        for transfer in list(self._posted):
            wait = LATE_POLL_S if transfer.late() else min(LEASE_POLL_S, (now - transfer.posted_at) / 16)
            pause = wait if pause is None else min(pause, wait)
        return pause

    # --- with the turn ------------------------------------------------------------------------------------------

    def _enqueue(self, transfer: Transfer) -> None:
        if transfer.link.broken is None:
            transfer.link.waiting.append(transfer)
        elif transfer.begin():
            transfer.settle(transfer.link.broken)

    def _post(self, transfer: Transfer) -> None:
        if not transfer.begin():
            return
        try:
            transfer.request = self._start(transfer.link, transfer.local, transfer.remote)
        except AgentError as error:
            transfer.settle(str(error))
            self._fail_waiting(transfer.link)
            return
        if transfer.request:
            self._track(transfer)
        else:
            transfer.settle(None)

    def _start(self, link: Link, local: list[Span], remote: list[Span]) -> int:
        """A posted request, or 0 when it is done already. Whatever fails breaks the link."""
        request = 0
        try:
            request = self._agent.create(link.name, local, remote)
            if not self._agent.post(request):
                return request
        except AgentError as error:
            self._break(link, str(error))
            if request:
                self._release(request)
            raise
        self._release(request)
        return 0

    def _track(self, transfer: Transfer) -> None:
        transfer.posted_at = time.monotonic()
        transfer.link.posted += 1
        self._posted.append(transfer)

    def _look(self, transfer: Transfer) -> None:
        failure: str | None = None
        try:
            if not self._agent.finished(transfer.request):
                return
        except AgentError as error:
            failure = str(error)
            self._break(transfer.link, failure)
        self._posted.remove(transfer)
        transfer.link.posted -= 1
        self._release(transfer.request)
        transfer.settle(failure)
        if failure is not None:
            self._fail_waiting(transfer.link)
        self._remove_if_drained(transfer.link)

    def _break(self, link: Link, why: str) -> None:
        if link.broken is None:
            link.broken = why
            log.warning("nixl link broken", peer=link.name, error=why)

    def _fail_waiting(self, link: Link) -> None:
        while link.waiting:
            transfer = link.waiting.popleft()
            if transfer.begin():
                transfer.settle(link.broken or "link closed")

    def _remove_if_drained(self, link: Link) -> None:
        if not link.closed or link.posted or link not in self._links:
            return
        self._links.discard(link)
        try:
            self._agent.remove(link.name)
        except AgentError as error:
            log.warning("nixl agent not removed", peer=link.name, error=str(error))

    def _release(self, request: int) -> None:
        try:
            self._agent.release(request)
        except AgentError as error:
            log.warning("nixl request not released", error=str(error))
