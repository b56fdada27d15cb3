"""PyTorch's own tests of its sharded optimizer, from Debian's source package, on CPU and Gloo.

They are not in the wheel. Only names of modules, devices and what no longer exists are rewritten,
and the iterations by which torch's overlapped optimizer begins without a step are left out.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "pytorch"
SUITE = "bookworm"  # release 1.13
MEMBER = "test/distributed/optim/test_zero_redundancy_optimizer.py"
NUM_CASES = 39
NEED_GPUS = ("test_zero_join_gpu", "test_zero_model_parallel")

REWRITES = [
    (
        r"from torch\.distributed\.algorithms\.ddp_comm_hooks\.ddp_zero_hook import",
        "from loosestep import",
    ),
    (r"from torch\.distributed\.optim import ZeroRed", "from loosestep import ZeroRed"),
    (r"(?m)^ +@common_distributed\.(skip_if|requires_nccl)\w*(\(.*\))?\n", ""),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),
    (r'"use_gpu",\n\s+\[True\]', '"use_gpu", [False]'),
    # Gone from torch since.
    (r"from torch\.nn\.parallel\._replicated\w+ import (\w+)", r"\1 = lambda _: suppress()"),
    (r"zero\._all_params", "zero.parameters"),
    # The test asks to be changed once parameters of several dtypes can be sharded.
    (r" *\[torch\.FloatTensor\(1\), torch\.DoubleTensor\(1\)\],\n", ""),
    # With loosestep every backward takes a step, from the first on.
    (r"num_warmup_inputs = .*", "num_warmup_inputs = 0"),
]


def can_fetch() -> bool:
    """Say whether this machine and user can get source packages, if the archive answers."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def fetch(folder: Path) -> str:
    """Return the file's text out of Debian's archive; raise ``OSError`` where it is not there."""
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    sources = folder / "sources.list"
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources.write_text(f"deb-src [signed-by={key}] http://deb.debian.org/debian {SUITE} main\n")
    options = [
        f"Dir::Etc::sourcelist={sources}",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::lists={lists}",
        "APT::Sandbox::User=root",
    ]
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    for order in (["update"], ["source", "--download-only", "--tar-only", PACKAGE]):
        done = subprocess.run(
            [*apt, *order], cwd=folder, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise OSError(f"apt-get {order[0]}: {done.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.orig.tar.*"))) as archive:
        for member in archive:
            if member.name.endswith(MEMBER) and (content := archive.extractfile(member)):
                return content.read().decode()
    raise OSError(f"{PACKAGE} of {SUITE} has no {MEMBER}")


def on_cpu(text: str) -> str:
    """Return the tests as they run here; each rewriting must find something."""
    for pattern, replacement in REWRITES:
        text, count = re.subn(pattern, replacement, text)
        assert count, pattern
    return text


def run(text: str, folder: Path) -> str:
    """Run the tests, except for those that need GPUs, and return what was said."""
    path = folder / "test_zero_redundancy_optimizer.py"
    path.write_text(text)
    without = " and ".join(f"not {name}" for name in NEED_GPUS)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", without, str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=1000,
    ).stdout


def passed_alone(said: str, count: int) -> bool:
    """Say whether pytest's last line tells of ``count`` tests that passed, and of nothing else.

    >>> passed_alone("39 passed, 2 deselected, 1 warning in 200.12s (0:03:20)", 39)
    True
    >>> passed_alone("39 passed, 2 deselected, 1 error in 200.12s (0:03:20)", 39)
    False
    """
    last = (said.strip().splitlines() or [""])[-1].strip("= ")
    aside = r"(, \d+ (deselected|warnings?))*"
    return bool(re.fullmatch(rf"{count} passed{aside} in [\d.]+s( \([\d:]+\))?", last))
