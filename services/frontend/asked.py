"""From the bytes of a body to a checked request with its prompts tokenised: every step whose cost grows with the body.

Pure, so it can run where it holds nobody up. What it gives back is small: prompts fit the context.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import msgspec

from baton.engine.port import Grammar
from baton.errors import BatonError, Reason
from baton.kv.keys import split_keys
from baton.model.card import Model
from services.frontend.anthropic.body import read_message
from services.frontend.embeddings.body import read_embeddings
from services.frontend.owner import Owner
from services.frontend.prompt import Prompt, Prompts
from services.frontend.responses.body import ResponseBody, read_response
from services.frontend.responses.truncate import truncated
from services.frontend.schema import UNASKED, ChatBody, Options, model_of, parse_chat, parse_completion, parse_json
from services.frontend.sglang.body import read_generate
from services.frontend.speech import PLAIN, Voice
from services.frontend.tokens.body import read_detokenize, read_tokenize
from services.frontend.voices import AUTO, Voices


@dataclass(frozen=True)
class Asked:
    """What a client asks for. `chat`: by messages; `echo`: completions only. `grammar` is what each answer follows, and
    `voice` how that of a chat is read."""

    options: Options
    prompts: tuple[Prompt, ...]
    chat: bool
    echo: bool = False
    grammar: Grammar | None = None
    voice: Voice = PLAIN
    told: bytes = b""
    """What the answer's format has to know of the body, as JSON; or the answer itself."""
    previous: str = ""
    """A response whose conversation this one goes on with: without it, and the items that `told` names, there are no
    prompts yet."""
    each: tuple[tuple[Options, Grammar | None], ...] = ()
    """Of each prompt, where they have options of their own."""


class Api(IntEnum):
    """Whose body it is."""

    CHAT = 0
    COMPLETION = 1
    EITHER = 2
    """A chat if it has messages, else a completion."""
    RESPONSES = 3
    MESSAGES = 4
    COUNT = 5
    """Of tokens, of a body of MESSAGES."""
    TOKENIZE = 10
    DETOKENIZE = 11
    EMBEDDINGS = 12
    GENERATE = 13
    """SGLang's."""


@dataclass(frozen=True)
class Unread:
    """A body as it came. `limit`: tokens of the context; `earlier`: what a response goes on with and refers to, as JSON
    (`responses.refer.Earlier`); `tenant`: whose it is."""

    body: bytes | bytearray
    api: Api
    limit: int
    earlier: bytes | None = None
    tenant: str = ""

    @property
    def size(self) -> int:
        """Bytes to read."""
        return len(self.body) + len(self.earlier or b"")


UNLIMITED = 1 << 40
"""Tokens, where a prompt is counted and not served."""
_MODEL_IS_KNOWN = (Api.TOKENIZE, Api.DETOKENIZE, Api.GENERATE)
"""Where a body need not name one."""


Fields = Mapping[str, Any]


