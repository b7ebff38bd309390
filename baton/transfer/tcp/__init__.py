"""READ over plain sockets: a small scatter-read protocol of our own."""
