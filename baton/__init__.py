"""Baton: LLM serving with prefill and decode disaggregated."""
