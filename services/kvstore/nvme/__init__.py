"""The NVMe tier: one preallocated slab file, its slots, and everything a disk can do wrong."""
