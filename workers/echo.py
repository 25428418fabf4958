"""An engine without a model: it answers with the prompt's own tokens.

For trying and measuring the queue, the scheduler and the worker's shell. It takes the
`bytes` tokenizer (a token is a byte) and, on request, a fixed time per step, so that
streams last long enough to be watched, cut off or cancelled. With an adapter it says
the adapter's name first.
"""

import codecs
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ..shared.errors import ConfigError, InvalidRequest
from ..shared.messages import DEFAULT_VERSION, FinishReason, JobClass, TokenLogprob
from ..shared.tokens import BYTES
from ..shared.tokens_bytes import EOS_TOKEN_ID
from .engine.request import (
    Capacity,
    Emitted,
    EngineRequest,
    Finished,
    FinishedChoice,
    StepOutput,
    TokenDelta,
)

VOCABULARY: Final = EOS_TOKEN_ID + 1
MAX_CONTEXT: Final = 1_000_000
TOTAL_BLOCKS: Final = 1_000_000
WEIGHTS_VERSION: Final = "echo"
TOKENIZER: Final = BYTES
_AT_ONCE_RUNNING: Final = 2048
"""Jobs in hand when a step takes no time: more would only lengthen one batch."""


def weights_of(version: str) -> str:
    """Names the weights that there would be: each version of a model has its own."""
    if version == DEFAULT_VERSION:
        return WEIGHTS_VERSION
    return f"{WEIGHTS_VERSION}-{version}"


