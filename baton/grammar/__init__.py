"""Grammars: from data to something that says which tokens may come next. Knows llguidance, and nothing of engines."""
