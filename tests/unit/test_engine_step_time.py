"""The running fit of step time."""

import pytest

from tokenmill.workers.engine.step_time import StepTimeFit


def test_an_exact_line_is_found():
    fit = StepTimeFit()
    for tokens in (1, 16, 200, 512, 4, 30):
        fit.observe(tokens, 12.0 + 0.5 * tokens)
    assert fit.coefficients == pytest.approx((12.0, 0.5), rel=1e-6)


def test_before_any_step_and_with_steps_of_one_size():
    fit = StepTimeFit()
    assert fit.coefficients == (0.0, 0.0)
    for _ in range(3):
        fit.observe(16, 40.0)
    assert fit.coefficients == pytest.approx((40.0, 0.0))


def test_one_stall_hardly_moves_the_fit():
    fit = StepTimeFit()
    for i in range(60):
        fit.observe(1 + i % 20, 10.0 + (1 + i % 20))
    fit.observe(10, 5000.0)
    base, slope = fit.coefficients
    assert base + 10 * slope == pytest.approx(20.0, rel=0.1)


def test_a_stall_of_the_first_step_is_forgotten_with_the_next():
    fit = StepTimeFit()
    fit.observe(4, 5000.0)
    fit.observe(4, 10.0)
    fit.observe(8, 14.0)
    assert fit.coefficients == pytest.approx((6.0, 1.0), rel=1e-6)


def test_the_fit_follows_a_machine_that_becomes_slower():
    fit = StepTimeFit()
    for speed in (1.0, 2.0):
        for i in range(300):
            tokens = 1 + i % 20
            fit.observe(tokens, speed * (10.0 + tokens))
    assert fit.coefficients == pytest.approx((20.0, 2.0), rel=0.02)


def test_neither_coefficient_is_ever_negative():
    falling, steep = StepTimeFit(), StepTimeFit()
    for tokens in range(1, 20):
        falling.observe(tokens, 100.0 - tokens)
        steep.observe(tokens, max(0.0, 3.0 * tokens - 20.0))
    assert falling.coefficients[1] == 0.0
    assert falling.coefficients[0] > 80.0
    assert steep.coefficients[0] == 0.0
    assert steep.coefficients[1] > 0.0
