"""READ through NIXL and its UCX backend: RDMA, shared memory, TCP."""
