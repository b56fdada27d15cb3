"""What this machine has: torch, processors, memory, and what the kernel allows."""

from __future__ import annotations

import importlib.metadata
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from loosestep.comm import native
from loosestep.comm.torch_versions import is_tested, tested_range
from loosestep.lab.doctor.findings import Finding, Level
from loosestep.lab.doctor.memory_sharing import inspect_sharing
from loosestep.lab.doctor.network import inspect_network
from loosestep.lab.doctor.units import size
from loosestep.lab.emulation import missing

LEAST_MEMORY = 1 << 30  # torch alone takes a third of it in every worker
WORST_RESOLUTION = 1e-4  # seconds; a step on a small model takes some of them
# What they are for, and the extra that brings them.
OPTIONAL = {"rich": ("tables and progress", "cli"), "tensorboard": ("logs", "tensorboard")}


def inspect_machine() -> list[Finding]:
    """Return what is here, this process's rendezvous variables included."""
    found = [_torch(), _backends(), _accelerators(), _cores(), _memory()]
    found += [*inspect_sharing(), _loops(), _clock()]
    found += [*inspect_network(), _emulation()]
    return found + [_package(name) for name in OPTIONAL]


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built for processors only"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    value = f"{torch.__version__}, {build}"
    if is_tested(torch.__version__):
        return Finding("torch", f"{value}, within the tested {tested_range()}")
    advice = f"the test suite has run on {tested_range()}: another version may behave otherwise"
    return Finding("torch", value, Level.NOTE, advice)


def _backends() -> Finding:
    tests = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    there = [name for name, test in tests.items() if dist.is_available() and test()]
    if not there:
        advice = "install a torch with torch.distributed: the wheels of pytorch.org have it"
        return Finding("backends", "none", Level.PROBLEM, advice)
    absent = [name for name in tests if name not in there]
    return Finding("backends", ", ".join(there) + (f" (not {', '.join(absent)})" if absent else ""))


def _accelerators() -> Finding:
    if not torch.accelerator.is_available():
        return Finding("accelerators", "none: training runs on the processor")
    kind = torch.accelerator.current_accelerator()
    return Finding("accelerators", f"{torch.accelerator.device_count()} ({kind})")


def _cores() -> Finding:
    cores, threads = usable_cores(), torch.get_num_threads()
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    workers = int(told) if told.isdecimal() else 1
    value = f"{cores} usable of {os.cpu_count()}, {threads} torch threads a worker"
    if threads * workers > cores:
        advice = f"{workers} workers here fight for them: set OMP_NUM_THREADS="
        advice += str(max(1, cores // workers))
        return Finding("processors", value, Level.NOTE, advice)
    return Finding("processors", value)


def usable_cores() -> int:
    """Return how many processors this process may use, by affinity and by quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = (_line("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        return max(1, min(allowed or 1, int(quota) // int(period)))
    return allowed or 1


def _memory() -> Finding:
    lines = (_text("/proc/meminfo") or "").splitlines()
    table = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" not in table:
        return Finding("memory", "unknown: no /proc/meminfo", Level.NOTE)
    total, free = (int(table[name][0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _line("/sys/fs/cgroup/memory.max") or ""
    if limit.isdecimal():
        total, free = min(total, int(limit)), min(free, int(limit))
    value = f"{size(free)} free of {size(total)}"
    if free < LEAST_MEMORY:
        advice = "a worker needs some 0.4 GB for torch alone: free some, or use fewer workers"
        return Finding("memory", value, Level.PROBLEM, advice)
    return Finding("memory", value)


def _loops() -> Finding:
    found = native.loops()
    if found is not None:
        return Finding("loops in C", f"built with the package, for {found.target().decode()}")
    if os.environ.get("LOOSESTEP_NATIVE") == "0":
        advice = "averages take longer in plain torch: unset LOOSESTEP_NATIVE"
        return Finding("loops in C", "switched off", Level.NOTE, advice)
    advice = "averages take longer in plain torch, with the same result: " + native.why_not()
    return Finding("loops in C", "none", Level.NOTE, advice)


def _clock() -> Finding:
    about = time.get_clock_info("monotonic")
    value = f"steps of {about.resolution * 1e9:g} ns ({about.implementation})"
    if about.resolution > WORST_RESOLUTION:
        return Finding("clock", value, Level.NOTE, "too coarse to time steps of milliseconds by")
    return Finding("clock", value)


def _emulation() -> Finding:
    if lacking := missing():
        return Finding("emulated hosts", "not here", Level.NOTE, lacking)
    return Finding("emulated hosts", "can be made: compare --link works")


def _package(name: str) -> Finding:
    purpose, extra = OPTIONAL[name]
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        advice = f"for {purpose}: pip install 'loosestep[{extra}]'"
        return Finding(name, "not installed", Level.NOTE, advice)


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:  # another kernel, or a container that hides it
        return None


def _line(path: str) -> str | None:
    text = _text(path)
    return None if text is None else text.strip()
