"""Control tokens that a user's text spells: found, refused, or made plain text."""

import re
import secrets
from typing import TYPE_CHECKING, Final

import msgspec

from .errors import ControlTokensInText, InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_LOOKS_LIKE_CONTROL: Final = re.compile("<[|\uff5c].*[|\uff5c]>", re.S)
"""Some models leave `special` unset on tokens that their template uses as control."""


class AddedToken(msgspec.Struct, frozen=True):
    """One added token of a `tokenizer.json`; its other fields stay as they are."""

    id: int
    content: str
    special: bool = False

    @property
    def is_control(self) -> bool:
        """Whether it steers the model rather than spells text."""
        return self.special or bool(_LOOKS_LIKE_CONTROL.fullmatch(self.content))


def refusal(field: str, spelled: str) -> ControlTokensInText:
    """Returns the error for text that spells a control token."""
    return ControlTokensInText(
        field,
        f"the text spells the model's control token {spelled!r}; set control_tokens to "
        "'as_text' to encode it as ordinary text, to 'allow' to let it act, or "
        "leave it at 'refuse' and remove it from the text",
    )


class ControlTokens:
    """The control tokens of one tokenizer and how they are spelled.

    Args:
        tokens: All added tokens of the tokenizer.
    """

    def __init__(self, tokens: list[AddedToken]) -> None:
        control = [token for token in tokens if token.is_control and token.content]
        self.spelling = {token.id: token.content for token in control}
        self.ids = frozenset(self.spelling)
        # Longest first, so that a token that begins another is not found instead.
        spellings = sorted(self.spelling.values(), key=len, reverse=True)
        # An alternation of nothing would match everywhere; this matches nowhere.
        self.pattern = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    def find(self, text: str) -> str | None:
        """Returns the first control token that `text` spells, or None."""
        match = self.pattern.search(text)
        return match.group() if match else None

    def count(self, token_ids: list[int]) -> int:
        """Returns how many of the ids are control tokens."""
        if self.ids.isdisjoint(token_ids):
            return 0
        return sum(map(self.ids.__contains__, token_ids))


class LiteralEncoder:
    """Encodes text in which user text spells control tokens without their meaning.

    The control tokens of a copy of the tokenizer are renamed to spellings that no
    user can guess. User text then never matches one, and what a chat template itself
    writes is translated to the new names; all else about the tokenizer is unchanged.

    Args:
        backend: The tokenizer to copy.
        control: Its control tokens.
    """

    def __init__(self, backend: "Backend", control: ControlTokens) -> None:
        from tokenizers import Tokenizer as Backend

        self._control = control
        nonce = secrets.token_hex(8)
        self._alias = {
            spelled: f"\ue000{nonce}{token_id}\ue001"
            for token_id, spelled in control.spelling.items()
        }
        description = msgspec.json.decode(backend.to_str())
        added = description["added_tokens"]
        original = {}
        for token in added:
            alias = self._alias.get(token["content"])
            if alias is not None:
                token.update(content=alias, special=True, normalized=False)
            original[token["content"]] = token["id"]
        self._backend = Backend.from_str(msgspec.json.encode(description).decode())
        self._backend.no_truncation()
        self._backend.no_padding()
        # A name that is not in the model's vocabulary gets a new id: map it back.
        self._id_of = {
            new: token_id
            for content, token_id in original.items()
            if (new := self._backend.token_to_id(content)) is not None
            and new != token_id
        }
        self._leaks = control.ids - self._ids_of_aliases()
        added_by_model = set(self._backend.encode("", add_special_tokens=True).ids)
        self._usable = added_by_model.isdisjoint(self._id_of)

    def _ids_of_aliases(self) -> set[int]:
        ids = (self._backend.token_to_id(alias) for alias in self._alias.values())
        return {token_id for token_id in ids if token_id is not None}

    def hide(self, text: str, mark: str) -> str:
        """Returns `text` with each control spelling replaced by a marked stand-in.

        Args:
            text: User text.
            mark: An unguessable string, the same for `encode_rendered`.
        """
        names = list(self._alias)
        return self._control.pattern.sub(
            lambda match: f"\ue000{mark}.{names.index(match.group())}\ue001", text
        )

    def encode_text(self, text: str, field: str) -> list[int]:
        """Returns the ids of plain user text, with the model's own special tokens."""
        return self._encode(text, field, add_special_tokens=True)

    def encode_rendered(self, rendered: str, mark: str) -> list[int]:
        """Returns the ids of a rendered chat whose user text was hidden before.

        Args:
            rendered: The template's output: its control tokens act.
            mark: The mark given to `hide`: what stands there is text.
        """
        names = list(self._alias)
        text = self._control.pattern.sub(lambda m: self._alias[m.group()], rendered)
        text = re.sub(
            rf"\ue000{mark}\.(\d+)\ue001", lambda m: names[int(m.group(1))], text
        )
        return self._encode(text, "messages", add_special_tokens=False)

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not self._usable or not self._leaks.isdisjoint(ids):
            raise InvalidRequest(
                field,
                "this model's tokenizer cannot encode a control token as ordinary "
                "text; remove it, or set control_tokens to 'allow' to let it act",
            )
        if add_special_tokens:
            ids = self._backend.encode(text, add_special_tokens=True).ids
        return [self._id_of.get(token_id, token_id) for token_id in ids]
