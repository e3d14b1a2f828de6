"""Two machines for a test: network namespaces on one bridge, each with an address and a host name of its own.

Processes get in by :meth:`Machine.enter`, so that both ``worlds.launch`` and real commands can make ranks on them. The
kernel's TCP, interfaces, carrier and counters are real; processor, disk and process table are shared.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
# From linux/sched.h and linux/mount.h. Python has setns and unshare from 3.12 on, and no mount.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Machine:
    """One of the machines.

    Attributes:
        host: its host name.
        address: of its interface ``eth0``.
        namespace: as ``ip netns`` calls it.
        port: the bridge's end of its cable.
        hosts: a file that it sees as /etc/hosts.
    """

    host: str
    address: str
    namespace: str
    port: str
    hosts: Path

    def enter(self):
        """Move this process, which must have no further threads that matter, onto the machine."""
        with open(f"/run/netns/{self.namespace}") as file:
            _call("setns", file.fileno(), CLONE_NEWNET)
        _call("unshare", CLONE_NEWUTS | CLONE_NEWNS)
        _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        _call("mount", bytes(self.hosts), b"/etc/hosts", None, MS_BIND, None)
        _call("sethostname", self.host.encode(), len(self.host))

    def start(self, script, **options):
        """Start a shell script on the machine, as ``subprocess.Popen`` does."""
        return subprocess.Popen(["sh", "-ec", script], preexec_fn=self.enter, **options)  # noqa: PLW1509 - one thread

    def unplug(self):
        """Take the cable out: the machine's interface loses its carrier."""
        _ip(f"link set {self.port} down")

    def plug_in(self):
        """Put the cable back."""
        _ip(f"link set {self.port} up")

    def bytes_sent(self):
        """Return the bytes that have left the machine by its cable. Also right inside of the machine."""
        return int(Path(f"/sys/class/net/{self.port}/statistics/rx_bytes").read_text())

    def pids(self):
        """Return the processes on the machine."""
        return [int(pid) for pid in _ip(f"netns pids {self.namespace}").split()]


def why_not():
    """Say what is missing for :func:`two_machines`; nothing where it can work."""
    if os.geteuid() != 0:
        return "two machines need root, for network namespaces"
    return "" if shutil.which("ip") else "two machines need the program ip (Debian: apt install iproute2)"


@contextlib.contextmanager
def two_machines():
    """Make node0 with address 10.0.0.1 and node1 with 10.0.0.2, which know each other by name.

    Yields:
        The two :class:`Machine`.

    Raises:
        OSError: the system does not allow it, as in a container without CAP_NET_ADMIN.
    """
    tag = f"tm{os.getpid() % 10**7}"
    with tempfile.TemporaryDirectory(prefix="hosts-") as directory:
        machines = [
            Machine(f"node{n}", f"10.0.0.{n + 1}", f"{tag}n{n}", f"{tag}v{n}", Path(directory, f"node{n}"))
            for n in (0, 1)
        ]
        names = "".join(f"{machine.address} {machine.host}\n" for machine in machines)
        try:
            _ip(f"link add {tag} type bridge")
            _ip(f"link set {tag} up")
            for machine in machines:
                machine.hosts.write_text(f"127.0.0.1 localhost\n{names}")
                _ip(f"netns add {machine.namespace}")
                _ip(f"link add {machine.port} type veth peer name {INTERFACE} netns {machine.namespace}")
                _ip(f"link set {machine.port} master {tag} up")
                _ip(f"-n {machine.namespace} addr add {machine.address}/24 dev {INTERFACE}")
                _ip(f"-n {machine.namespace} link set lo up")
                _ip(f"-n {machine.namespace} link set {INTERFACE} up")
            yield machines
        finally:
            for machine in machines:
                subprocess.run(["ip", "link", "del", machine.port], check=False, capture_output=True)
                subprocess.run(["ip", "netns", "del", machine.namespace], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", tag], check=False, capture_output=True)


def _ip(arguments):
    done = subprocess.run(["ip", *arguments.split()], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {arguments}: {done.stderr.strip()}")
    return done.stdout


def _call(name, *arguments):
    """Call a function of the C library, and raise what it says."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
