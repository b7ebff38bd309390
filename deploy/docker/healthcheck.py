"""Is the service in this container healthy? `healthcheck.py grpc` or `healthcheck.py http <path>`; exit code 0 or 1.

It asks where the service itself listens: BATON_HOST and BATON_PORT.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 3.0


def grpc_serving(address: str) -> bool:
    """Whether the standard gRPC health service says SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}", file=sys.stderr)
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def http_ok(host: str, port: int, path: str) -> bool:
    """Whether GET `path` answers 200."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError as error:
        print(f"{host}:{port}{path}: {error}", file=sys.stderr)
        return False
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """Run one check."""
    host, port = os.environ.get("BATON_HOST", "127.0.0.1"), int(os.environ["BATON_PORT"])
    if arguments[:1] == ["grpc"]:
        return 0 if grpc_serving(f"{host}:{port}") else 1
    if arguments[:1] == ["http"] and len(arguments) == 2:
        return 0 if http_ok(host, port, arguments[1]) else 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
