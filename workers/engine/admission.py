"""What a request must satisfy before the engine takes it. Fails one request alone."""

from ...shared.errors import InvalidRequest, KVPoolExhausted, PromptTooLong
from .batch import ModelRunner
from .kv.manager import KVManager
from .kv.prefix_cache import Namespace
from .request import EngineRequest


def output_limit(request: EngineRequest, max_context: int) -> int:
    """Returns how many output tokens a choice may have: max_tokens or the context.

    Args:
        request: A request that passed `check_request`.
        max_context: Most tokens of prompt plus output.
    """
    return min(request.sampling.max_tokens, max_context - len(request.token_ids))


def namespace_of(request: EngineRequest, runner: ModelRunner) -> Namespace:
    """Returns whom a request may share KV blocks with: those of an equal namespace.

    Args:
        request: The request.
        runner: Its weights; and whether the prompt's length is part of the K and V.
    """
    adapter = request.adapter or ""  # its key names its content
    length = len(request.token_ids) if runner.kv_depends_on_length else None
    return (runner.weights_version, adapter, request.cache_salt, length)


def check_request(request: EngineRequest, runner: ModelRunner, kv: KVManager) -> None:
    """Refuses a request that could not run or would reach beyond the vocabulary.

    Args:
        request: The request.
        runner: The model's limits.
        kv: The KV pool's limits.

    Raises:
        InvalidRequest: A field is wrong.
        PromptTooLong: The prompt leaves no room for output in the context.
        KVPoolExhausted: One choice alone needs more blocks than there are.
    """
    sampling = request.sampling
    prompt = len(request.token_ids)
    if prompt == 0:
        raise InvalidRequest("prompt", "has no tokens; expected at least one")
    if sampling.max_tokens < 1:
        raise InvalidRequest(
            "max_tokens", f"is {sampling.max_tokens}; expected at least 1"
        )
    if sampling.n < 1:
        raise InvalidRequest("n", f"is {sampling.n}; expected at least 1")
    if prompt >= runner.max_context:
        raise PromptTooLong(
            "prompt",
            f"has {prompt} tokens, and prompt plus output may have "
            f"{runner.max_context}; shorten the prompt",
        )
    _check_ids("prompt", request.token_ids, runner.vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, runner.vocab_size)
    _check_ids("logit_bias", tuple(sampling.logit_bias), runner.vocab_size)
    _check_emitted(request, runner.vocab_size)
    tokens = prompt + output_limit(request, runner.max_context)
    if kv.blocks_for(tokens) > kv.total_blocks:
        raise KVPoolExhausted(
            f"{tokens} tokens of prompt and output need {kv.blocks_for(tokens)} KV "
            f"blocks of {kv.block_size} tokens and the pool has {kv.total_blocks}; "
            "lower max_tokens, shorten the prompt, or give the worker more KV memory"
        )


def _check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                field,
                f"names token id {token_id}; the model's ids are 0 to {vocab_size - 1}",
            )


def _check_emitted(request: EngineRequest, vocab_size: int) -> None:
    if len(request.emitted) not in (0, request.sampling.n):
        raise InvalidRequest(
            "emitted",
            f"has {len(request.emitted)} choices; expected none or "
            f"{request.sampling.n}, one per choice",
        )
    for emitted in request.emitted:
        _check_ids("emitted", emitted.token_ids, vocab_size)
