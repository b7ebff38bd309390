"""What a KV block is: its key, its layout, where its bytes lie, and its checksum."""
