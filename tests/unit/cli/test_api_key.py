"""The CLI asks with the first key of the frontend's own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.api_key import authorization
from baton.cli.errors import CliError


def test_the_first_key_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_API_KEYS_FILE", raising=False)
    assert authorization() == {}
    path = tmp_path / "keys"
    monkeypatch.setenv("BATON_API_KEYS_FILE", str(path))
    with pytest.raises(CliError):
        authorization()
    path.write_text("# nobody\n")
    with pytest.raises(CliError):
        authorization()
    path.write_text("# ours\n\n sk-one \nsk-two\n")
    assert authorization() == {"authorization": "Bearer sk-one"}
    path.write_text("sk-three acme\nsk-two\n")
    assert authorization() == {"authorization": "Bearer sk-three"}, "without its tenant"
