"""A model that raises: the request that makes it raise ends, and no other."""

import pytest
from support.engine_driver import drain, greedy_oracle, request
from support.fake_runner import FakeRunner

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine


class RaisesFor(FakeRunner):
    """A model that raises when one of some tokens is in the step."""

    def __init__(self, *guilty: int) -> None:
        super().__init__(num_blocks=200)
        self.guilty = frozenset(guilty)
        self.raised = 0

    def run(self, batch):
        if not self.guilty.isdisjoint(batch.token_ids.tolist()):
            self.raised += 1
            raise ValueError("index out of range")
        return super().run(batch)


def good_prompts(guilty: int, count: int) -> list[list[int]]:
    """Prompts whose outputs stay clear of a token."""
    prompts = ([5 + i, 6] for i in range(60))
    kept = [p for p in prompts if guilty not in [*p, *greedy_oracle(p, 8)]]
    assert len(kept) >= count
    return kept[:count]


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_request_that_makes_the_model_raise_ends_alone(place):
    runner = RaisesFor(88)
    engine = Engine(runner, TokenTable.for_bytes(), step_target_ms=0.0)
    prompts = good_prompts(88, 6)
    for index, prompt in enumerate([*prompts[:place], [3, 88, 4], *prompts[place:]]):
        engine.add(request(f"r{index}", prompt))
    stream = drain(engine)
    error = stream.finished[f"r{place}"].error
    assert error is not None
    assert "index out of range" in error.message
    good = [f"r{index}" for index in range(7) if index != place]
    for name, prompt in zip(good, prompts, strict=True):
        assert stream.finished[name].error is None
        assert stream.token_ids[name, 0] == greedy_oracle(prompt, 8)
    assert runner.raised <= 12, "halves find it, not one by one for ever"
    engine.check_integrity()


def test_two_of_them_in_one_step_both_end_and_nobody_else():
    engine = Engine(RaisesFor(88, 89), TokenTable.for_bytes(), step_target_ms=0.0)
    prompt = good_prompts(88, 1)[0]
    engine.add(request("one", [3, 88]))
    engine.add(request("other", [4, 89]))
    engine.add(request("good", prompt))
    stream = drain(engine)
    assert stream.finished["one"].error is not None
    assert stream.finished["other"].error is not None
    assert stream.token_ids["good", 0] == greedy_oracle(prompt, 8)


def test_a_model_that_raises_for_everybody_convicts_nobody():
    runner = FakeRunner(num_blocks=200)
    engine = Engine(runner, TokenTable.for_bytes(), step_target_ms=0.0)
    for index in range(3):
        engine.add(request(f"r{index}", [5 + index, 6]))
    runner.fail = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    runner.fail = None
    stream = drain(engine)
    assert len(stream.finished) == 3
    assert all(one.error is None for one in stream.finished.values())


def test_a_lost_device_after_an_old_accusation_convicts_nobody():
    runner = RaisesFor(88)
    engine = Engine(runner, TokenTable.for_bytes(), step_target_ms=0.0)
    prompts = good_prompts(88, 4)
    engine.add(request("bad", [3, 88]))
    for index, prompt in enumerate(prompts[:2]):
        engine.add(request(f"r{index}", prompt))
    runner.guilty = frozenset(range(97))  # all of them raise: all are accused
    with pytest.raises(ValueError, match="out of range"):
        engine.step()
    runner.guilty = frozenset()
    engine.cancel("bad")
    drain(engine)
    for index, prompt in enumerate(prompts[2:]):
        engine.add(request(f"late{index}", prompt))
    runner.fail = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
