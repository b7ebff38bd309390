"""API keys: who may ask, and whose it is. A file with one key a line (`sk-...`; blank lines and lines that begin with #
aside), and behind it, if it has one, the name of its tenant (`sk-... acme`).

The file is looked at again once a second while requests come, so a key is added or taken away without a restart. When
it cannot be read, or has no key, the keys of before stay: a slip of the pen neither opens the server nor shuts it.
Only digests are kept, and every known one is compared in constant time: how long it takes says nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from pathlib import Path

import structlog
from prometheus_client import Counter
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError, Reason
from services.frontend.refusals import refusal

RECHECK_S = 1.0
MAX_FILE_BYTES = 1 << 20
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A tenant's name: what a store's quotas, its records and a label of a metric can have."""
WORD = re.compile(r"[^ \t\r]+")
SCOPE_KEY = "baton.tenant"

_log = structlog.get_logger()


class ApiKeys:
    """The keys in a file. Raises BatonError(INVALID_REQUEST) when there are none at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._known: dict[bytes, str] = {}
        """The tenant of each key, by its digest."""
        self._seen = self._look()
        self._looked = time.monotonic()
        try:
            self._known = self._read()
        except (OSError, ValueError) as error:
            raise BatonError(Reason.INVALID_REQUEST, f"--api-keys-file {path}: {error}") from error

    def check(self, authorization: str | None, x_api_key: str | None = None) -> str:
        """The tenant ("": none) of the key in the header `Authorization: Bearer KEY`, or without it in `x-api-key: KEY`
        as Anthropic's clients send it. Raises BatonError(UNAUTHORIZED) when it is not known."""
        self._follow()
        given = (authorization or "").strip() or f"Bearer {x_api_key or ''}"
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise BatonError(
                Reason.UNAUTHORIZED, "You didn't provide an API key. Send it in the header 'Authorization: Bearer KEY'."
            )
        digest = self._digest(key.strip())
        tenants = [tenant for known, tenant in self._known.items() if hmac.compare_digest(digest, known)]
        if not tenants:
            raise BatonError(Reason.UNAUTHORIZED, "Incorrect API key provided.")
        return tenants[0]

    def _follow(self) -> None:
        """Take the file's keys when it has changed."""
        now = time.monotonic()
        if now - self._looked < RECHECK_S:
            return
        self._looked = now
        seen = self._look()
        if seen is None or seen == self._seen:
            return
        try:
            self._known = self._read()
            _log.info("API keys read again", keys=len(self._known))
        except (OSError, ValueError) as error:
            _log.error("API keys not read: those of before stay", error=str(error))
        self._seen = seen

    def _look(self) -> tuple[int, int, int] | None:
        """What changes with the file; None while it is not there (it is being replaced, or lost)."""
        try:
            seen = self._path.stat()
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size, seen.st_ino

    def _read(self) -> dict[bytes, str]:
        # Without O_NONBLOCK, opening a FIFO waits for a writer, and everybody with it.
        with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no file")
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"the file is larger than {MAX_FILE_BYTES} bytes")
        known: dict[bytes, str] = {}
        # Not `splitlines`: to it U+2028 and the like end a line too, and what follows one in a comment would be a key.
        for number, line in enumerate(data.decode("utf-8-sig").split("\n"), 1):
            key, *rest = WORD.findall(line) or [""]
            if not key or key.startswith("#"):
                continue
            if len(rest) > 1 or not all(map(TENANT.fullmatch, rest)):
                raise ValueError(f"line {number} is neither KEY nor KEY TENANT (letters, digits, . _ -)")
            tenant = rest[0] if rest else ""
            if known.setdefault(self._digest(key), tenant) != tenant:
                raise ValueError(f"the key of line {number} has two tenants")
        if not known:
            raise ValueError("the file has no key")
        return known

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._secret, digest_size=32).digest()


OPEN = ("/health", "/ready", "/metrics", "/openapi.json", "/version")
"""Who asks for these sends no key."""


def tenant_of(request: Request) -> str:
    """Whose request it is; "" without a key, or when its key is no tenant's."""
    tenant: str = request.scope.get(SCOPE_KEY, "")
    return tenant


class RequireKey:
    """ASGI middleware: everything but what is `OPEN` needs a key. What passes has its tenant in the scope."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, refused: Counter) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse before anything is read."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = dict(scope["headers"])
            given = (headers.get(name, b"").decode("latin-1") for name in (b"authorization", b"x-api-key"))
            try:
                scope[SCOPE_KEY] = self._keys.check(*given)
            except BatonError as error:
                self._refused.inc()
                await refusal(scope, error, {"www-authenticate": 'Bearer realm="baton"'})(scope, receive, send)
                return
        await self._app(scope, receive, send)
