"""Views: what goes, what is doubted, what stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from baton.registry import view as view_module
from baton.registry.lease import GOODBYE
from baton.registry.registry import encode
from baton.registry.view import Confirm, View, is_mass_removal
from baton.v1.registry_pb2 import Worker


def value(id: str, address: str = "a:1") -> bytes:
    """A registry value."""
    return encode(Worker(id=id, address=address))


@asynccontextmanager
async def a_view(
    *ids: str, confirm: Confirm[Worker] | None = None, shared: bool = False
) -> AsyncIterator[View[Worker]]:
    """A view that has listed `ids`."""
    view = View("workers", Worker, confirm, shared=shared)
    view.replace({id: value(id) for id in ids})
    try:
        yield view
    finally:
        await view.close()
        assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("suspect")]


@pytest.mark.parametrize(
    ("gone", "before", "mass"),
    [
        (1, 1, True),
        (1, 2, False),
        (2, 2, True),
        (1, 3, False),
        (2, 3, True),
        (2, 4, True),
        (2, 5, False),
        (50, 100, True),
    ],
)
def test_mass_removal_boundaries(gone: int, before: int, mass: bool) -> None:
    assert is_mass_removal(gone, before) is mass


async def test_one_of_many_goes_at_once() -> None:
    async with a_view("a", "b", "c") as view:
        view.change("a", None)
        assert set(view.items()) == {"b", "c"}
        assert not view.suspects()


async def test_all_at_once_are_held_back_and_a_put_clears() -> None:
    async with a_view("a", "b") as view:
        view.replace({})
        assert set(view.items()) == view.suspects() == {"a", "b"}
        view.change("a", value("a"))
        assert view.suspects() == {"b"}
        view.change("b", GOODBYE)
        assert set(view.items()) == {"a"}
        assert not view.suspects()


@pytest.mark.parametrize(("shared", "warnings"), [(False, 1), (True, 0)])
async def test_a_shared_entry_is_held_back_without_a_warning(shared: bool, warnings: int) -> None:
    """Whoever holds a card lets go of it in every ordered stop; another process takes it up."""
    with capture_logs() as logs:
        async with a_view("card", shared=shared) as view:
            view.change("card", None)
            assert set(view.items()) == view.suspects() == {"card"}
            view.change("card", value("card"))
            assert not view.suspects()
    assert len([line for line in logs if line["log_level"] == "warning"]) == warnings


async def test_one_after_the_other_is_a_mass_too() -> None:
    async with a_view("a", "b", "c", "d") as view:
        for id in "abcd":
            view.change(id, None)
        assert set(view.items()) == {"b", "c", "d"}
        assert view.suspects() == {"b", "c", "d"}


async def test_held_back_without_confirmation_goes_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "GRACE_S", 0.01)
    async with a_view("a", "b") as view:
        gone: list[str] = []
        view.subscribe(lambda id, worker: gone.append(id) if worker is None else None)
        view.replace({})
        assert not gone
        async with asyncio.timeout(30):
            await asyncio.gather(*view._suspects.values())
        assert sorted(gone) == ["a", "b"]
        assert not view.items()
        assert not view.suspects()


async def test_confirmation_removes_only_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "CONFIRM_S", 0.05)
    asked = asyncio.Event()

    async def confirm(worker: Worker) -> bool:
        match worker.id:
            case "refuses":
                raise ConnectionRefusedError
            case "hangs":
                await asyncio.sleep(3600)
            case "alive":
                asked.set()
                return True
        return False

    async with a_view("alive", "refuses", "hangs", "other", confirm=confirm) as view:
        tasks = dict(view._suspects)
        assert not tasks
        view.replace({})
        async with asyncio.timeout(30):
            await asyncio.gather(*(view._suspects[id] for id in ("refuses", "hangs", "other")))
            await asked.wait()
        assert set(view.items()) == view.suspects() == {"alive"}


async def test_same_value_again_tells_nobody_and_new_epoch_does() -> None:
    async with a_view("a") as view:
        told: list[str] = []
        stop = view.subscribe(lambda id, worker: told.append(worker.address if worker else "gone"))
        view.change("a", value("a"))
        view.replace({"a": value("a")})
        view.change("a", value("a", "b:2"))
        stop()
        stop()
        view.change("a", value("a", "c:3"))
        assert told == ["a:1", "b:2"]


async def test_failing_subscriber_does_not_stop_the_others() -> None:
    async with a_view() as view:
        told: list[str] = []

        def fails(id: str, worker: Worker | None) -> None:
            raise RuntimeError("no")

        view.subscribe(fails)
        view.subscribe(lambda id, worker: told.append(id))
        view.change("a", value("a"))
        assert told == ["a"]


_CHANGE = st.tuples(
    st.sampled_from("abc"), st.sampled_from(["put", "put2", "delete", "goodbye", "list", "empty", "garbage"])
)


@given(changes=st.lists(_CHANGE, max_size=30))
@settings(deadline=None, max_examples=150)
def test_told_changes_always_add_up_to_the_items(changes: list[tuple[str, str]]) -> None:
    """A subscriber's own copy equals the view, suspects are entries, and what was PUT last is there with that value."""

    async def play() -> None:
        async with a_view() as view:
            mirror: dict[str, Worker] = {}

            def apply(id: str, worker: Worker | None) -> None:
                if worker is None:
                    del mirror[id]
                else:
                    mirror[id] = worker

            view.subscribe(apply)
            present: dict[str, bytes] = {}
            for id, change in changes:
                match change:
                    case "put" | "put2":
                        present[id] = value(id, change)
                        view.change(id, present[id])
                    case "delete":
                        present.pop(id, None)
                        view.change(id, None)
                    case "goodbye":
                        present.pop(id, None)
                        view.change(id, GOODBYE)
                        assert id not in view.items()
                    case "list":
                        view.replace(present)
                    case "empty":
                        present.clear()
                        view.replace({})
                    case _:
                        view.change(id, b"[1")
                assert mirror == view.items()
                assert view.suspects() <= set(view.items())
                assert set(present) == set(view.items()) - view.suspects()
                assert all(encode(view.items()[id]) == value for id, value in present.items())

    asyncio.run(play())
