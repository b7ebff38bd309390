"""What the deploy tests need to know of the services: their folders, and which settings each one takes."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from baton.config import ServiceSettings
from baton.process import CLOSE_S, LEAVE_S

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("frontend", "router", "prefill", "decode", "merged", "kvstore")
WORKERS = ("prefill", "decode", "merged")


def settings_of(service: str) -> type[ServiceSettings]:
    """The settings class that `python -m services.<service>` parses."""
    for module_name in (f"services.{service}.settings", "baton.worker.settings"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue
        for _, found in inspect.getmembers(module, inspect.isclass):
            if issubclass(found, ServiceSettings) and found.__module__ == module_name:
                return found
    raise LookupError(f"no settings class for {service}")


def known_environment(service: str) -> set[str]:
    """Every variable that the service reads."""
    return {f"BATON_{name.upper()}" for name in settings_of(service).model_fields}


def unknown_environment(service: str, names: object) -> set[str]:
    """Which BATON_ variables of `names` the service does not read."""
    assert isinstance(names, dict | list | set)
    return {str(name) for name in names if str(name).startswith("BATON_")} - known_environment(service)


def accepts(service: str, environment: dict[str, str]) -> bool:
    """Whether the values are of the types that the service's settings ask for."""
    settings = settings_of(service)
    values = {
        name: environment[f"BATON_{name.upper()}"]
        for name in settings.model_fields
        if f"BATON_{name.upper()}" in environment
    }
    for name, value in values.items():
        settings.__pydantic_validator__.validate_assignment(settings.model_construct(), name, value)
    return True


def leaves_within_s(service: str, environment: dict[str, str]) -> float:
    """The longest that the service takes from SIGTERM to its exit."""
    default = settings_of(service).model_fields["drain_s"].default
    return float(environment.get("BATON_DRAIN_S", default)) + LEAVE_S + CLOSE_S
