"""OpenAI's Responses API, on top of the chat path."""
