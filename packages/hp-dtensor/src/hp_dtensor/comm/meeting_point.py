"""The meeting point of a job, `host:port` on rank 0's machine: its checks, and reports while ranks wait there."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from hp_dtensor.exceptions import PlatformError

_FIRST_REPORT_SECONDS = 5.0
_REPORT_SECONDS = 60.0
_CONNECT_SECONDS = 2.0
_PAUSE_SECONDS = 0.5  # longest pause between two attempts


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """The address at which the ranks of a job meet, as one rank sees it.

    Args:
        address: `host:port`.
        serves: this rank listens there; others connect to it.
        timeout_seconds: limit for joining the job, from `started` on.

    Raises:
        PlatformError: the address is not `host:port` with a valid host name or IP address.
    """

    rank: int
    size: int
    address: str
    serves: bool
    timeout_seconds: float
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        host, separator, port = self.address.rpartition(":")
        if not separator or not _is_host(host) or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise PlatformError(
                f"the address of the job must be host:port, such as 127.0.0.1:29500; got {self.address!r}"
            )

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def is_loopback(self) -> bool:
        """Return whether the host is an IP address of the loopback interface."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def remaining_seconds(self) -> float:
        """Return the seconds left of the time limit since this object was made, at least one."""
        return max(1.0, self.started + self.timeout_seconds - time.monotonic())

    def reach(self) -> str:
        """Wait, with reports, until the name resolves and, unless this rank serves, it answers; return the IP."""
        report_at, pause = self.started + _FIRST_REPORT_SECONDS, 0.005
        while True:
            try:
                ip = self._resolve()
                if self.serves:
                    self._check_free(ip)
                else:
                    socket.create_connection((ip, self.port), _CONNECT_SECONDS).close()
                return ip
            except OSError as error:
                problem, now = self._explain(error), time.monotonic()
            if now - self.started > self.timeout_seconds:
                role = "serve" if self.serves else "reach"
                raise PlatformError(
                    f"rank {self.rank} of {self.size} could not {role} the meeting point {self.address} within "
                    f"{self.timeout_seconds:g} s: {problem}"
                )
            if now > report_at:
                _report(f"rank {self.rank} of {self.size} still waits for the meeting point {self.address}: {problem}")
                report_at = now + _REPORT_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS)

    @contextlib.contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """Report on standard error that ranks are missing if the block takes seconds, on the rank that serves."""
        arrived = threading.Event()

        def watch() -> None:
            pause = _FIRST_REPORT_SECONDS
            while not arrived.wait(pause):
                _report(
                    f"rank {self.rank} of {self.size} waits at the meeting point {self.address}, where not all ranks "
                    f"have arrived. Check that all {self.size} were started with this address, that it leads to this "
                    f"machine ({socket.gethostname()}) from theirs, and that no firewall closes port {self.port}"
                )
                pause = _REPORT_SECONDS

        thread = threading.Thread(target=watch, name="meeting point", daemon=True)
        if self.serves and self.size > 1:
            thread.start()
        try:
            yield
        finally:
            arrived.set()

    def _resolve(self) -> str:
        """Return an IP address of the host, if possible not of the loopback interface, which others cannot reach."""
        found = [str(each[4][0]) for each in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)]
        # Debian's /etc/hosts gives the own name of a machine an address of the loopback interface.
        return next((ip for ip in found if not ipaddress.ip_address(ip.partition("%")[0]).is_loopback), found[0])

    def _check_free(self, ip: str) -> None:
        """Raise a PlatformError if another process listens at the port."""
        # The frameworks listen on all interfaces, except for an address of the loopback interface.
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
            # A port of a job that has just ended is free, though connections are in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                # Without listening: a rank that connected to this socket would lose its connection when it is closed.
                probe.bind((ip if self.is_loopback() else "", self.port))
            except OSError as error:
                raise PlatformError(
                    f"rank {self.rank} of {self.size} could not serve the meeting point {self.address}: {error}. Check "
                    f"that no other job on {socket.gethostname()} uses port {self.port} (`ss -ltnp` lists "
                    "processes and ports), or give the job another port"
                ) from error

    def _explain(self, error: OSError) -> str:
        """Return what is wrong and what to check."""
        here = socket.gethostname()
        match error:
            case socket.gaierror():
                return (
                    f"the name {self.host} does not resolve on {here}. Give the IP address of rank 0's machine "
                    "(MASTER_ADDR, --master-addr, --rdzv-endpoint), or add the name to DNS or to /etc/hosts of every "
                    "machine"
                )
            case ConnectionRefusedError():
                return (
                    f"nothing listens at port {self.port} of {self.host}. Check that rank 0 was started on {self.host} "
                    "and still runs (its log), and that all ranks have the same port"
                )
            case TimeoutError():
                return (
                    f"{self.host} does not answer {here}. Check that the address is that of rank 0's machine, and that "
                    f"no firewall between the machines drops port {self.port}"
                )
        return f"{error}. Check the network between {here} and {self.host}, and that rank 0 was started there"


def _is_host(host: str) -> bool:
    try:
        # As name resolution does, which fails for an empty part of a name, or one of over 63 characters.
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _report(line: str) -> None:
    # The terminal may be closed.
    with contextlib.suppress(OSError):
        print(f"hp-dtensor: {line}", file=sys.stderr, flush=True)
