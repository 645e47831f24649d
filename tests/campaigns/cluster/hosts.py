"""Hosts of one machine: namespaces with a name, an address, processes, /dev/shm and /etc/hosts of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.77.0"
_SHARED_MEMORY = "64m"  # what containers have
_SET_UP = """
hostname {name}
mount -t tmpfs -o size={shared} tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
echo ready
exec sleep infinity
"""


@dataclass
class Host:
    """A host that runs. Its first process is process 1 of its namespace: all others end with it.

    Attributes:
        name, address: of the host.
        init: pid of its first process, as seen from outside.
    """

    name: str
    address: str
    init: int

    def start(
        self, words: Sequence[object], log: Path, folder: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host; its output is appended to `log`."""
        inside = ["nsenter", "-t", str(self.init), "-a", f"--wd={folder}"]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*inside, *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
            )

    def pids(self, word: str) -> list[int]:
        """The processes of this host that have a word in their command line, as seen from outside."""
        namespace, found = os.readlink(f"/proc/{self.init}/ns/pid"), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                same = os.readlink(entry / "ns/pid") == namespace
                if same and word in (entry / "cmdline").read_text().replace("\0", " "):
                    found.append(int(entry.name))
        return found

    def kill(self, word: str) -> None:
        """SIGKILL for the processes with a word in their command line."""
        for pid in self.pids(word):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def crash(self) -> None:
        """End the host with all its processes."""
        with suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)


class Cluster:
    """Hosts at one switch."""

    def __init__(self, names: Sequence[str], folder: Path, stack: ExitStack) -> None:
        self._names, self._folder, self._stack = list(names), folder, stack
        self._id = f"mg{os.getpid() % 100000}"
        _ip("link", "add", self._id, "type", "bridge")
        stack.callback(_ip, "link", "del", self._id, check=False)
        _ip("link", "set", self._id, "up")
        self.hosts = [self.boot(number) for number in range(len(self._names))]

    def boot(self, number: int) -> Host:
        """Start a host; again after it has crashed."""
        name, address, space = self._names[number], f"{_NETWORK}.{number + 1}", f"{self._id}-{number}"
        _ip("netns", "del", space, check=False)
        _ip("netns", "add", space)
        self._stack.callback(_ip, "netns", "del", space, check=False)
        outside = f"{self._id}v{number}"
        _ip("link", "del", outside, check=False)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._id, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _ip("-n", space, "link", "set", interface, "up")
        return Host(name, address, self._first_process(name, space))

    def _first_process(self, name: str, space: str) -> int:
        others = [f"{_NETWORK}.{n + 1} {other}" for n, other in enumerate(self._names) if other != name]
        hosts = self._folder / f"hosts-{name}"
        hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]))  # as Debian has it
        script = _SET_UP.format(name=name, shared=_SHARED_MEMORY, hosts=hosts)
        words = ["ip", "netns", "exec", space, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc"]
        words += ["--uts", "--mount", "sh", "-ec", script]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError(f"host {name} did not start")
        return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@contextmanager
def cluster(names: Sequence[str], folder: Path) -> Iterator[Cluster]:
    """Hosts for the time of the block."""
    with ExitStack() as stack:
        yield Cluster(names, folder, stack)


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)
