"""One token per byte: for tests, benchmarks and models without a tokenizer."""

import re
from collections.abc import Sequence
from typing import Final

from .errors import InvalidRequest
from .messages import JobRequest
from .token_pieces import EOS_TEXT as EOS_TEXT
from .tokens import BYTES, Encoded, prompt_field, too_long
from .tokens_control import refusal

EOS_TOKEN_ID: Final = 256
"""End of sequence: the one id above the bytes, 0 to 255."""
_EOS: Final = re.compile(re.escape(EOS_TEXT))


class ByteTokenizer:
    """The id is the byte; n bytes are n tokens, with no special ones added."""

    fingerprint = BYTES
    vocab_size = EOS_TOKEN_ID + 1
    has_chat_template = True

    def encode_request(
        self, request: JobRequest, max_context: int | None = None
    ) -> list[int]:
        """See `Tokenizer.encode_request`."""
        parts = [(request.text or "", "text", "")]
        if request.messages is not None:
            parts = [
                (m.content, f"messages[{i}].content", f"{m.role}: ")
                for i, m in enumerate(request.messages)
            ]
        ids: list[int] = []
        for content, field, head in parts:
            ids += self._literal(head)
            ids += self._content(content, field, request.control_tokens)
            ids += self._literal("\n" if head else "")
        if request.messages is not None:
            ids += self._literal("assistant: ")
        if max_context is not None and len(ids) >= max_context:
            raise too_long(prompt_field(request), len(ids), max_context)
        return ids

    def encode_requests(
        self, requests: Sequence[JobRequest], max_context: int | None = None
    ) -> list[Encoded]:
        """See `Tokenizer.encode_requests`."""
        encoded: list[Encoded] = []
        for request in requests:
            try:
                encoded.append(self.encode_request(request, max_context))
            except InvalidRequest as error:
                encoded.append(error)
        return encoded

    def count_texts(self, texts: Sequence[str]) -> list[int]:
        """See `Tokenizer.count_texts`."""
        return [len(text.encode()) for text in texts]

    @staticmethod
    def _literal(text: str) -> list[int]:
        return list(text.encode())

    def _content(self, text: str, field: str, policy: str) -> list[int]:
        if policy == "as_text" or EOS_TEXT not in text:
            return self._literal(text)
        if policy == "refuse":
            raise refusal(field, EOS_TEXT)
        ids: list[int] = []
        for index, part in enumerate(_EOS.split(text)):
            ids += [EOS_TOKEN_ID] if index else []
            ids += self._literal(part)
        return ids
