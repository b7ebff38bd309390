"""gRPC as every service speaks it: servers, channels, errors, and the one codec between messages and data classes."""
