"""Limits both sides of a connection must agree on.

A client that pings more often than the server's minimum is answered GOAWAY, so the two tables stand together. A dead
peer is noticed after `KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS`, a silent one that lives never is.
"""

from __future__ import annotations

KEEPALIVE_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 2_000
MAX_MESSAGE_BYTES = 64 * 2**20
"""Room for the prompt of the longest context as token ids, many times over."""

CLIENT_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Without this a lost ping is noticed after 60 s, whatever the keepalive says (measured: 62 s, with it 4.0 s).
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Idle ones too: a connection that died in silence would else fail every short call in turn, for none lives long
    # enough for a ping to find out.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted peer must be found again within a second, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This one is how long a connection attempt may take: 100 ms fails on a loaded machine ("timed out before receiving
    # SETTINGS"), and a refused one is tried again just as soon with more (measured: 0.2-1.1 s either way).
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels to one address would else share a subchannel, and its backoff, with one that was dropped.
    ("grpc.use_local_subchannel_pool", 1),
    # Workers are reached directly: http_proxy in the environment is for the world outside.
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Two processes on one port would split the traffic silently; a port in use must be an error.
    ("grpc.so_reuseport", 0),
]
