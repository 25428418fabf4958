"""The health run: a version's checks, made with its engine before anyone is served.

It runs in the thread that loaded the model, while the engine is idle and nobody knows
of this worker yet.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..shared.errors import TokenmillError
from ..shared.health_set import (
    MOST_FAILURES,
    HealthCheck,
    HealthReport,
    HealthSet,
)
from ..shared.messages import JobRequest, ModelCard, Sampling
from ..shared.tokens import BYTES, Tokenizer, load_tokenizer
from ..shared.validate import validate_request
from .engine.request import EngineRequest, Finished
from .engine_thread import EngineLike
from .health_answer import problem_of, problem_of_text
from .health_perplexity import token_losses

if TYPE_CHECKING:
    from .engine.batch import ModelRunner
    from .loading import Loaded

LONGEST_S: Final = 600.0
"""A set that takes longer has failed."""
_SALT: Final = "\0health"
"""No tenant is named so: nobody shares a cached prefix with a check."""


def run_health_set(checks: HealthSet, loaded: "Loaded", group: str) -> HealthReport:
    """Makes all checks of a set.

    Args:
        checks: The set.
        loaded: The model; its engine has had no request yet.
        group: Of this worker, for the report.
    """
    began = time.monotonic()
    tokenizer = load_tokenizer(BYTES if loaded.bundle is None else loaded.bundle)
    # Texts first: they write into KV blocks that no prefix is remembered of yet.
    texts = [check for check in checks.checks if check.text is not None]
    prompts = [check for check in checks.checks if check.text is None]
    failures, perplexity = _read_texts(texts, tokenizer, loaded)
    failures += _answer(prompts, tokenizer, loaded.card, loaded.engine, began)
    failures.sort()
    return HealthReport(
        passed=not failures,
        num_checks=len(checks.checks),
        num_failed=len(failures),
        failures=tuple(
            f"line {line}: {problem}" for line, problem in failures[:MOST_FAILURES]
        ),
        perplexity=perplexity,
        took_ms=round((time.monotonic() - began) * 1000.0, 1),
        group=group,
    )


_Failure = tuple[int, str]
"""Line of the file, and what is wrong."""


# --- perplexity -----------------------------------------------------------------------
def _read_texts(
    checks: Sequence[HealthCheck], tokenizer: Tokenizer, loaded: "Loaded"
) -> tuple[list[_Failure], float | None]:
    if not checks:
        return [], None
    runner = loaded.runner
    if runner is None:
        problem = "this engine knows no probabilities, so no perplexity"
        return [(check.line, problem) for check in checks], None
    failures: list[_Failure] = []
    total, count = 0.0, 0
    for check in checks:
        try:
            losses = _losses(check, tokenizer, loaded.card, runner)
        except TokenmillError as error:
            failures.append((check.line, str(error)))
            continue
        total, count = total + math.fsum(losses), count + len(losses)
        found = _perplexity(math.fsum(losses), len(losses))
        if (wrong := problem_of_text(check, found)) is not None:
            failures.append((check.line, wrong))
    return failures, _perplexity(total, count) if count else None


def _losses(
    check: HealthCheck, tokenizer: Tokenizer, card: ModelCard, runner: "ModelRunner"
) -> list[float]:
    request = JobRequest(text=check.text, control_tokens="as_text")
    ids = tokenizer.encode_request(request, card.max_context)
    return token_losses(runner, ids)


def _perplexity(total: float, count: int) -> float:
    return math.exp(min(total / count, 700.0)) if math.isfinite(total) else math.inf


# --- outputs --------------------------------------------------------------------------
def _answer(
    checks: Sequence[HealthCheck],
    tokenizer: Tokenizer,
    card: ModelCard,
    engine: EngineLike,
    began: float,
) -> list[_Failure]:
    failures: list[_Failure] = []
    open_checks: dict[str, HealthCheck] = {}
    for check in checks:
        request_id = f"health-{check.line}"
        try:
            engine.add(_engine_request(request_id, check, tokenizer, card))
        except TokenmillError as error:
            failures.append((check.line, str(error)))
        else:
            open_checks[request_id] = check
    while open_checks and engine.has_work:
        if time.monotonic() - began > LONGEST_S:
            break
        for finished in engine.step().finished:
            check = open_checks.pop(finished.request_id)
            problem = _problem(check, finished)
            if problem is not None:
                failures.append((check.line, problem))
    for request_id, check in open_checks.items():
        engine.cancel(request_id)
        failures.append((check.line, f"no end of its output within {LONGEST_S:g} s"))
    return failures


def _engine_request(
    request_id: str, check: HealthCheck, tokenizer: Tokenizer, card: ModelCard
) -> EngineRequest:
    request = JobRequest(
        text=check.prompt,
        messages=check.messages,
        sampling=Sampling(max_tokens=check.max_tokens, seed=0),
    )
    validate_request(request, card)
    return EngineRequest(
        id=request_id,
        token_ids=tuple(tokenizer.encode_request(request, card.max_context)),
        sampling=request.sampling,
        seed=0,
        cache_salt=_SALT,
    )


def _problem(check: HealthCheck, finished: Finished) -> str | None:
    if finished.error is not None:
        return f"[{finished.error.code}] {finished.error.message}"
    return problem_of(check, finished.choices[0].text)
