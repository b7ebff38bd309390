"""Commands as a person would type them here: to look again, to end the run, to start what it lacks."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from baton.cli.home import HOME, Home
from baton.cli.stack import up_flags


def me(home: Home) -> str:
    """This command, with the home that it was told."""
    command = "baton" if shutil.which("baton") else home.shown(Path(sys.argv[0]).resolve())
    return f"{HOME}={shlex.quote(os.environ[HOME])} {command}" if HOME in os.environ else command


def up_again(home: Home) -> str:
    """The `baton up` of this run: its flags, and those of its settings that this environment lacks."""
    saved = home.options()
    lacking = {k: v for k, v in saved.get("settings", {}).items() if os.environ.get(k) != v}
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in lacking.items())
    return f"{settings}{me(home)} {shlex.join(['up', *up_flags(saved)])}"
