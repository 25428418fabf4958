"""Errors after which a CUDA device is of no use to this process any more."""

from typing import Final

_CUDA: Final = "cuda error:"
_MEMORY: Final = "out of memory"


def is_device_lost(error: BaseException) -> bool:
    """Says whether nothing can run on the device until the process is another one.

    CUDA reports an error of a kernel at every later call. Under MPS it is reported to
    all clients of the server, whoever's kernel it was.

    Args:
        error: What the runner raised. PyTorch words all of CUDA's own errors alike.
    """
    message = str(error).lower()
    return (
        isinstance(error, RuntimeError) and _CUDA in message and _MEMORY not in message
    )
