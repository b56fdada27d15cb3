"""Where this process runs: the same text on two ranks means the same host."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_key() -> str:
    """Return a text that is equal on the ranks of one host and different on others.

    Network namespaces count as hosts of their own: whoever puts ranks into them wants the
    traffic between them to be real.
    """
    return "/".join([socket.gethostname(), _boot_id(), _namespace("net"), _namespace("pid")])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"


def _namespace(kind: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return "-"
