"""Options of `tokenmill submit`: a struct for each heading of its help."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypedDict

import msgspec
import typer

from ..shared.messages import DEFAULT_TENANT, JobClass
from .cli_input import ControlTokens, check_seconds, parse_logit_bias, read_content

if TYPE_CHECKING:
    from .submit import WhenFull, WhenUnserved

SAMPLING: Final = "Sampling"
QUEUEING: Final = "Queueing"
OUTPUT: Final = "Output"

Number = Annotated[int | None, typer.Option(rich_help_panel=SAMPLING)]
Real = Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)]


class Room(TypedDict):
    """What to do when the queue, or the workers, cannot take the job now."""

    when_full: "WhenFull"
    when_unserved: "WhenUnserved"
    wait_s: float | None


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The text, and what is to answer it."""

    text: Annotated[
        str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin.")
    ] = None
    file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file in UTF-8.")
    ] = None
    chat: Annotated[
        bool, typer.Option(help="Send the text as a user's chat message.")
    ] = False
    system: Annotated[
        str | None, typer.Option(help="A system message before it; implies --chat.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Default: the only one of the pool.")
    ] = None
    adapter: Annotated[
        str | None, typer.Option(help="A LoRA adapter of the model (`lora list`).")
    ] = None
    model_version: Annotated[
        str | None, typer.Option(help="Only this version of the model may run it.")
    ] = None
    control_tokens: Annotated[
        ControlTokens | None,
        typer.Option(help="What to do where the text spells a control token."),
    ] = None

    def content(self) -> dict[str, object]:
        """Reads the `text` or the `messages` of the prompt.

        Raises:
            InvalidRequest: No source or several, unreadable, or not UTF-8.
        """
        return read_content(self.text, self.file, chat=self.chat, system=self.system)

    def fields(self) -> dict[str, object]:
        """Returns fields of `Prompt`."""
        return {
            "model": self.model,
            "adapter": self.adapter,
            "version": self.model_version,
            "control_tokens": self.control_tokens,
        }


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, and how many."""

    max_tokens: Number = None
    min_tokens: Number = None
    temperature: Real = None
    top_p: Real = None
    top_k: Number = None
    min_p: Real = None
    seed: Number = None
    stop: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=SAMPLING, help="A stop string; repeatable."),
    ] = None
    stop_id: Annotated[
        list[int] | None,
        typer.Option(rich_help_panel=SAMPLING, help="A stop token id; repeatable."),
    ] = None
    logprobs: Number = None
    n: Annotated[
        int | None, typer.Option("--n", rich_help_panel=SAMPLING, help="Choices.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option(rich_help_panel=SAMPLING)] = False
    repetition_penalty: Real = None
    presence_penalty: Real = None
    frequency_penalty: Real = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=SAMPLING, help="ID=VALUE; repeatable."),
    ] = None

    def fields(self) -> dict[str, object]:
        """Returns fields of `Sampling`.

        Raises:
            InvalidRequest: A bias is not of the form ID=VALUE.
        """
        fields = msgspec.structs.asdict(self)
        fields["stop_token_ids"] = fields.pop("stop_id")
        fields["ignore_eos"] = self.ignore_eos or None
        fields["logit_bias"] = parse_logit_bias(self.logit_bias or [])
        return fields


class QueueingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Whose job it is, when it runs, and what happens when it cannot be taken."""

    job_class: Annotated[
        JobClass, typer.Option("--class", rich_help_panel=QUEUEING)
    ] = JobClass.INTERACTIVE
    tenant: Annotated[str, typer.Option(rich_help_panel=QUEUEING)] = DEFAULT_TENANT
    priority: Annotated[
        int | None,
        typer.Option(rich_help_panel=QUEUEING, help="Smaller is more urgent."),
    ] = None
    idempotency_key: Annotated[
        str | None,
        typer.Option(rich_help_panel=QUEUEING, help="The same key is the same job."),
    ] = None
    deadline: Annotated[
        float | None,
        typer.Option(rich_help_panel=QUEUEING, help="Seconds until it expires."),
    ] = None
    delay: Annotated[
        float | None,
        typer.Option(rich_help_panel=QUEUEING, help="Seconds until it is queued."),
    ] = None
    not_before: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=QUEUEING,
            help="When it is queued: a time with its zone, as 2030-01-31T08:00:00Z.",
        ),
    ] = None
    refuse_late: Annotated[
        bool,
        typer.Option(
            "--refuse-late",
            rich_help_panel=QUEUEING,
            help="Refuse it now if it cannot meet its deadline.",
        ),
    ] = False
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=QUEUEING,
            help="Tell this address of the end.",
        ),
    ] = None
    wait_for_room: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=QUEUEING,
            help="Seconds to wait when the queue is full; default: it is an error.",
            callback=check_seconds,
        ),
    ] = None
    wait_for_worker: Annotated[
        bool,
        typer.Option(
            "--wait-for-worker",
            rich_help_panel=QUEUEING,
            help="Queue even when no worker serves the model.",
        ),
    ] = False

    def fields(self) -> dict[str, object]:
        """Returns fields of `Prompt`."""
        return {
            "job_class": self.job_class,
            "tenant": self.tenant,
            "priority": self.priority,
            "idempotency_key": self.idempotency_key,
            "deadline_s": self.deadline,
            "delay_s": self.delay,
            "not_before": self.not_before,
            "refuse_late": self.refuse_late or None,
            "webhook": self.webhook,
        }

    def room(self) -> Room:
        """Returns what to do when the pool cannot take the job now."""
        return {
            "when_full": "raise" if self.wait_for_room is None else "wait",
            "when_unserved": "wait" if self.wait_for_worker else "refuse",
            "wait_s": self.wait_for_room,
        }


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """How the command goes on once the job is in the queue."""

    stream: Annotated[
        bool,
        typer.Option("--stream", rich_help_panel=OUTPUT, help="Print as it comes."),
    ] = False
    wait: Annotated[
        bool,
        typer.Option(rich_help_panel=OUTPUT, help="Await the end, or print the id."),
    ] = True
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", rich_help_panel=OUTPUT, help="Ctrl-C leaves the job alone."
        ),
    ] = False
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            rich_help_panel=OUTPUT,
            help="Seconds to wait for the end.",
            callback=check_seconds,
        ),
    ] = None
