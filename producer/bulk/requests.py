"""One line of a request file as a prompt: OpenAI's batch form, or a simpler one."""

from collections.abc import Callable, Mapping
from typing import Final, Literal

from ...shared.adapter_names import split_name
from ...shared.decode import decode_prompt
from ...shared.errors import InvalidRequest
from ...shared.messages import Prompt, Sampling
from ...shared.typed import parse, shown
from ..openai_form import (
    CHAT_URL,
    COMPLETION_URL,
    decode_body,
    param_of,
    prompts_of,
)
from .accepted import Accepted
from .line_source import Parsed

Label = Literal["chat", "completions", "text", "number"]
"""How the output line is written: the first two in OpenAI's form; the others in the
simple one, with the id as text or as a number."""

_OPENAI_FIELDS: Final = frozenset({"custom_id", "method", "url", "body"})
_SIMPLE_FIELDS: Final = frozenset({"id", "prompt", "messages", "options"})
_OPTIONS: Final = frozenset({"model", "adapter", "control_tokens"})
"""Of the simple form, besides those of sampling."""
_IN_A_FILE: Final = "is not supported in a file; "
_OF_THE_RUN: Final = dict.fromkeys(
    (
        *("job_class", "priority", "idempotency_key", "webhook"),
        *("deadline_s", "refuse_late"),
    ),
    f"{_IN_A_FILE}all of its requests are queued alike",
) | {"stream": f"{_IN_A_FILE}answers come whole"}
"""Fields of a body that mean nothing here, and why."""
_NO_LOGPROBS: Final = {
    "logprobs": f"{_IN_A_FILE}OpenAI's form spells tokens, which takes the model's "
    "tokenizer; the simple form gives their ids (options.logprobs)"
}
MaxContext = Callable[[str], int | None]
"""A model's name -> most tokens of prompt and output, where known."""
OPENAI: Final = ("chat", "completions")
"""Labels of OpenAI's form."""
ENVELOPE_BYTES: Final = 64 * 1024
"""What a line may have besides its text."""
MAX_ID: Final = 512
"""Characters of an id."""


class _Reading:
    """Reads one line; keeps what is known of it when a later field is wrong."""

    def __init__(
        self, model: str, max_context: MaxContext, *, spells: bool = False
    ) -> None:
        self._model = model
        self._max_context = max_context
        self._refused = _OF_THE_RUN if spells else _OF_THE_RUN | _NO_LOGPROBS
        self.label: Label = "text"
        self.custom_id: str | None = None

    def prompt(self, data: bytes) -> Prompt:
        """Returns the prompt of a line.

        Raises:
            InvalidRequest: It has none; the message names the field at fault.
        """
        plain = parse(data, "line")
        if not isinstance(plain, dict):
            raise InvalidRequest("line", f"expected an object, found {shown(plain)}")
        if plain.keys() & (_OPENAI_FIELDS):
            return self._openai(plain)
        return self._simple(plain)

    def _openai(self, plain: Mapping[str, object]) -> Prompt:
        # Known first, so that whatever else is wrong is told in this form.
        url = plain.get("url")
        self.label = "completions" if url == COMPLETION_URL else "chat"
        self.custom_id = _text_id("custom_id", plain.get("custom_id"))
        if plain.get("method") != "POST":
            raise _expected("method", plain.get("method"), "POST")
        if not isinstance(url, str):
            raise _expected("url", url, f"{CHAT_URL} or {COMPLETION_URL}")
        body = plain.get("body")
        if not isinstance(body, dict):
            raise _expected("body", body, "an object")
        for name, why in self._refused.items():
            given = body.get(name)
            if given is not None and given is not False:
                raise InvalidRequest(f"body.{name}", why)
        return self._of_body(url, body)

    def _of_body(self, url: str, body: Mapping[str, object]) -> Prompt:
        try:
            decoded = decode_body(url, body)
        except InvalidRequest as error:
            raise error if error.field == "url" else _inside(error) from None
        prompts = prompts_of(decoded, self._max_context(decoded.model))
        if len(prompts) != 1:
            raise InvalidRequest(
                "body.prompt",
                f"{len(prompts)} prompts in one line are not supported; give each a "
                "line of its own",
            )
        return prompts[0]

    def _simple(self, plain: Mapping[str, object]) -> Prompt:
        self.label, self.custom_id = read_id(plain.get("id"))
        unknown = plain.keys() - _SIMPLE_FIELDS
        if unknown:
            raise InvalidRequest(
                min(unknown),
                "is not supported; expected id, prompt or messages, and options",
            )
        options = plain.get("options")
        if options is not None and not isinstance(options, dict):
            raise _expected("options", options, "an object")
        return self._of_options(plain, options or {})

    def _of_options(
        self, plain: Mapping[str, object], options: Mapping[str, object]
    ) -> Prompt:
        allowed = _OPTIONS.union(Sampling.__struct_fields__)
        unknown = options.keys() - allowed
        if unknown:
            raise InvalidRequest(
                f"options.{min(unknown)}",
                f"is not supported; expected one of {', '.join(sorted(allowed))}",
            )
        content = {
            ours: plain[theirs]
            for theirs, ours in (("prompt", "text"), ("messages", "messages"))
            if plain.get(theirs) is not None
        }
        if len(content) != 1:
            both = "both" if content else "neither"
            raise InvalidRequest(
                "prompt",
                f"{both} of prompt and messages are given; expected exactly one",
            )
        queued = {name: options[name] for name in _OPTIONS & options.keys()}
        sampling = {n: v for n, v in options.items() if n not in _OPTIONS}
        # A line that names an adapter has it in the place of the run's.
        model = split_name(self._model)[0] if "adapter" in queued else self._model
        try:
            return decode_prompt(
                {"model": model} | queued | content | {"sampling": sampling}
            )
        except InvalidRequest as error:
            raise as_given(error) from None


