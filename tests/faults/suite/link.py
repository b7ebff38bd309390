"""A network between two hosts of one machine that can be cut, delayed, throttled and made lossy.

The far host is a network namespace. Both ends are TUN devices, and this process carries every packet between them: no
kernel module is needed, and what happens to a packet is ours to say.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import secrets
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
MTU = 16000
MAX_QUEUED_BYTES = 64 << 20
"""Like any network: what does not fit is dropped."""


@dataclass(frozen=True)
class Weather:
    """What befalls packets, both ways."""

    cut: bool = False
    delay_s: float = 0.0
    bytes_s: float = 0.0
    """0: as fast as it goes."""
    loss: float = 0.0
    corrupt: bool = False
    """Flip a byte in large packets that `Link.corruptible` names."""


class Link:
    """Two hosts: `near` is an address of this network namespace, `far` that of `namespace`. Raises OSError or
    CalledProcessError where the machine does not allow it."""

    def __init__(self, seed: int = 0) -> None:
        tag = secrets.token_hex(3)
        subnet = f"10.{random.SystemRandom().randrange(64, 128)}.{random.SystemRandom().randrange(256)}"
        self.near, self.far = f"{subnet}.1", f"{subnet}.2"
        self.namespace = f"baton-{tag}"
        self.weather = Weather()
        self.corruptible: Callable[[int, int], bool] = lambda source_port, destination_port: False
        self.corrupted = 0
        self.dropped = 0
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        _run("ip", "netns", "add", self.namespace)
        self._ends: list[int] = []
        try:
            for name, address, inside in ((f"bn{tag}", self.near, False), (f"bf{tag}", self.far, True)):
                self._ends.append(_tun(name))
                if inside:
                    _run("ip", "link", "set", name, "netns", self.namespace)
                prefix = ["ip", "netns", "exec", self.namespace] if inside else []
                _run(*prefix, "ip", "addr", "add", f"{address}/24", "dev", name)
                _run(*prefix, "ip", "link", "set", name, "mtu", str(MTU), "up")
            _run("ip", "netns", "exec", self.namespace, "ip", "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._carry, name=f"link {tag}", daemon=True)
        self._thread.start()

    @property
    def prefix(self) -> list[str]:
        """Put before a command, it runs on the far host."""
        return ["ip", "netns", "exec", self.namespace]

    def close(self) -> None:
        """End it; the devices go with their descriptors."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        for end in self._ends:
            os.close(end)
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, timeout=30, capture_output=True)

    def _carry(self) -> None:
        selector = selectors.DefaultSelector()
        for i, end in enumerate(self._ends):
            os.set_blocking(end, False)
            selector.register(end, selectors.EVENT_READ, i)
        queue: list[tuple[float, int, int, bytes]] = []
        queued, number = 0, 0
        free_at = [0.0, 0.0]
        while not self._stop.is_set():
            wait = 0.1 if not queue else max(0.0, min(0.1, queue[0][0] - time.monotonic()))
            for key, _ in selector.select(wait):
                source: int = key.data
                for _ in range(64):
                    try:
                        packet = os.read(self._ends[source], 65536)
                    except BlockingIOError:
                        break
                    now, weather = time.monotonic(), self.weather
                    lost = weather.cut or self._chance.random() < weather.loss
                    if lost or queued + len(packet) > MAX_QUEUED_BYTES:
                        self.dropped += 1
                        continue
                    if weather.corrupt:
                        packet = self._corrupted(packet)
                    if weather.bytes_s:
                        free_at[source] = max(now, free_at[source]) + len(packet) / weather.bytes_s
                    due = max(now, free_at[source]) + weather.delay_s
                    number += 1
                    queued += len(packet)
                    heapq.heappush(queue, (due, number, 1 - source, packet))
            now = time.monotonic()
            while queue and queue[0][0] <= now:
                _, _, target, packet = heapq.heappop(queue)
                queued -= len(packet)
                try:
                    os.write(self._ends[target], packet)
                except OSError:
                    self.dropped += 1
        selector.close()

    def _corrupted(self, packet: bytes) -> bytes:
        """Change one byte of a large TCP segment's payload, and its checksum so that nobody below notices."""
        if len(packet) < 1000 or packet[0] >> 4 != 4 or packet[9] != 6:
            return packet
        start = (packet[0] & 15) * 4
        source, destination = struct.unpack_from("!HH", packet, start)
        if not self.corruptible(source, destination):
            return packet
        payload = start + (packet[start + 12] >> 4) * 4
        changed = bytearray(packet)
        changed[self._chance.randrange(payload + (len(packet) - payload) // 2, len(packet))] ^= 0xFF
        changed[start + 16 : start + 18] = b"\0\0"
        pseudo = packet[12:20] + struct.pack("!BBH", 0, 6, len(packet) - start)
        struct.pack_into("!H", changed, start + 16, _checksum(pseudo + bytes(changed[start:])))
        self.corrupted += 1
        return bytes(changed)


def _checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    padded = data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30, capture_output=True)
