"""A network between hosts of one machine: a switch whose cables have a rate and a delay.

`python switch.py SOCKET NAME=PID...`, as root, gives the network namespace of each process an
Ethernet device `eth0` (a TAP device, of which this program holds the other end) and prints "ready".
Then it moves frames until it is killed. A frame leaves when its cable is free, is on its way for
the delay, and arrives when the cable of the receiver is free; nothing is ever lost for want of
memory. A host that sends more than its cable takes is held back, as by a real device.

`ask(SOCKET, ...)` changes cables and reads what went through them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MTU = 32000
"""Bytes in a frame: few enough of them for Python to keep up with a Gbit/s."""
AHEAD_S = 0.001
"""So much a host may send that its cable has not taken yet."""
FOREVER = float("inf")

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_NET = 0x40000000


class Cable:
    """What connects a host with the switch: its rate in bytes/s, its delay in s, and counts."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.rate, self.delay = FOREVER, 0.0
        self.is_up = True
        self.sent_until = self.received_until = 0.0
        self.clear()

    def clear(self) -> None:
        """Count from 0 again."""
        self.counts = dict.fromkeys(("sent", "received", "segments"), 0)


class Switch:
    """Cables by name, where each hardware address was seen, and frames on their way."""

    def __init__(self, cables: dict[str, Cable]) -> None:
        self.cables = cables
        self._at: dict[bytes, Cable] = {}
        self._under_way: list[tuple[float, int, Cable, bytes]] = []
        self._number = 0

    def readable(self, now: float) -> list[Cable]:
        """Return the cables that take more from their hosts."""
        return [each for each in self.cables.values() if each.sent_until < now + AHEAD_S]

    def wait_s(self, now: float) -> float:
        """Return how long there is nothing to do unless a host sends something."""
        busy = [each.sent_until - AHEAD_S for each in self.cables.values()]
        moments = [moment for moment in busy if moment > now]
        if self._under_way:
            moments.append(self._under_way[0][0])
        return max(0.0, min(moments) - now) if moments else 1.0

    def take(self, cable: Cable, frame: bytes, now: float) -> None:
        """Put what a host has sent on its way."""
        to, origin = frame[:6], frame[6:12]
        self._at[origin] = cable
        known = self._at.get(to)
        targets = [known] if known else [each for each in self.cables.values() if each != cable]
        payload = tcp_payload(frame)
        cable.counts["sent"] += payload
        cable.counts["segments"] += payload > 0
        cable.sent_until = left = max(now, cable.sent_until) + len(frame) / cable.rate
        for target in targets:
            if target is cable or not (cable.is_up and target.is_up):
                continue
            target.counts["received"] += payload
            moment = left + max(cable.delay, target.delay)
            moment = max(moment, target.received_until + len(frame) / target.rate)
            target.received_until = moment
            self._number += 1
            heapq.heappush(self._under_way, (moment, self._number, target, frame))

    def deliver(self, now: float) -> None:
        """Hand over what has arrived."""
        while self._under_way and self._under_way[0][0] <= now:
            target, frame = heapq.heappop(self._under_way)[2:]
            try:
                os.write(target.device, frame)
            except OSError:  # its host has gone, or takes nothing now: TCP sends it again
                continue

    def answer(self, asked: dict[str, Any]) -> Any:
        """Do what `ask` wants."""
        chosen = [self.cables[name] for name in asked.get("hosts") or self.cables]
        for cable in chosen:
            for name, value in asked.get("set", {}).items():
                setattr(cable, name, value)
        counts = {name: cable.counts for name, cable in self.cables.items()}
        if asked.get("clear"):
            for cable in self.cables.values():
                cable.clear()
        return counts


def tcp_payload(frame: bytes) -> int:
    """Return how many bytes of TCP's payload are in an Ethernet frame."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return 0
    header = (frame[14] & 15) * 4
    total = int.from_bytes(frame[16:18], "big")
    return total - header - (frame[14 + header + 12] >> 4) * 4


def ask(path: Path, **asked: Any) -> dict[str, dict[str, int]]:
    """Ask a switch, and return what went through each cable: bytes of TCP, and its segments.

    Args:
        path: its socket.
        **asked: `set`: attributes of cables (`rate`, `delay`, `is_up`), of those of `hosts` or of
            all; `clear`: count from 0 afterwards.

    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(path))
        connection.sendall(json.dumps(asked).encode() + b"\n")
        told: dict[str, dict[str, int]] = json.loads(connection.makefile().readline())
    return told


def _device_of(process: int, libc: Any) -> int:
    """Make `eth0` in the network namespace of a process; return its other end."""
    with open("/proc/self/ns/net") as own, open(f"/proc/{process}/ns/net") as theirs:
        if libc.setns(theirs.fileno(), _NET):
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_HEADER))
        libc.setns(own.fileno(), _NET)
    return device


def main() -> None:
    with suppress(OSError):  # before ranks that look for each other without end, as a real one is
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    path, *hosts = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    named = [host.split("=") for host in hosts]
    switch = Switch({name: Cable(_device_of(int(process), libc)) for name, process in named})
    by_device = {cable.device: cable for cable in switch.cables.values()}
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(path)
        control.listen()
        print("ready", flush=True)
        while True:
            now = time.monotonic()
            devices = [cable.device for cable in switch.readable(now)]
            ready, _, _ = select.select([*devices, control], [], [], switch.wait_s(now))
            now = time.monotonic()
            switch.deliver(now)
            for each in ready:
                if each is control:
                    connection, _ = control.accept()
                    with connection:
                        asked = json.loads(connection.makefile().readline())
                        connection.sendall(json.dumps(switch.answer(asked)).encode() + b"\n")
                    continue
                switch.take(by_device[each], os.read(each, MTU + 64), now)


if __name__ == "__main__":
    main()