class RequestReader:
    """Reads lines of a request file.

    Args:
        pool: What the pool accepts.
        model: What a line of the simple form asks for where it names none.
        spells: Whether who writes the lines can spell tokens, so that OpenAI's
            `logprobs` may be asked for.
    """

    def __init__(self, pool: Accepted, model: str, *, spells: bool = False) -> None:
        self._pool = pool
        self._model = model
        self._spells = spells
        # Escapes make a text up to six times as long as JSON.
        self.max_bytes = 6 * pool.max_text_bytes + ENVELOPE_BYTES

    def read(self, data: bytes) -> Parsed:
        """Reads a line; what is wrong with it is part of what is returned."""
        reading = _Reading(self._model, self._pool.max_context, spells=self._spells)
        prompt, wrong = None, None
        try:
            prompt = reading.prompt(data)
            self._check(prompt, reading.label)
        except InvalidRequest as error:
            wrong = error
        return Parsed(
            label=reading.label,
            custom_id=reading.custom_id,
            id_field="custom_id" if reading.label in OPENAI else "id",
            content=prompt,
            error=wrong,
        )

    def _check(self, prompt: Prompt, label: Label) -> None:
        try:
            self._pool.check(prompt)
        except InvalidRequest as error:
            if label not in OPENAI:
                raise as_given(error) from None
            field = f"body.{param_of(error.field)}"
            raise type(error)(field, error.problem) from None


def as_given(error: InvalidRequest) -> InvalidRequest:
    """Names the field as it stands in a line of the simple form."""
    field = error.field
    if field == "text":
        field = "prompt"
    elif field.startswith("sampling"):
        field = "options" + field.removeprefix("sampling")
    elif field.partition("[")[0] not in ("messages", "prompt"):
        field = f"options.{field}"
    return type(error)(field, error.problem)


def read_id(given: object) -> tuple[Literal["text", "number"], str]:
    """Returns the label and the text of an `id`.

    Raises:
        InvalidRequest: It is missing, or neither text nor a whole number.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return "number", str(given)
    return "text", _text_id("id", given, or_else=" or a whole number")


def _text_id(field: str, value: object, or_else: str = "") -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID:
        expected = f"a text of 1 to {MAX_ID} characters{or_else}"
        raise _expected(field, value, expected)
    return value


def _expected(field: str, value: object, what: str) -> InvalidRequest:
    if value is None:
        return InvalidRequest(field, f"is missing; expected {what}")
    return InvalidRequest(field, f"expected {what}, found {shown(value)}")


def _inside(error: InvalidRequest) -> InvalidRequest:
    field = "body" if error.field == "body" else f"body.{error.field}"
    return type(error)(field, error.problem)
