"""Policy results as wire messages: plans, and candidates with their terms for `Explain`."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import BatonError, Reason
from baton.rpc.codec import layout_from_pb
from baton.transfer.choose import Endpoint, choose
from baton.v1 import registry_pb2, router_pb2, worker_pb2
from services.router.costs import Terms
from services.router.policy import Candidate, Choice, Mode

_MODES = {
    Mode.DISAGGREGATED: worker_pb2.MODE_DISAGGREGATED,
    Mode.MERGED: worker_pb2.MODE_MERGED,
    Mode.LOCAL: worker_pb2.MODE_LOCAL,
}


def put_plan(
    plan: worker_pb2.Plan,
    choice: Choice,
    target: Callable[[str], worker_pb2.Target],
    store: registry_pb2.KvStore | None = None,
) -> None:
    """Write the router's answer into an empty `plan`; `target` gives that of a worker id, `store` is the one that the
    winner loads from. In place, because a message given to another's constructor is copied."""
    winner = choice.winner
    plan.mode = _MODES[winner.mode]
    plan.worker.CopyFrom(target(winner.worker.id))
    if winner.prefill is not None:
        plan.prefill.CopyFrom(target(winner.prefill.id))
    if choice.alternate is not None:
        plan.alternate.CopyFrom(target(choice.alternate.id))
    plan.cached_tokens = winner.cached_tokens
    plan.reasons.extend(choice.reasons)
    plan.local_is_cheapest = choice.local_is_cheapest
    predicted = plan.predicted_ms
    for name, seconds in zip(Terms._fields, winner.terms, strict=True):
        predicted[name] = seconds * 1e3
    predicted["ttft"] = winner.ttft * 1e3
    if store is not None and winner.load is not None:
        plan.store.id, plan.store.address, plan.store.epoch = store.id, store.address, store.epoch
        plan.stored_tokens = winner.load.tokens
        plan.store_tier = winner.load.tier


def expected_transport(reader: registry_pb2.Worker, owner: registry_pb2.Worker) -> str:
    """What the two would choose, as far as registrations tell (they do not tell RDMA); empty when they share none."""
    ends = [Endpoint(worker.host, False, worker.transports) for worker in (reader, owner)]
    try:
        return choose(*ends).transport
    except BatonError:
        return ""


def mismatch(prefill: registry_pb2.Worker, decode: registry_pb2.Worker) -> str:
    """Why the KV of two workers does not pair, in words."""
    name = Reason.KV_LAYOUT_MISMATCH.name
    if not (prefill.HasField("layout") and decode.HasField("layout")):
        return f"{name}: {prefill.fingerprint or 'no KV'} != {decode.fingerprint or 'no KV'}"
    engines = [f"engine: {prefill.engine} != {decode.engine}"] if prefill.engine != decode.engine else []
    differ = engines + layout_from_pb(prefill.layout).differences(layout_from_pb(decode.layout))
    return f"{name}: {prefill.id} and {decode.id} differ in {', '.join(differ)}"


def candidate(
    item: Candidate, chosen: Candidate | None, transport: str, excluded: str | None = None
) -> router_pb2.Candidate:
    """One candidate for `Explain`; `excluded` in place of the policy's own words."""
    return router_pb2.Candidate(
        mode=_MODES[item.mode],
        worker=item.worker.id,
        prefill=item.prefill.id if item.prefill else "",
        terms_ms={name: seconds * 1e3 for name, seconds in zip(Terms._fields, item.terms, strict=True)},
        total_ms=item.total * 1e3,
        cached_tokens=item.cached_tokens,
        chosen=item is chosen,
        excluded=item.excluded if excluded is None else excluded,
        transport=transport,
        store=item.load.store if item.load else "",
        stored_tokens=item.load.tokens if item.load else 0,
        store_tier=item.load.tier if item.load else "",
    )
