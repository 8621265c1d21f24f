"""What becomes of an exception at the engine's borders. Imports no torch unless it has failed already."""

from __future__ import annotations

import errno
import logging
import os

from mint.errors import Busy, Internal, MintError

log = logging.getLogger(__name__)


def as_mint_error(error: BaseException) -> MintError:
    """An error meant for the caller as it is; anything else as `Internal` in one line, the traceback in the log."""
    if isinstance(error, MintError):
        return error
    if _is_disk_full(error):
        return Busy(f"the server's disk is full ({error}); nothing was written. Make room, then ask again.")
    log.error("the engine failed at a request", exc_info=error)
    first_line = (str(error).splitlines() or [""])[0]
    if _is_out_of_memory(error):
        _return_unused_memory()
        return Internal(f"the engine ran out of memory ({first_line}). Ask for shorter or fewer sequences.")
    return Internal(f"the engine failed: {type(error).__name__}: {first_line}. Its log has the traceback.")


def _is_out_of_memory(error: BaseException) -> bool:
    # torch has a class of its own for GPUs and a plain RuntimeError for CPUs.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _is_disk_full(error: BaseException) -> bool:
    # safetensors wraps what the system said in an error of its own.
    return os.strerror(errno.ENOSPC) in str(error) or (isinstance(error, OSError) and error.errno == errno.EDQUOT)


def _return_unused_memory() -> None:
    import torch

    from mint.engine.memory import give_back_reserves

    if torch.cuda.is_available():
        give_back_reserves()
        torch.cuda.empty_cache()
