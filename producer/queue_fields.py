"""Fields of a request's body that say how to queue it, the same in every form."""

from typing import Annotated

import msgspec

from ..shared.messages import JobClass, Prompt
from ..shared.validate import MAX_DELAY_S, MAX_PRIORITY


class QueueFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to queue a request; over HTTP each has a header of the same meaning."""

    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = (
        None
    )
    """Within the class; a smaller number is more urgent."""
    job_class: JobClass | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DELAY_S)] | None = None
    """Seconds after which the job expires, waiting or running."""
    idempotency_key: (
        Annotated[str, msgspec.Meta(pattern="^[!-~]{1,200}$", max_length=200)] | None
    ) = None
    """The same key is the same job."""
    webhook: str | None = None
    """Address that is told of the job's end."""

    def queued(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with those of these fields that are given."""
        return with_fields(prompt, self)


def with_fields(prompt: Prompt, fields: "QueueFields") -> Prompt:
    """Returns a prompt with those queue fields that are not None.

    Args:
        prompt: What to run.
        fields: Anything with the attributes of `QueueFields`.
    """
    names = QueueFields.__struct_fields__
    given = {name: getattr(fields, name) for name in names}
    changes = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(prompt, **changes) if changes else prompt