class _Output:
    """One choice: a cycle through the prompt."""

    def __init__(self, request: EngineRequest, index: int, emitted: Emitted) -> None:
        self.index = index
        self.token_ids = list(emitted.token_ids)
        self.text = emitted.text
        self.finish_reason = emitted.finish_reason
        self._prompt = _answer_of(request)
        sampling = request.sampling
        self._limit = sampling.max_tokens
        self._cyclic = sampling.ignore_eos
        self._most_likely = sampling.logprobs
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in self.token_ids:
            self._decoder.decode(_bytes([token_id]))

    def take(self, most: int) -> TokenDelta | None:
        """Produces up to `most` tokens; the caller fills in the request's id."""
        if self.finish_reason is not None:
            return None
        offset = len(self.token_ids)
        new: list[int] = []
        while len(new) < most and self.finish_reason is None:
            new.append(self._prompt[len(self.token_ids) % len(self._prompt)])
            self.token_ids.append(new[-1])
            if len(self.token_ids) >= self._limit:
                self.finish_reason = FinishReason.LENGTH
            elif not self._cyclic and len(self.token_ids) >= len(self._prompt):
                self.finish_reason = FinishReason.STOP
        ended = self.finish_reason is not None
        text = self._decoder.decode(_bytes(new), final=ended)
        self.text += text
        return TokenDelta(
            request_id="",
            choice=self.index,
            offset=offset,
            token_ids=tuple(new),
            text=text,
            logprobs=self.logprobs(new),
            finish_reason=self.finish_reason,
        )

    def logprobs(self, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        """Returns those of tokens, if they were asked for: each was certain."""
        if self._most_likely is None:
            return None
        shown = bool(self._most_likely)
        return tuple(
            TokenLogprob(0.0, ((token_id, 0.0),) if shown else ())
            for token_id in token_ids
        )


def _answer_of(request: EngineRequest) -> tuple[int, ...]:
    if request.adapter is None:
        return request.token_ids
    name = request.adapter.partition("@")[0]
    return (*f"{name}: ".encode(), *request.token_ids)


def _bytes(token_ids: Sequence[int]) -> bytes:
    """The end-of-sequence token, the one id that is no byte, has no text."""
    return bytes(token_id for token_id in token_ids if token_id != EOS_TOKEN_ID)


class _Request:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        count = request.sampling.n
        emitted = request.emitted or (Emitted(),) * count
        self.outputs = [
            _Output(request, index, emitted[index]) for index in range(count)
        ]

    def step(self, most: int) -> Iterator[TokenDelta]:
        for output in self.outputs:
            delta = output.take(most)
            if delta is not None:
                yield TokenDelta(
                    request_id=self.request.id,
                    choice=delta.choice,
                    offset=delta.offset,
                    token_ids=delta.token_ids,
                    text=delta.text,
                    logprobs=delta.logprobs,
                    finish_reason=delta.finish_reason,
                )

    def finished(self) -> Finished | None:
        if any(output.finish_reason is None for output in self.outputs):
            return None
        return Finished(
            request_id=self.request.id,
            prompt_tokens=len(self.request.token_ids),
            choices=tuple(
                FinishedChoice(
                    index=output.index,
                    token_ids=tuple(output.token_ids),
                    text=output.text,
                    finish_reason=output.finish_reason or FinishReason.STOP,
                    logprobs=output.logprobs(output.token_ids),
                )
                for output in self.outputs
            ),
        )


class EchoEngine:
    """Answers each request with its own prompt.

    Args:
        max_running: Requests in hand; more wait.
        step_s: Seconds a step takes, one token per choice each; 0 answers a request
            in one step.
        sleep: How a step takes its time; replaced by tests.
    """

    def __init__(
        self,
        *,
        max_running: int = _AT_ONCE_RUNNING,
        step_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._max_running = max_running
        self._step_s = step_s
        self._sleep = sleep
        self._requests: dict[str, _Request] = {}
        self._steps = 0
        self._tokens = 0

    @classmethod
    def from_name(cls, name: str, max_running: int) -> "EchoEngine":
        """Makes the engine that `--engine echo` or `--engine echo:<ms>` names.

        Args:
            name: `echo`, or `echo:` and the milliseconds of a step.
            max_running: The setting; used where steps take time.
        """
        _, _, text = name.partition(":")
        if not text:
            return cls()
        try:
            step_s = float(text) / 1000.0
        except ValueError:
            problem = f"value {name!r}; expected echo or echo:<ms per step>"
            raise ConfigError("engine", problem) from None
        return cls(max_running=max_running, step_s=step_s)

    @property
    def has_work(self) -> bool:
        """Whether requests are in hand."""
        return bool(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Takes a request."""
        if not request.token_ids:
            raise InvalidRequest("prompt", "is empty; expected at least one token")
        if max(request.token_ids) >= VOCABULARY or min(request.token_ids) < 0:
            raise InvalidRequest("prompt", "the echo engine takes bytes, ids 0 to 256")
        self._requests[request.id] = _Request(request)

    def cancel(self, request_id: str) -> bool:
        """Drops a request.

        Returns:
            Whether it was here.
        """
        return self._requests.pop(request_id, None) is not None

    def step(self) -> StepOutput:
        """Produces the next tokens of `max_running` requests, the oldest first."""
        if self._step_s:
            self._sleep(self._step_s)
        most = 1 if self._step_s else MAX_CONTEXT
        deltas: list[TokenDelta] = []
        finished: list[Finished] = []
        for request_id, request in self._next():
            deltas += request.step(most)
            done = request.finished()
            if done is not None:
                finished.append(done)
                del self._requests[request_id]
        self._steps += 1
        self._tokens += sum(len(delta.token_ids) for delta in deltas)
        return StepOutput(deltas=tuple(deltas), finished=tuple(finished))

    def _next(self) -> list[tuple[str, _Request]]:
        """Who runs in the next step: interactive before bulk, as with a model."""
        here = list(self._requests.items())
        if len(here) > self._max_running:
            here.sort(key=lambda one: one[1].request.job_class is JobClass.BULK)
        return here[: self._max_running]

    def capacity(self) -> Capacity:
        """Room as the scheduler sees it: blocks are never what is short."""
        return Capacity(
            total_blocks=TOTAL_BLOCKS,
            free_blocks=TOTAL_BLOCKS,
            max_running=self._max_running,
            num_running=len(self._requests),
            prefill_backlog=0,
            steps=self._steps,
            scheduled_tokens=self._tokens,
            step_fit_ms=(self._step_s * 1000.0, 0.0),
        )

    def check_integrity(self) -> None:
        """Nothing is held besides the requests themselves."""
