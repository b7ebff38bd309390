"""What a body says it is: JSON in UTF-8, not compressed. Anything else is refused before a byte of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from email.message import Message

from baton.errors import BatonError, Reason

_CHARSETS = ("utf-8", "utf8", "us-ascii")


def check_media_type(headers: Mapping[str, str]) -> None:
    """Raises BatonError(UNSUPPORTED_MEDIA_TYPE). Without a Content-Type it is taken for JSON."""
    given = Message()
    given["content-type"] = headers.get("content-type") or "application/json"
    kind = given.get_content_type()
    if kind != "application/json" and not kind.endswith("+json"):
        said = str(given["content-type"]).partition(";")[0].strip()
        raise _refused(f"The body must be application/json, not {said[:80]}.")
    charset = given.get_content_charset("utf-8")
    if charset not in _CHARSETS:
        raise _refused(f"The body must be UTF-8, not {charset[:40]}.")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise _refused(f"The body must not be compressed (Content-Encoding {encoding[:40]}).")


def _refused(message: str) -> BatonError:
    return BatonError(Reason.UNSUPPORTED_MEDIA_TYPE, message)
