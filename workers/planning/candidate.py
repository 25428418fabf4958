"""One way to run a model on a fleet: its memory, its times, or what is against it."""

from __future__ import annotations

from typing import Final

import msgspec

from ..engine.model.advice import KV_LOSS, WEIGHTS_LOSS
from ..engine.model.budget import MIB
from .ask import Ask
from .memory import MemoryTable, Use, memory_table
from .pace import Replica, StepTime
from .parameters import kv_bytes_per_token
from .service import Service

_RUNNING: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WORTH: Final = 1.03
"""More sequences must raise throughput so much to be worth their memory."""
_PATIENCE: Final = 3
"""Numbers of sequences in a row that may serve no more before the next is not tried:
where the engine halves a chunk, throughput dips and rises again."""
_CHUNKS: Final = (2048, 1024, 512, 256, 128)
_LEAST_CHUNK: Final = 64
_PAUSE_PART: Final = 0.1
"""Of the target: a chunk takes no longer, since running streams pause for it."""
_SPARE: Final = 1.25
"""KV blocks over those of all sequences, at least, where there is room."""
_WINDOW_PART: Final = 0.05
"""Of the target that waiting for a fuller batch may take."""
_LONGEST_WINDOW_MS: Final = 200


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model, with its figures."""

    weights: str
    kv: str
    tp: int
    replicas: int
    running: int
    """`worker.max_running`."""
    prefill_chunk: int
    kv_blocks: int
    """In the pool of each rank."""
    kv_memory_mb: int
    """`worker.kv_memory_mb` that gives so many blocks, of all ranks together."""
    max_wait_ms: int
    """`scheduler.max_wait_ms`."""
    loss_percent: float
    """Expected perplexity over float32, an upper bound."""
    memory: MemoryTable
    step_ms: float
    """A decode step with all slots taken."""
    collective_ms: float
    """Of it, waiting for other ranks."""
    step_parts: StepTime
    """The same in seconds, by what they are spent on."""
    first_token_ms: float
    """Of a prompt that finds a slot while all others are taken."""
    alone_ms: float
    """A request that runs alone."""
    full_ms: float
    """A request with all slots taken."""
    rate: float
    """Requests a second that keep the target, over all replicas."""
    p99_ms: float | None = None
    """At the rate that was asked."""
    limit: str = ""
    """Why there are not more sequences at once."""

    @property
    def cards(self) -> int:
        """Devices in use."""
        return self.tp * self.replicas


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model, and the number that speaks against it."""

    weights: str
    kv: str
    tp: int
    reason: str
    short_bytes: int = 0
    """Of memory, on each device."""
    alone_ms: float = 0.0
    """A request that runs alone, where that is too long."""

    @property
    def loss_percent(self) -> float:
        """Expected perplexity over float32, an upper bound."""
        return WEIGHTS_LOSS[self.weights] + KV_LOSS.get(self.kv, 0.0)


def evaluate(ask: Ask, weights: str, kv: str, tp: int) -> Choice | Refused:
    """Finds the best number of sequences for a precision and a degree.

    Args:
        ask: What is wanted.
        weights: Precision.
        kv: Of the pool.
        tp: Ranks of a replica.
    """
    candidate = _Candidate(ask, weights, kv, tp)
    best: Choice | None = None
    problem, limit, idle = candidate.refused("nothing was asked of it"), "", 0
    for running in (ask.running,) if ask.running else _RUNNING:
        service = candidate.service(running)
        found = candidate.objection(service)
        if found is not None:
            problem, limit = found, f"{running} would not do: {found.reason}"
            break
        rate = candidate.rate(service)
        if best is None or rate >= _WORTH * best.rate:
            best, idle = candidate.choice(service, rate), 0
            continue
        idle += 1
        if idle == _PATIENCE:
            break
    if best is None:
        return problem
    if idle or not limit:
        limit = "as asked" if ask.running else "more would serve hardly more"
    return msgspec.structs.replace(best, limit=limit)


