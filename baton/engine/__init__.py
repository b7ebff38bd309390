"""The Engine port and the engines behind it."""
