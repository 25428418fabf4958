"""What the submit command reads: text from its sources, options into a prompt."""

import sys
from enum import StrEnum
from pathlib import Path

import msgspec
import typer

from ..shared.errors import InvalidRequest
from ..shared.messages import Message, Prompt


class ControlTokens(StrEnum):
    """What may be done with text that spells control tokens, as typer lists it."""

    REFUSE = "refuse"
    AS_TEXT = "as_text"
    ALLOW = "allow"


def check_seconds(seconds: float | None) -> float | None:
    """Refuses what is no time to wait, before anything is enqueued.

    Raises:
        BadParameter: It is negative or not a number.
    """
    if seconds is not None and not seconds >= 0:
        raise typer.BadParameter(f"{seconds} is not a time to wait; expected 0 or more")
    return seconds


def read_text(argument: str | None, file: Path | None) -> str:
    """Returns the prompt's text from the argument, a file or standard input.

    One line break at the end of a file or of standard input is not part of it: `echo`
    and editors add it.

    Args:
        argument: The text itself, or `-` for standard input.
        file: A file to read instead.

    Raises:
        InvalidRequest: No source or several, unreadable, or not UTF-8.
    """
    if file is not None and not file.exists():
        raise InvalidRequest("file", f"{file}: No such file or directory")
    if file is not None and argument is not None:
        raise InvalidRequest(
            "text", "given both as an argument and with --file; expected one of them"
        )
    if file is not None:
        try:
            return decode_text(file.read_bytes(), f"file {file}")
        except OSError as error:
            raise InvalidRequest("file", f"{file}: {error.strerror}") from None
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise InvalidRequest(
            "text", "is missing; give it as an argument, with --file, or on a pipe"
        )
    return decode_text(sys.stdin.buffer.read(), "standard input")


def decode_text(raw: bytes, source: str) -> str:
    """Decodes UTF-8, and takes one line break off the end.

    Args:
        raw: The bytes.
        source: Where they come from, for the message.

    Raises:
        InvalidRequest: They are not UTF-8; the message names the first bad byte.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "text",
            f"byte {error.start} of {source} is 0x{raw[error.start]:02x}, which is not "
            f"UTF-8 ({error.reason}); convert it first, for example with iconv",
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def read_content(
    argument: str | None, file: Path | None, *, chat: bool, system: str | None
) -> dict[str, object]:
    """Returns the `text` or the `messages` of a prompt.

    Args:
        argument: As in `read_text`.
        file: As in `read_text`.
        chat: The text is a user's message.
        system: A system message before it; implies `chat`.

    Raises:
        InvalidRequest: As in `read_text`.
    """
    text = read_text(argument, file)
    if chat or system is not None:
        return {"messages": build_messages(text, system)}
    return {"text": text}


def build_messages(text: str, system: str | None) -> tuple[Message, ...]:
    """Returns a conversation of one user message after an optional system message."""
    turns = () if system is None else (Message("system", system),)
    return (*turns, Message("user", text))


def parse_logit_bias(options: list[str]) -> dict[int, float]:
    """Returns the biases of `--logit-bias ID=VALUE`.

    Raises:
        InvalidRequest: One is not of that form.
    """
    biases: dict[int, float] = {}
    for option in options:
        token_id, _, bias = option.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidRequest(
                "logit_bias", f"'{option}' is not of the form TOKEN_ID=NUMBER"
            ) from None
    return biases


def build_prompt(content: dict[str, object], options: dict[str, object]) -> Prompt:
    """Returns a prompt from command-line options; absent ones keep their defaults.

    Args:
        content: `text` or `messages`.
        options: Fields of `Prompt`, with `sampling` a dict of fields.

    Raises:
        InvalidRequest: A value has a wrong type.
    """
    from ..shared.decode import decode_prompt

    sampling = _present(options.pop("sampling"))
    plain = msgspec.to_builtins(content) | _present(options) | {"sampling": sampling}
    return decode_prompt(plain)


def _present(options: object) -> dict[str, object]:
    assert isinstance(options, dict)
    return {key: value for key, value in options.items() if value not in (None, [], {})}