def blocks_needed(ask: Ask, running: int) -> int:
    """Returns the KV blocks of so many whole requests."""
    return running * -(-ask.request.tokens // ask.block_size)


class _Candidate:
    """A precision and a degree on the asked fleet."""

    def __init__(self, ask: Ask, weights: str, kv: str, tp: int) -> None:
        self._ask = ask
        self._weights, self._kv, self._tp = weights, kv, tp
        self._replica = Replica(
            shape=ask.shape, card=ask.fleet.card, weights=weights, kv=kv, tp=tp
        )

    def service(self, running: int) -> Service:
        """Returns the replicas with so many sequences each."""
        return Service(
            self._replica,
            self._ask.request,
            running=running,
            chunk=self._chunk(),
            replicas=self._ask.fleet.replicas(self._tp),
            window_s=self._window_ms() / 1000,
        )

    def objection(self, service: Service) -> Refused | None:
        """Returns what speaks against so many sequences, with its number."""
        ask, running = self._ask, service.running
        table = self._memory(running, blocks_needed(ask, running))
        if table.free < 0:
            return self.refused(
                f"{running} sequence{'s' * (running > 1)} of {ask.request.tokens} "
                f"tokens need {gib(table.device - table.free)} GiB with what stays "
                f"free, {gib(table.device)} are there",
                short_bytes=-table.free,
            )
        alone = 1000 * (service.wait_s + service.life_s(1))
        if ask.slo_ms is not None and alone > ask.slo_ms:
            return self.refused(
                f"a request alone takes about {alone:.0f} ms, the target is "
                f"{ask.slo_ms:.0f} ms",
                alone_ms=alone,
            )
        return None

    def rate(self, service: Service) -> float:
        """Returns the requests a second that keep the target."""
        slo_ms = self._ask.slo_ms
        return service.sustained(None if slo_ms is None else slo_ms / 1000)

    def choice(self, service: Service, rate: float) -> Choice:
        """Returns all figures of what was found."""
        ask, running = self._ask, service.running
        blocks = self._pool(running)
        step = self._replica.step(running, ask.request.tokens)
        at_rate = None
        if ask.rate is not None and ask.rate < service.most:
            at_rate = 1000 * service.p99_s(ask.rate)
        block = kv_bytes_per_token(ask.shape, self._kv, self._tp) * ask.block_size
        return Choice(
            weights=self._weights,
            kv=self._kv,
            tp=self._tp,
            replicas=service.replicas,
            running=running,
            prefill_chunk=self._chunk(),
            kv_blocks=blocks,
            kv_memory_mb=self._tp * -(-blocks * block // MIB),
            max_wait_ms=self._window_ms(),
            loss_percent=WEIGHTS_LOSS[self._weights] + KV_LOSS[self._kv],
            memory=self._memory(running, blocks),
            step_ms=1000 * step.total,
            collective_ms=1000 * step.collective,
            step_parts=step,
            first_token_ms=1000 * service.first_token_s(running),
            alone_ms=1000 * service.life_s(1),
            full_ms=1000 * service.full_s,
            rate=rate,
            p99_ms=at_rate,
        )

    def refused(
        self, reason: str, *, short_bytes: int = 0, alone_ms: float = 0.0
    ) -> Refused:
        """Returns this way with what speaks against it."""
        return Refused(
            weights=self._weights,
            kv=self._kv,
            tp=self._tp,
            reason=reason,
            short_bytes=short_bytes,
            alone_ms=alone_ms,
        )

    def _memory(self, running: int, blocks: int) -> MemoryTable:
        use = Use(
            weights=self._weights,
            kv=self._kv,
            tp=self._tp,
            num_blocks=blocks,
            block_size=self._ask.block_size,
            step_tokens=running + self._chunk(),
            rows=running,
        )
        return memory_table(self._ask.shape, self._ask.fleet.card, use)

    def _pool(self, running: int) -> int:
        """Returns the blocks of a pool: those needed, and where there is room a
        sequence of the model's whole context; on a card, which nobody else uses, one in
        every slot, on a host within a quarter of what is left. What requests leave over
        keeps prefixes.
        """
        shape, size = self._ask.shape, self._ask.block_size
        needed = blocks_needed(self._ask, running)
        left = self._memory(running, needed).free
        more = left // (kv_bytes_per_token(shape, self._kv, self._tp) * size)
        longest = -(-shape.context // size)
        long = running * longest
        if self._ask.fleet.card.is_host:
            long = min(longest, needed + more // 4)
        wanted = max(int(needed * _SPARE), needed + 1, long)
        return min(wanted, needed + more)

    def _chunk(self) -> int:
        """Returns the prompt tokens of a step: as many as keep reading the weights
        from being what takes longest, few enough that streams do not pause for long.
        """
        ask, step = self._ask, self._replica.step
        seen = ask.request.prompt // 2
        balance = next(
            (
                chunk
                for chunk in reversed(_CHUNKS)
                if step(0, 0, chunk, seen).compute >= step(0, 0, chunk, seen).memory
            ),
            _CHUNKS[0],
        )
        chunk = max(512, balance)
        if ask.slo_ms is not None:
            most = _PAUSE_PART * ask.slo_ms / 1000
            while chunk > _LEAST_CHUNK and step(0, 0, chunk, seen).total > most:
                chunk //= 2
        return chunk

    def _window_ms(self) -> int:
        if self._ask.slo_ms is None:
            return _LONGEST_WINDOW_MS
        part = int(_WINDOW_PART * self._ask.slo_ms)
        return max(1, min(_LONGEST_WINDOW_MS, part))


def gib(size: float) -> str:
    """Returns bytes as GiB for people."""
    value = size / 1024**3
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def per_second(rate: float) -> str:
    """Returns requests a second for people: three digits, and 1,000 as such."""
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:,.0f}"
