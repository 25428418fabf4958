"""A Hugging Face tokenizer behind the `Tokenizer` interface, without torch."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from .errors import InvalidRequest, ModelLoadError
from .messages import JobRequest, Message
from .tokens import SPARE_TOKENS, Encoded, prompt_field, too_long
from .tokens_control import AddedToken, ControlTokens, LiteralEncoder, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE_CHARACTERS: Final = 8
"""Characters per context token that are tokenized first of a very long text: most
texts spend fewer, so the probe alone shows that they are too long."""
_log = structlog.get_logger(__name__)


class _Pending(msgspec.Struct, frozen=True):
    """A text that is ready for the tokenizer."""

    index: int
    text: str


class HuggingFaceTokenizer:
    """Encodes requests with the model's own chat template and special tokens.

    Args:
        tokenizer: What `AutoTokenizer` returned; it must have a fast backend.
        fingerprint: Of the bundle it came from.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", fingerprint: str = ""
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError(
                f"{type(tokenizer).__name__} has no tokenizer.json form; convert it "
                "with transformers' save_pretrained of a fast tokenizer"
            )
        self.fingerprint = fingerprint
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        self._tokenizer = tokenizer
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        added = msgspec.json.decode(backend.to_str())["added_tokens"]
        tokens = msgspec.convert(added, list[AddedToken], strict=False)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._control = ControlTokens(tokens)
        self._num_added = self._control.count(backend.encode("").ids)
        self._literal: LiteralEncoder | None = None
        unknown = getattr(tokenizer, "unk_token_id", None)
        # Characters without a token give the unknown token: no one spelled that.
        self._spelled = self._control.ids - {unknown}

    @classmethod
    def load(cls, directory: Path, fingerprint: str = "") -> "HuggingFaceTokenizer":
        """Reads a directory of tokenizer files; nothing is fetched.

        Raises:
            ModelLoadError: transformers cannot read them.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
            raise ModelLoadError(
                f"transformers cannot build the tokenizer: {error}; expected the "
                "files that its save_pretrained writes"
            ) from error
        return cls(tokenizer, fingerprint)

    def encode_request(
        self, request: JobRequest, max_context: int | None = None
    ) -> list[int]:
        """See `Tokenizer.encode_request`."""
        [encoded] = self.encode_requests([request], max_context)
        if isinstance(encoded, InvalidRequest):
            raise encoded
        return encoded

    def encode_requests(
        self, requests: Sequence[JobRequest], max_context: int | None = None
    ) -> list[Encoded]:
        """See `Tokenizer.encode_requests`."""
        encoded: list[Encoded] = [[] for _ in requests]
        texts: list[_Pending] = []
        chats: list[_Pending] = []
        for index, request in enumerate(requests):
            try:
                ready = self._prepare(request, max_context)
            except InvalidRequest as error:
                encoded[index] = error
                continue
            if isinstance(ready, list):
                encoded[index] = ready
            else:
                batch = texts if request.messages is None else chats
                batch.append(_Pending(index, ready))
        # The template wrote the model's special tokens: they are not added again.
        for batch, special in ((texts, True), (chats, False)):
            outputs = self._backend.encode_batch_fast(
                [pending.text for pending in batch], add_special_tokens=special
            )
            for pending, output in zip(batch, outputs, strict=True):
                encoded[pending.index] = output.ids
        return [
            self._checked(request, ids, max_context)
            for request, ids in zip(requests, encoded, strict=True)
        ]

    def count_texts(self, texts: Sequence[str]) -> list[int]:
        """See `Tokenizer.count_texts`."""
        outputs = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            len(self._as_text().encode_text(text, "text"))
            if self._control.find(text) is not None
            else len(output.ids)
            for text, output in zip(texts, outputs, strict=True)
        ]

    def _prepare(self, request: JobRequest, max_context: int | None) -> str | list[int]:
        """Returns the text to encode, or the ids where they need another way."""
        if request.messages is not None:
            return self._prepare_chat(request, request.messages, max_context)
        text = request.text or ""
        spelled = self._control.find(text)
        if spelled is not None and request.control_tokens == "refuse":
            raise refusal("text", spelled)
        self._probe("text", text, max_context)
        if spelled is not None and request.control_tokens == "as_text":
            return self._as_text().encode_text(text, "text")
        return text

    def _prepare_chat(
        self,
        request: JobRequest,
        messages: tuple[Message, ...],
        max_context: int | None,
    ) -> str | list[int]:
        if not self.has_chat_template:
            raise InvalidRequest(
                "messages",
                "the model has no chat template (chat_template in its tokenizer's "
                "files); send plain text instead",
            )
        spelled = [self._control.find(message.content) for message in messages]
        if request.control_tokens == "refuse":
            for index, found in enumerate(spelled):
                if found is not None:
                    raise refusal(f"messages[{index}].content", found)
        if request.control_tokens == "as_text" and any(spelled):
            mark = secrets.token_hex(8)
            literal = self._as_text()
            hidden = [literal.hide(message.content, mark) for message in messages]
            rendered = self._render(messages, hidden)
            self._probe("messages", rendered, max_context)
            return literal.encode_rendered(rendered, mark)
        rendered = self._render(messages, [message.content for message in messages])
        self._probe("messages", rendered, max_context)
        return rendered

    def _render(self, messages: tuple[Message, ...], contents: list[str]) -> str:
        turns = [
            {"role": message.role, "content": content}
            for message, content in zip(messages, contents, strict=True)
        ]
        try:
            rendered = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes
            _log.debug("chat_template_failed", kind=type(error).__name__)
            raise InvalidRequest(
                "messages",
                f"the model's chat template refuses this conversation: {error}",
            ) from error
        return str(rendered)

    def _probe(self, field: str, text: str, max_context: int | None) -> None:
        """Refuses a text whose beginning alone fills the context."""
        if max_context is None or len(text) <= max_context * _PROBE_CHARACTERS:
            return
        beginning = text[: max_context * _PROBE_CHARACTERS]
        output = self._backend.encode(beginning, add_special_tokens=False)
        least = len(output) - SPARE_TOKENS
        if least > max_context:
            raise too_long(field, least, max_context, exact=False)

    def _as_text(self) -> LiteralEncoder:
        if self._literal is None:
            self._literal = LiteralEncoder(self._backend, self._control)
        return self._literal

    def _checked(
        self, request: JobRequest, ids: Encoded, max_context: int | None
    ) -> Encoded:
        if isinstance(ids, InvalidRequest):
            return ids
        field = prompt_field(request)
        if not ids:
            return InvalidRequest(
                field, "the prompt gives no tokens; expected at least one"
            )
        if max_context is not None and len(ids) >= max_context:
            return too_long(field, len(ids), max_context)
        # A normalizer can turn other spellings into a control token: the ids decide.
        if request.control_tokens == "refuse" and request.messages is None:
            extra = self._control.count(ids) - self._num_added
            if extra > 0 and (spelled := self._first_spelled(ids)) is not None:
                return refusal("text", spelled)
        return ids

    def _first_spelled(self, ids: list[int]) -> str | None:
        inner = ids[self._num_added :] if self._num_added else ids
        found = next((i for i in inner if i in self._spelled), None)
        return None if found is None else self._control.spelling[found]
