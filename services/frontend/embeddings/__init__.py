"""`/v1/embeddings`: the mean of the served model's last hidden states, at unit length."""

PATH = "/v1/embeddings"
