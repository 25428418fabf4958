"""Random traffic: the engine gives what each request would get alone."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_driver import Stream, drain, greedy_oracle, request
from support.fake_runner import EOS, FakeRunner

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import EngineRequest

TABLE = TokenTable(
    tuple((b"\xc3", b"\xa9", b"a", b"b", b"c ")[i % 5] for i in range(97))
)
"""Few different texts, so that stop strings match and characters are split."""

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 95), min_size=1, max_size=24),
        "max_tokens": st.integers(1, 12),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "temperature": st.sampled_from([0.0, 0.0, 1.0, 3.0]),
        "top_k": st.sampled_from([None, None, 10]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "n": st.sampled_from([1, 1, 1, 3]),
        "stop": st.sampled_from([(), (), ("ab",), ("éa", "c c")]),
        "logprobs": st.sampled_from([None, None, 2]),
        "seed": st.integers(0, 3),
    }
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), REQUESTS),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("abort"), st.just(None)),
        st.tuples(st.just("move"), st.integers(0, 9)),
    ),
    max_size=24,
)


def engine_of(chunk: int, blocks: int, running: int, block_size: int) -> Engine:
    runner = FakeRunner(num_blocks=blocks, block_size=block_size, max_context=64)
    return Engine(runner, TABLE, prefill_chunk=chunk, max_running=running)


def alone(wanted: EngineRequest):
    """What the request gives in an engine of its own, in one prefill."""
    engine = engine_of(512, 64, 16, 8)
    engine.add(wanted)
    return drain(engine).finished[wanted.id].choices


def made(index: int, fields: dict) -> EngineRequest:
    fields = dict(fields)
    fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
    return request(str(index), fields.pop("prompt"), seed=fields.pop("seed"), **fields)


class Traffic:
    """An engine under a script of events."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stream = Stream()
        self.sent: dict[str, EngineRequest] = {}
        self.dropped: set[str] = set()

    def here(self, index: int) -> str | None:
        """One of the requests that are neither finished nor dropped."""
        live = [
            n for n in self.sent if n not in self.dropped | set(self.stream.finished)
        ]
        return live[index % len(live)] if live else None

    def add(self, fields: dict) -> None:
        wanted = made(len(self.sent), fields)
        self.sent[wanted.id] = wanted
        self.engine.add(wanted)

    def step(self, count: int) -> None:
        for _ in range(count):
            output = self.engine.step()
            assert not {f.request_id for f in output.finished} & self.dropped
            self.stream.take(output)
            self.engine.check_integrity()

    def cancel(self, index: int) -> None:
        name = self.here(index)
        if name is not None:
            assert self.engine.cancel(name)
            self.dropped.add(name)

    def abort(self, _: None) -> None:
        self.dropped |= set(self.engine.abort_all())

    def move(self, index: int) -> None:
        """Takes a request out and resumes it from what has been published."""
        name = self.here(index)
        if name is None:
            return
        wanted = self.sent[name]
        assert self.engine.cancel(name)
        self.engine.add(
            EngineRequest(
                id=name,
                token_ids=wanted.token_ids,
                sampling=wanted.sampling,
                seed=wanted.seed,
                emitted=self.stream.emitted(name, wanted.sampling.n),
            )
        )


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS,
    chunk=st.sampled_from([1, 3, 8, 64]),
    blocks=st.sampled_from([12, 40]),
    running=st.sampled_from([1, 4, 16]),
    block_size=st.sampled_from([4, 8]),
)
def test_any_traffic_gives_each_request_its_own_output(
    events, chunk, blocks, running, block_size
):
    traffic = Traffic(engine_of(chunk, blocks, running, block_size))
    for name, argument in events:
        getattr(traffic, name)(argument)
    drain(traffic.engine, traffic.stream)
    assert traffic.stream.finished.keys() == traffic.sent.keys() - traffic.dropped
    for name, finished in traffic.stream.finished.items():
        assert finished.choices == alone(traffic.sent[name])


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 95), min_size=1, max_size=40),
    count=st.integers(1, 20),
    chunk=st.integers(1, 50),
    block_size=st.sampled_from([1, 3, 8]),
)
def test_greedy_output_is_the_models_for_any_chunk_and_block(
    prompt, count, chunk, block_size
):
    engine = engine_of(chunk, 64, 4, block_size)
    engine.add(request("a", prompt, max_tokens=count))
    stream = drain(engine)
    expected = greedy_oracle(prompt, count, eos=EOS)
    assert stream.token_ids["a", 0] == expected
