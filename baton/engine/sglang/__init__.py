"""SGLang beside Baton: its hierarchical cache on our KV store, and its processes behind our services."""
