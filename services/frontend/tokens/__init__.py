"""`/tokenize` and `/detokenize`: what the served model makes of a text, without running it."""

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
