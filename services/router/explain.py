"""Policy results as wire messages: plans, and candidates with their terms for `Explain`."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import BatonError
from baton.transfer.choose import Endpoint, choose
from baton.v1 import registry_pb2, router_pb2, worker_pb2
from services.router.costs import WorkerState
from services.router.policy import Candidate, Choice, Mode

_MODES = {
    Mode.DISAGGREGATED: worker_pb2.MODE_DISAGGREGATED,
    Mode.MERGED: worker_pb2.MODE_MERGED,
    Mode.LOCAL: worker_pb2.MODE_LOCAL,
}


def plan(
    choice: Choice,
    registration: Callable[[str], registry_pb2.Worker],
    store: registry_pb2.KvStore | None = None,
) -> worker_pb2.Plan:
    """The router's answer; `registration` gives that of a worker id, `store` is the one that the winner loads from."""
    winner = choice.winner
    load = winner.load if store is not None else None

    def target(state: WorkerState | None) -> worker_pb2.Target | None:
        if state is None:
            return None
        worker = registration(state.id)
        return worker_pb2.Target(id=worker.id, address=worker.address, epoch=worker.epoch)

    return worker_pb2.Plan(
        mode=_MODES[winner.mode],
        worker=target(winner.worker),
        prefill=target(winner.prefill),
        alternate=target(choice.alternate),
        cached_tokens=winner.cached_tokens,
        reasons=[reason.value for reason in choice.reasons],
        local_is_cheapest=choice.local_is_cheapest,
        predicted_ms=milliseconds(winner),
        store=worker_pb2.Target(id=store.id, address=store.address, epoch=store.epoch) if store and load else None,
        stored_tokens=load.tokens if load else 0,
        store_tier=load.tier if load else "",
    )


def milliseconds(candidate: Candidate) -> dict[str, float]:
    """The candidate's terms, and its predicted time to the first token, in milliseconds."""
    return {name: seconds * 1e3 for name, seconds in candidate.terms.items()} | {"ttft": candidate.ttft * 1e3}


def expected_transport(reader: registry_pb2.Worker, owner: registry_pb2.Worker) -> str:
    """What the two would choose, as far as registrations tell (they do not tell RDMA); empty when they share none."""
    ends = [Endpoint(worker.host, False, worker.transports) for worker in (reader, owner)]
    try:
        return choose(*ends).transport
    except BatonError:
        return ""


def candidate(item: Candidate, chosen: Candidate | None, transport: str) -> router_pb2.Candidate:
    """One candidate for `Explain`."""
    return router_pb2.Candidate(
        mode=_MODES[item.mode],
        worker=item.worker.id,
        prefill=item.prefill.id if item.prefill else "",
        terms_ms={name: seconds * 1e3 for name, seconds in item.terms.items()},
        total_ms=item.total * 1e3,
        cached_tokens=item.cached_tokens,
        chosen=item is chosen,
        excluded=item.excluded,
        transport=transport,
        store=item.load.store if item.load else "",
        stored_tokens=item.load.tokens if item.load else 0,
        store_tier=item.load.tier if item.load else "",
    )
