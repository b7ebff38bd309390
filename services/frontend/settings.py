"""What an operator can set on a frontend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.config import ServiceSettings


class FrontendSettings(ServiceSettings):
    """Settings of one frontend. `port` is its HTTP port."""

    role: str = "frontend"
    port: int = 8000
    model: str = Field(description="model directory or .gguf file: only its tokenizer, template and defaults are read")
    served_name: str = Field("", description="name in the API; default: the file's or directory's")
    fallback: Literal["auto", "strict"] = Field("auto", description="strict: an error instead of running elsewhere")
    request_timeout_s: float = Field(600.0, gt=0, description="a request that takes longer is ended with an error")
    resume_patience_s: float = Field(
        30.0, ge=0, description="how long an output that has begun waits for a worker that can go on with it"
    )
    ttft_slo_s: float = Field(
        0.0, ge=0, description="a request whose first token would come later is refused with 429; 0: none is"
    )
    client_stall_s: float = Field(30.0, gt=0, description="a client that reads nothing for so long is cut off")
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "json"] = Field(
        "auto", description="how answers write calls of tools; auto: by the chat template"
    )
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = Field(
        "auto", description="how answers mark their thoughts; auto: by the chat template"
    )
    linger_s: float = Field(
        3.0,
        ge=0,
        description="Seconds after SIGTERM, within drain-s, that connections are accepted: balancers need them",
    )
    max_requests: int = Field(1024, gt=0, description="requests under way at once; more are refused with 429")
    max_body_bytes: int = Field(16 << 20, gt=0, description="larger request bodies are refused")
    batch_dir: str = Field(
        "", description="where files and batches are kept, a directory of this frontend alone; empty: none are"
    )
    max_file_bytes: int = Field(200 << 20, gt=0, description="larger files are refused")
    batch_dir_bytes: int = Field(4 << 30, gt=0, description="what files and results may have in all")
    api_keys_file: str = Field(
        "", description="API keys, one a line, each with its tenant's name or none; empty: none is asked for"
    )
    cors_origins: str = Field("", description="web origins that may ask, comma separated; * = all; empty: none")

    @property
    def origins(self) -> tuple[str, ...]:
        """The web origins one by one."""
        return tuple(origin.strip().rstrip("/") for origin in self.cors_origins.split(",") if origin.strip())
