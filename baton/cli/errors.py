"""How the command line fails: one line that says what happened, and what to do next."""

from __future__ import annotations


class CliError(Exception):
    """Shown as `error: <message>`, then `hint: <hint>`; the exit code is 1. `detail` (log lines) is shown before."""

    def __init__(self, message: str, hint: str = "", *, detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail
