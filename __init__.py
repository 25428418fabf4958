"""tokenmill: an asynchronous message-queue worker pool for LLM inference.

The public names are loaded on first use, so that a backend which only enqueues pays
for nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .producer.client import Client as Client
    from .producer.client import Job as Job
    from .producer.sync import SyncClient as SyncClient
    from .shared.messages import Delta as Delta
    from .shared.messages import JobClass as JobClass
    from .shared.messages import JobResult as JobResult
    from .shared.messages import Message as Message
    from .shared.messages import Prompt as Prompt
    from .shared.messages import Sampling as Sampling

__version__ = "0.1.0"

_PUBLIC = {
    "Client": ".producer.client",
    "Job": ".producer.client",
    "SyncClient": ".producer.sync",
    "Delta": ".shared.messages",
    "JobClass": ".shared.messages",
    "JobResult": ".shared.messages",
    "Message": ".shared.messages",
    "Prompt": ".shared.messages",
    "Sampling": ".shared.messages",
    "errors": ".shared",
}
__all__ = [  # noqa: PLE0604 - a list of strings that the linter cannot see through
    *_PUBLIC,
    "__version__",
]


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'tokenmill' has no attribute '{name}'")
    if name == "errors":
        return import_module(".shared.errors", __name__)
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
