"""Settings: flag > environment (`BATON_<FIELD>`) > file (`BATON_CONFIG`, TOML) > default. One typed class a service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="ignore",
    )

    cluster: str = Field(default="local", description="Name under which processes find each other.")
    etcd: str = Field(default="127.0.0.1:2379", description="etcd endpoints, host:port, comma separated.")
    host: str = Field(default="127.0.0.1", description="Address to listen on, and to be reached at.")
    port: int = Field(default=0, ge=0, le=65535, description="Port of the service; 0 = any free one.")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of /metrics; 0 = any free one.")
    id: str = Field(default="", description="Name of this process; empty = role and a random suffix.")
    drain_s: float = Field(
        default=20.0, ge=0, description="Seconds after SIGTERM until what still runs is moved elsewhere or ended."
    )
    log_level: str = Field(default="info", description="debug, info, warning or error.")
    log_json: bool = Field(default=False, description="Logs as JSON lines instead of text.")

    @property
    def etcd_endpoints(self) -> list[str]:
        """The endpoints one by one."""
        return [e.strip() for e in self.etcd.split(",") if e.strip()]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Read flags, environment and file. A wrong flag ends the process with one line and exit code 2."""
        try:
            return cls(_cli_parse_args=list(argv), _cli_exit_on_error=True)  # type: ignore[call-arg]
        except ValidationError as error:
            wrong = "; ".join(f"--{_flag(e['loc'])}: {e['msg']}" for e in error.errors())
            sys.stderr.write(f"error: {wrong} (see --help)\n")
            raise SystemExit(2) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come first by themselves; then environment, then the file that BATON_CONFIG names."""
        file = os.environ.get("BATON_CONFIG")
        sources = (init_settings, env_settings)
        return (*sources, TomlConfigSettingsSource(settings_cls, file)) if file else sources


def _flag(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)).replace("_", "-")
