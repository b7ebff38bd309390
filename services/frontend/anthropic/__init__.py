"""Anthropic's Messages API, on top of the chat path."""

PATH = "/v1/messages"


def owns(path: str) -> bool:
    """Whether a path is one of this API."""
    return path == PATH or path.startswith(f"{PATH}/")
