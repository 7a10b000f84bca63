"""A second machine's network: a namespace behind a link.

Two network devices of this process (TUN), one of them in a namespace of its
own; what comes out of one goes into the other after as long as it takes on the
wire. Packets are up to 64 kB large, as a network card with segmentation would
take them; each counts with the headers of the frames that it would be sent in.
Nothing is lost. (Linux's own `netem` does this too, where the kernel has it.)
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time

_TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_LARGEST = 65_535 + 64

# Of a frame on the wire: 1448 bytes of a TCP segment, and around them its
# headers (52), Ethernet's (18), and preamble and gap (20).
_SEGMENT, _AROUND = 1448, 90
_VIRTUAL_HEADER = 10  # Of the kernel's, in front of each packet.


def is_possible() -> bool:
    """Returns whether this process may make a namespace and a link to it.

    By making a namespace: root is not enough where a container is no machine.
    """
    if not os.access(_TUN, os.W_OK) or shutil.which("ip") is None:
        return False
    name = f"tfdp{os.getpid()}p"
    tried = [
        subprocess.run(["ip", "netns", *command], capture_output=True)
        for command in (
            ("add", name),
            ("exec", name, "ip", "link", "set", "lo", "up"),
            ("delete", name),
        )
    ]
    return not any(each.returncode for each in tried)


def wire_bytes(packet_bytes: int) -> int:
    """Returns what a packet of IP takes on the wire, in bytes."""
    content = max(0, packet_bytes - 52)
    frames = max(1, -(-content // _SEGMENT))
    return content + frames * _AROUND


class Direction:
    """What is on its way in one direction.

    Attributes:
        rate: Bits per second.
        latency: Seconds from a packet's last bit sent to its last received.
    """

    def __init__(self, rate: float, latency: float):
        self.rate = rate
        self.latency = latency
        self._free = 0.0  # When the wire has sent what it has.
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()

    def send(self, packet: bytes, now: float) -> None:
        """Takes a packet of the kernel's, with its virtual header."""
        seconds = 8 * wire_bytes(len(packet) - _VIRTUAL_HEADER) / self.rate
        self._free = max(now, self._free) + seconds
        self._waiting.append((self._free + self.latency, packet))

    def due(self) -> float | None:
        """Returns when the next packet arrives, None if there is none."""
        return self._waiting[0][0] if self._waiting else None

    def arrived(self, now: float) -> list[bytes]:
        """Returns the packets that have arrived, in order."""
        packets = []
        while self._waiting and self._waiting[0][0] <= now:
            packets.append(self._waiting.popleft()[1])
        return packets


def _device(name: str) -> int:
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH14x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return descriptor


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


class Link:
    """A namespace at the other end of a link, as a context.

        with Link(1e9, 1e-3) as far:
            subprocess.run([*far.inside, "ip", "address"])

    Attributes:
        address: The other machine's, for this one.
        inside: What starts a program on the other machine, before it.
    """

    def __init__(self, rate: float, latency: float):
        """Describes the link.

        Args:
            rate: Bits per second, in each direction.
            latency: Seconds, in each direction.
        """
        self._name = f"tfdp{os.getpid()}"
        # Four addresses of its own, for links of several processes.
        third, fourth = divmod(os.getpid() % 2**14, 2**6)
        self._near = f"10.213.{third}.{4 * fourth + 1}"
        self.address = f"10.213.{third}.{4 * fourth + 2}"
        self.inside = ("ip", "netns", "exec", self._name)
        self._directions = [Direction(rate, latency) for _ in range(2)]
        self._ended = threading.Event()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Link:
        with contextlib.ExitStack() as stack:
            near, far = f"{self._name}a", f"{self._name}b"
            _run("ip", "netns", "add", self._name)
            stack.callback(_run, "ip", "netns", "delete", self._name)
            devices = []
            for name in (near, far):
                devices.append(_device(name))
                stack.callback(os.close, devices[-1])
            _run("ip", "link", "set", far, "netns", self._name)
            _run("ip", "address", "add", f"{self._near}/30", "dev", near)
            _run("ip", "link", "set", near, "up")
            for command in (
                ("address", "add", f"{self.address}/30", "dev", far),
                ("link", "set", far, "up"),
                ("link", "set", "lo", "up"),
            ):
                _run(*self.inside, "ip", *command)
            thread = threading.Thread(
                target=self._forward, args=(devices,), daemon=True
            )
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._ended.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _forward(self, devices: list[int]) -> None:
        """Carries packets between the devices until the link ends."""
        other = {devices[0]: devices[1], devices[1]: devices[0]}
        direction = dict(zip(devices, self._directions, strict=True))
        while not self._ended.is_set():
            dues = [d.due() for d in self._directions]
            waits = [due - time.monotonic() for due in dues if due is not None]
            wait = max(0.0, min(waits, default=0.1))
            ready, _, _ = select.select(devices, [], [], wait)
            for device in ready:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        packet = os.read(device, _LARGEST)
                        direction[device].send(packet, time.monotonic())
            now = time.monotonic()
            for device in devices:
                for packet in direction[device].arrived(now):
                    # What a device does not take is lost, as in a network.
                    with contextlib.suppress(OSError):
                        os.write(other[device], packet)