class Reading:
    """How bodies for one model are read; `tools` and `reasoning` name parsers of its answers. Thread-safe."""

    def __init__(self, model: Model, tools: str = AUTO, reasoning: str = AUTO) -> None:
        self.prompts = Prompts(model)
        self.voices = Voices(model, tools, reasoning)
        self._name = model.name
        self._model = model
        self._vocab_size = model.tokenizer.vocab_size
        self._readers: dict[Api, Callable[[Fields, Unread], Asked]] = {
            Api.CHAT: self._chat,
            Api.COMPLETION: self._completion,
            Api.EITHER: self._either,
            Api.RESPONSES: self._response,
            Api.MESSAGES: self._message,
            Api.COUNT: self._message,
            Api.TOKENIZE: partial(self._tokens, read_tokenize),
            Api.DETOKENIZE: partial(self._tokens, read_detokenize),
            Api.EMBEDDINGS: self._embeddings,
            Api.GENERATE: self._generate,
        }

    def read(self, unread: Unread) -> Asked:
        """The request in a body. Raises BatonError with what is wrong with it."""
        fields = parse_json(unread.body)
        if unread.api not in _MODEL_IS_KNOWN or fields.get("model") is not None:
            check_model(model_of(fields), self._name)
        try:
            return self._readers[unread.api](fields, unread)
        except RecursionError:  # orjson reads deeper than json writes
            raise BatonError(Reason.INVALID_REQUEST, "The body is nested too deeply.") from None

    def _embeddings(self, fields: Fields, unread: Unread) -> Asked:
        inputs, told = read_embeddings(fields, self._model.tokenizer, unread.limit, self._model.hidden_size)
        return Asked(UNASKED, tuple(Prompt(ids, (), "") for ids in inputs), chat=False, told=told)

    def _generate(self, fields: Fields, unread: Unread) -> Asked:
        body = read_generate(fields, self._vocab_size)
        owners = [Owner(unread.tenant, options.cache_salt) for options in body.options]
        prompts = [
            self.prompts.text(one, unread.limit, param="text", owner=owner)
            if isinstance(one, str)
            else self.prompts.ids(one, unread.limit, spelled=False, param="input_ids", owner=owner)
            for one, owner in zip(body.prompts, owners, strict=True)
        ]
        each = tuple((options, self.voices.grammar(None, options.structure)) for options in body.options)
        return Asked(body.options[0], tuple(prompts), chat=False, told=body.told, each=each)

    def _tokens(
        self, read: Callable[[Fields, Model, Voices, Prompts, int], bytes], fields: Fields, unread: Unread
    ) -> Asked:
        told = read(fields, self._model, self.voices, self.prompts, unread.limit)
        return Asked(UNASKED, (), chat=False, told=told)

    def _either(self, fields: Fields, unread: Unread) -> Asked:
        return (self._chat if "messages" in fields else self._completion)(fields, unread)

    def _chat(self, fields: Fields, unread: Unread) -> Asked:
        return self._talk(unread.tenant, parse_chat(fields, self._vocab_size), unread.limit)

    def _response(self, fields: Fields, unread: Unread) -> Asked:
        body = read_response(fields, self._vocab_size, unread.earlier)
        if not isinstance(body, ResponseBody):
            return Asked(body.options, (), chat=True, previous=body.previous, told=body.refers)
        limit, read = unread.limit, partial(self._talk, unread.tenant)
        talk = truncated(read, body.chat, limit) if body.truncate else read(body.chat, limit)
        return replace(talk, told=body.told)

    def _message(self, fields: Fields, unread: Unread) -> Asked:
        count = unread.api is Api.COUNT
        body = read_message(fields, self._vocab_size, count=count)
        limit = UNLIMITED if count else unread.limit
        return replace(self._talk(unread.tenant, body.chat, limit), told=body.told)

    def _talk(self, tenant: str, body: ChatBody, limit: int) -> Asked:
        messages, offered = self.voices.conversation(body.messages, body.tools)
        given = body.options.given or "messages"
        try:
            prompt = self.prompts.chat(
                messages,
                body.variables,
                limit,
                offered,
                generation_prompt=body.generation_prompt,
                continue_final=body.continue_final,
                add_special=body.add_special,
                param=given,
                owner=Owner(tenant, body.options.cache_salt),
            )
        except BatonError as error:
            blamed = (
                "messages" if error.param == "continue_final_message" and not body.asked_to_continue else error.param
            )
            raise BatonError(error.reason, error.message, param=given if blamed == "messages" else blamed) from error
        voice = self.voices.voice(body.tools, prompt.text)
        grammar = self.voices.grammar(body.tools, body.options.structure, voice)
        return Asked(body.options, (prompt,), chat=True, grammar=grammar, voice=voice)

    def _completion(self, fields: Fields, unread: Unread) -> Asked:
        body, make, limit = parse_completion(fields, self._vocab_size), self.prompts, unread.limit
        owner = Owner(unread.tenant, body.options.cache_salt)
        prompts = (
            make.text(given, limit, add_special=body.add_special, owner=owner)
            if isinstance(given, str)
            else make.ids(given, limit, spelled=body.echo, owner=owner)
            for given in body.prompts
        )
        grammar = self.voices.grammar(None, body.options.structure)
        return Asked(body.options, tuple(prompts), chat=False, echo=body.echo, grammar=grammar)


def check_model(name: str, ours: str) -> None:
    """Raises BatonError(MODEL_NOT_FOUND)."""
    if name != ours:
        raise BatonError(Reason.MODEL_NOT_FOUND, f"The model '{name[:200]}' does not exist.", param="model")


# ---- between two processes


class _Prompt(msgspec.Struct, array_like=True):
    ids: bytes
    keys: bytes
    text: str
    reused: int
    root: bytes
    tenant: str


class _Read(msgspec.Struct, array_like=True, tag=True):
    asked: Asked
    """Without its prompts."""
    prompts: list[_Prompt]


class _Refused(msgspec.Struct, array_like=True, tag=True):
    reason: str
    message: str
    param: str | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Read | _Refused).decode


def pack(answer: Asked | BatonError) -> bytes:
    """An answer as bytes."""
    if isinstance(answer, BatonError):
        return _encode(_Refused(answer.reason.name, answer.message, answer.param))
    return _encode(_Read(replace(answer, prompts=()), [_packed(prompt) for prompt in answer.prompts]))


def unpack(data: bytes) -> Asked:
    """The answer in `data`. Raises the BatonError that it is."""
    answer = _decode(data)
    if isinstance(answer, _Refused):
        raise BatonError(Reason.from_name(answer.reason), answer.message, param=answer.param)
    return replace(answer.asked, prompts=tuple(map(_unpacked, answer.prompts)))


def _packed(prompt: Prompt) -> _Prompt:
    ids, keys = array("I", prompt.ids).tobytes(), b"".join(prompt.keys)
    return _Prompt(ids, keys, prompt.text, prompt.reused, prompt.root, prompt.tenant)


def _unpacked(prompt: _Prompt) -> Prompt:
    ids, keys = array("I", prompt.ids), tuple(split_keys(prompt.keys))
    return Prompt(ids, keys, prompt.text, prompt.reused, prompt.root, prompt.tenant)
