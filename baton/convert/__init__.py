"""One GGUF file into a directory in the Hugging Face layout, which any engine loads."""
