"""Chat templates: the model's own jinja text, run in a sandbox that can neither change nor reach anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import BatonError, Reason
from baton.model.errors import ModelError
from baton.model.files import ModelFiles


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; when serving it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """A compiled template. `text` "" means that the model has none: `render` then refuses."""

    def __init__(self, text: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.text = text
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(text))
            """Whether it writes the tools that it is given."""
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a conversation. A null or missing content reads as "".

        `variables` reach the template beside the standard names and cannot replace them.
        Raises BatonError(INVALID_REQUEST, param "messages") when the model has no template or it refuses the messages.
        """
        if not self.text:
            raise BatonError(
                Reason.INVALID_REQUEST, "This model has no chat template; use /v1/completions.", param="messages"
            )
        conversation = [dict(m) | {"content": "" if m.get("content") is None else m["content"]} for m in messages]
        names = {
            **(variables or {}),
            **self._tokens,
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise BatonError(
                Reason.INVALID_REQUEST, f"The chat template refused the messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise BatonError(
                Reason.INVALID_REQUEST, f"The chat template could not render the messages: {error}", param="messages"
            ) from error


def load_template(files: ModelFiles, *, bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """The chat template of a model: chat_template.jinja, else tokenizer_config.json's, else the GGUF's, else none."""
    return ChatTemplate(_find(files), bos_token=bos_token, eos_token=eos_token)


def _find(files: ModelFiles) -> str:
    if files.gguf is not None:
        return _text(files.gguf.metadata.get("tokenizer.chat_template"))
    path = files.path / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return _text(files.tokenizer_config.get("chat_template"))


def _text(value: Any) -> str:
    """One template, or the default one out of a list of named ones."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
