"""Any OpenAI-compatible server as an engine: see README.md."""
