"""What this machine says of its memory and disk: bytes, without torch and without a package for it."""

from __future__ import annotations

import ctypes
import resource
import shutil
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
UNKNOWN = 4 * 2**30
"""Nobody to ask: a small laptop."""


def free_memory() -> int:
    """Bytes of memory that could be taken now, within the limit of the container if there is one."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return UNKNOWN
    facts = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return min(int(facts["MemAvailable"].split()[0]) * 1024, _free_in_container())


def process_memory(pid: int | None = None) -> int:
    """Bytes a process has resident now, this one by default; 0 for one that is gone. The most this one ever had where
    the system does not say."""
    try:
        pages = Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]
    except OSError:
        if pid is not None:
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(pages) * resource.getpagesize()


def give_back_memory() -> None:
    """Returns to the system what this process has freed and its allocator keeps. glibc gives back the end of its heap
    only: after tensors of all sizes have come and gone for hours, most of what was freed lies between others."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _container_limit() -> int | None:
    try:
        text = (_CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _free_in_container() -> int:
    limit = _container_limit()
    if limit is None:
        return sys.maxsize
    used = int((_CGROUP / "memory.current").read_text())
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return max(0, limit - used + int(stat.get("inactive_file", 0)))  # cached files make room when it is needed
