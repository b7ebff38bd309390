"""Whose a prompt's KV is: a tenant's, or nobody's in particular; and which part of theirs.

Block keys begin with a salt of both. Equal prompts of two owners have no key in common, so neither finds what the other
has left in a cache, nor can tell that it is there. Without tenant and salt the keys are what they always were.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """`tenant`: of the API key, "" for a key without one; `cache_salt`: of the request, "" when it has none."""

    tenant: str = ""
    cache_salt: str = ""

    @property
    def salt(self) -> str:
        """For `Namespace.salt`. The tenant's length stands first: no salt of one tenant is another's."""
        if not self.tenant and not self.cache_salt:
            return ""
        return f"{len(self.tenant)}:{self.tenant}:{self.cache_salt}"


NOBODY = Owner()
