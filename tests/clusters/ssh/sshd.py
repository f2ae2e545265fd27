"""Debian's sshd, with keys and a configuration of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.clusters.hanging import HANGS_S

POLL_S: Final = 0.05
_DIES_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL")
_PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONF: Final = """\
Port {port}
ListenAddress {address}
HostKey {top}/host_key
AuthorizedKeysFile {top}/authorized_keys
PidFile {top}/pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""


def missing_programs() -> list[str]:
    """Return what this machine lacks; empty: an sshd can be started."""
    if sys.platform != "linux":
        return ["Linux"]
    needed = ("sshd", "ssh-keygen", "setpriv")
    missing = [name for name in needed if shutil.which(name, path=_PATH) is None]
    return missing if os.geteuid() == 0 else [*missing, "the user root"]


def make_key(path: Path) -> str:
    """Make a pair of keys; return the public one."""
    if not path.exists():
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
        subprocess.run(command, check=True)
    return path.with_suffix(".pub").read_text()


class Sshd:
    """One sshd; a context."""

    def __init__(
        self, top: Path, address: str, port: int, *, within: Sequence[str] = ()
    ) -> None:
        """Describe it.

        Args:
            top: its directory; sshds of one directory have the same keys.
            within: a command that enters a namespace.
        """
        self._top, self._address, self._port = top, address, port
        self._within = within
        self.key = top / "key"
        self.known_hosts = top / "known_hosts"

    @property
    def host(self) -> str:
        """What `Cluster.ssh` is given."""
        return f"{getpass.getuser()}@{self._address}:{self._port}"

    def __enter__(self) -> Self:
        top = self._top
        (top / "authorized_keys").write_text(make_key(top / "key"))
        public = make_key(top / "host_key")
        with self.known_hosts.open("a") as file:
            file.write(f"[{self._address}]:{self._port} {public}")
        conf = top / f"sshd-{self._address}-{self._port}"
        text = _CONF.format(top=top, address=self._address, port=self._port)
        conf.write_text(text)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
        sshd = shutil.which("sshd", path=_PATH)
        assert sshd is not None
        with conf.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self._within, *_DIES_WITH_US, sshd, "-D", "-e", "-f", str(conf)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end_s = time.monotonic() + HANGS_S
        while b"listening" not in (said := conf.with_suffix(".log").read_bytes()):
            assert self._process.poll() is None, said
            assert time.monotonic() < end_s, said
            time.sleep(POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(HANGS_S)
