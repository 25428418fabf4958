"""One choice of one request while it runs."""

from typing import Final

from ...shared.messages import FinishReason, JobClass, TokenLogprob
from .detokenizer import DetokenizerSource
from .kv.manager import Allocation
from .kv.prefix_cache import Namespace, PromptChain
from .output import OutputBuffer
from .request import Emitted, EngineRequest, FinishedChoice, TokenDelta
from .sampling_rows import SamplingRow
from .stop import StopMatcher

PATIENCE: Final = 8
"""Setbacks after which a sequence is the most urgent of its class."""


class Sequence:
    """Tokens of one choice, what is computed of them, and what is out.

    Args:
        request: Its request.
        choice: Index of the choice.
        max_output: Output tokens at most, by max_tokens and the context.
        eos_ids: The model's end-of-sequence ids.
        source: Where its detokenizer comes from.
        arrival: Rises with every request.
        namespace: Whom it may share KV blocks with; None shares nothing.
    """

    def __init__(
        self,
        request: EngineRequest,
        choice: int,
        *,
        max_output: int,
        eos_ids: frozenset[int],
        source: DetokenizerSource,
        arrival: int,
        namespace: Namespace | None = None,
    ) -> None:
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        self.request = request
        self.choice = choice
        self.max_output = max_output
        self.token_ids = list(request.token_ids)
        self.num_prompt = len(request.token_ids)
        self.num_computed = 0
        """Tokens whose K and V stand in the blocks."""
        self.allocation: Allocation | None = None
        """Blocks for its computed tokens; None while it waits."""
        self.namespace = namespace
        self.prompt_chain: PromptChain | None = None
        """Names of its prompt's blocks, when they may be shared."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.stop_ids = stop_ids if sampling.ignore_eos else stop_ids | eos_ids
        self.row = SamplingRow(
            sampling,
            seed=request.seed,
            choice=choice,
            prompt=request.token_ids,
            stop_ids=self.stop_ids,
        )
        self.arrival = arrival
        self._yields = 0
        self._overtakers: set[int] = set()
        """Arrivals of requests that started before it, though they came later."""
        self._end_is_out = False
        """Whether a delta with the finish reason has left."""
        self._logprobs: list[TokenLogprob] | None = (
            None if sampling.logprobs is None else []
        )
        self._output = OutputBuffer(
            source.start(), StopMatcher(sampling.stop) if sampling.stop else None
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next steps must run: 1 in decode, more in prefill."""
        return len(self.token_ids) - self.num_computed

    @property
    def max_tokens_held(self) -> int:
        """Prompt and output tokens at most."""
        return self.num_prompt + self.max_output

    @property
    def is_interactive(self) -> bool:
        """Whether somebody watches its tokens come."""
        return self.request.job_class is JobClass.INTERACTIVE

    @property
    def is_patient(self) -> bool:
        """Whether it has been set back so often that it goes before its class."""
        return self._yields + len(self._overtakers) >= PATIENCE

    @property
    def urgency(self) -> tuple[bool, bool, int, int, int]:
        """Interactive before bulk, always. Within a class what has been set back too
        often, then priority, then arrival.
        """
        patient = self.is_patient
        priority = 0 if patient else self.request.priority
        return (
            not self.is_interactive,
            not patient,
            priority,
            self.arrival,
            self.choice,
        )

    def note_yield(self) -> None:
        """Notes that it had to yield to one of its class.

        Only for a sequence that stands in no sorted list: its urgency may change.
        """
        self._yields += 1

    def note_overtaking(self, arrival: int) -> None:
        """Notes that a later request of its class started before it.

        A request counts once, however many choices it has. As for `note_yield`, the
        urgency may change.

        Args:
            arrival: Of that request.
        """
        self._overtakers.add(arrival)

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Appends an output token and decides whether the output ends with it."""
        may_stop = self.row.may_stop
        self.token_ids.append(token_id)
        self.row.record(token_id)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        if may_stop and token_id in self.stop_ids:
            self._output.push_silent()
            self._finish(FinishReason.STOP, token_id)
            return
        stop = self._output.push(token_id, may_stop=self.row.may_stop)
        if stop is not None:
            self._finish(FinishReason.STOP, stop)
        elif self.row.num_output >= self.max_output:
            self._finish(FinishReason.LENGTH, None)

    def _finish(self, reason: FinishReason, stop: str | int | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop
        self._output.finish(cut=isinstance(stop, str))

    def replay(self, emitted: Emitted) -> None:
        """Takes tokens that an earlier epoch published, without output.

        They pass through penalties, min_tokens, stop matcher and detokenizer like new
        ones, so the next token meets the state that it would have met there.
        """
        logprobs = emitted.logprobs or ()
        for index, token_id in enumerate(emitted.token_ids):
            if self.finish_reason is not None:
                break
            self.accept(token_id, logprobs[index] if index < len(logprobs) else None)
        self._output.mark_published(emitted.text)
        if emitted.finish_reason is not None:
            self.finish_reason = emitted.finish_reason
            self.stop_reason = emitted.stop_reason
            self._end_is_out = True

    def take_delta(self) -> TokenDelta | None:
        """Returns the tokens that have become certain, or None without news."""
        offset = self._output.num_released
        count, text = self._output.release()
        ends = self.finish_reason is not None and not self._end_is_out
        if not count and not text and not ends:
            return None
        self._end_is_out = ends
        start = self.num_prompt + offset
        logprobs = self._logprobs
        return TokenDelta(
            request_id=self.request.id,
            choice=self.choice,
            offset=offset,
            token_ids=tuple(self.token_ids[start : start + count]),
            text=text,
            logprobs=None
            if logprobs is None
            else tuple(logprobs[offset : offset + count]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def outcome(self, reason: FinishReason | None = None) -> FinishedChoice:
        """Returns what has been released, over all epochs.

        Args:
            reason: Why it ended, where the output itself has not.
        """
        count = self._output.num_released
        return FinishedChoice(
            index=self.choice,
            token_ids=tuple(self.token_ids[self.num_prompt : self.num_prompt + count]),
            text=self._output.released_text,
            finish_reason=self.finish_reason or reason or FinishReason.ERROR,
            stop_reason=self.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs[:count]),
        )


def is_same_class(one: Sequence, other: Sequence) -> bool:
    """Whether both are interactive, or both bulk: only then they count each other."""
    return one.is_interactive == other.is_interactive
