"""From the text of an answer to its parts: thoughts, calls, content. One short file for each way to write them."""
