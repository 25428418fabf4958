"""Runs an engine to its end and checks the stream that comes out."""

from collections import defaultdict

from tokenmill.shared.messages import Sampling
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import Emitted, EngineRequest, Finished

from .fake_runner import EOS, context_logits


def request(name: str, prompt, *, seed: int = 7, emitted=(), **sampling):
    """A request with a short default length."""
    sampling.setdefault("max_tokens", 8)
    return EngineRequest(
        id=name,
        token_ids=tuple(prompt),
        sampling=Sampling(**sampling),
        seed=seed,
        emitted=tuple(emitted),
    )


class Stream:
    """Everything that came out, joined; joining asserts that offsets are gapless."""

    def __init__(self) -> None:
        self.token_ids = defaultdict(list)
        self.text = defaultdict(str)
        self.logprobs = defaultdict(list)
        self.reasons = {}
        self.stop_reasons = {}
        self.finished: dict[str, Finished] = {}
        self.deltas = []

    def resume_at(self, name: str, emitted) -> None:
        """Starts a request's choices after what an earlier stream holds."""
        for choice, one in enumerate(emitted):
            self.token_ids[name, choice] = list(one.token_ids)
            self.text[name, choice] = one.text
            self.logprobs[name, choice] = list(one.logprobs or ())
            if one.finish_reason is not None:
                self.reasons[name, choice] = one.finish_reason

    def take(self, output) -> None:
        for delta in output.deltas:
            key = (delta.request_id, delta.choice)
            assert delta.offset == len(self.token_ids[key]), "gap or repeat"
            assert key not in self.reasons, "output after the end"
            assert delta.request_id not in self.finished
            self.deltas.append(delta)
            self.token_ids[key] += delta.token_ids
            self.text[key] += delta.text
            if delta.logprobs is not None:
                assert len(delta.logprobs) == len(delta.token_ids)
                self.logprobs[key] += delta.logprobs
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason
                self.stop_reasons[key] = delta.stop_reason
        for finished in output.finished:
            assert finished.request_id not in self.finished
            self.finished[finished.request_id] = finished
            for choice in finished.choices:
                key = (finished.request_id, choice.index)
                assert choice.token_ids == tuple(self.token_ids[key])
                assert choice.text == self.text[key]
                assert choice.finish_reason == self.reasons[key]
                assert (choice.logprobs or ()) == tuple(self.logprobs[key])

    def emitted(self, name: str, choices: int = 1) -> tuple[Emitted, ...]:
        """What a worker that takes over would find in the log."""
        return tuple(
            Emitted(
                token_ids=tuple(self.token_ids[name, choice]),
                text=self.text[name, choice],
                logprobs=tuple(self.logprobs[name, choice]) or None,
                finish_reason=self.reasons.get((name, choice)),
                stop_reason=self.stop_reasons.get((name, choice)),
            )
            for choice in range(choices)
        )


def drain(engine: Engine, stream: Stream | None = None, *, steps: int = 2000) -> Stream:
    """Steps until nothing is left, with the KV books checked after every step."""
    stream = stream or Stream()
    while engine.has_work:
        steps -= 1
        assert steps >= 0, "the engine makes no progress"
        stream.take(engine.step())
        engine.check_integrity()
    assert engine.capacity().free_blocks == engine.capacity().total_blocks, "leak"
    return stream


def greedy_oracle(prompt, count: int, *, eos: int | None = EOS) -> list[int]:
    """The tokens that follow a prompt, from the fake model's definition alone."""
    context = list(prompt)
    for _ in range(count):
        context.append(int(context_logits(context).argmax()))
        if context[-1] == eos:
            break
    return context[len(prompt) :]
