"""A real etcd for tests: its own directory, ports that stay, and the ways it can fail."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import IO

from baton.cli.ports import free_port

START_S = 60.0


class EtcdServer:
    """One member. `start` returns when it answers; `stop`, or leaving the context, ends it whatever its state."""

    def __init__(
        self, directory: Path, name: str = "etcd", peers: dict[str, str] | None = None, host: str = "127.0.0.1"
    ) -> None:
        """`peers` maps every member's name to its peer URL; left out for a single node. `host`: for its clients."""
        self.directory = directory
        self.host = host
        self.name = name
        self.port = free_port()
        self.peer_url = (peers or {}).get(name) or f"http://127.0.0.1:{free_port()}"
        self.peers = peers or {name: self.peer_url}
        self.process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"{self.host}:{self.port}"

    @property
    def data(self) -> Path:
        """The data directory; delete it between `kill` and `start` to come back empty."""
        return self.directory / f"{self.name}.data"

    def launch(self) -> None:
        """Start the process without waiting for it (members of a cluster wait for one another)."""
        binary = shutil.which("etcd")
        assert binary, "no etcd on the PATH: run `make deps`"
        url = f"http://{self.address}"
        cluster = ",".join(f"{name}={peer}" for name, peer in self.peers.items())
        command = [binary, "--name", self.name, "--data-dir", str(self.data)]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", cluster, "--initial-cluster-state", "new"]
        command += ["--unsafe-no-fsync"] if _takes_no_fsync(binary) else []
        self._log = (self.directory / f"{self.name}.log").open("ab")
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait_healthy(self) -> None:
        """Wait until it takes requests."""
        hang = time.monotonic() + START_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < hang:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            try:
                with opener.open(f"http://{self.address}/health", timeout=2) as reply:
                    if b'"true"' in reply.read():
                        return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"etcd not healthy after {START_S} s:\n{self.log()}")

    def start(self) -> EtcdServer:
        """Start and wait until it takes requests."""
        self.launch()
        self.wait_healthy()
        return self

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def restart(self, *, empty: bool = False) -> None:
        """kill -9 and start again on the same ports, with the same data or with none."""
        self.kill()
        if empty:
            shutil.rmtree(self.data)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: the port stays open, nothing answers."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it. Idempotent."""
        self.kill()

    def log(self) -> str:
        """The end of what it wrote."""
        return (self.directory / f"{self.name}.log").read_text(errors="replace")[-4000:]

    def __enter__(self) -> EtcdServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _takes_no_fsync(binary: str) -> bool:
    helped = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=30)
    return "unsafe-no-fsync" in helped.stdout + helped.stderr
