"""The device, what it can do at most, and how long a call takes on it."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from tokenmill.workers.engine.model.gpu.linear import torch_matmul

PEAKS: dict[str, tuple[float, float, float]] = {
    "H200": (4800, 989, 1979),
    "H100": (3350, 989, 1979),
    "A100": (2039, 312, 624),
    "L40": (864, 181, 362),
    "L4": (300, 121, 242),
    "A10": (600, 125, 250),
    "RTX 4090": (1008, 165, 661),
    "RTX 3090": (936, 71, 284),
}
"""By part of the name: GB/s, dense float16 and INT8 rates in 10^12 operations a second,
as the vendor states them. A device that is not listed is measured."""
RUNS = 15


class Clock:
    """Times calls on a device.

    Args:
        device: CUDA, or a CPU whose kernels are interpreted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Returns the median time of a call, after some that compile and warm up."""
        if self.device.type != "cuda":
            return self._once(run)
        for _ in range(3):
            run()
        times: list[float] = []
        for _ in range(RUNS):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def _once(self, run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        self.wait()
        return (time.perf_counter() - began) * 1e3


def device_of(facts: dict[str, object]) -> torch.device:
    """Returns where the stages run."""
    return torch.device("cpu" if facts["smoke"] else "cuda")


def stage(facts: dict[str, object], _deadline: float) -> Iterator[dict[str, object]]:
    """Yields the device's name and rates, stated or measured.

    Raises:
        SystemExit: There is no CUDA device.
    """
    if facts["smoke"]:
        yield {
            "what": "interpreter",
            "gb_per_s": 10.0,
            "half_tera": 0.05,
            "int8_tera": 0.05,
            "rates": "made up: nothing is measured on a CPU",
        }
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no CUDA device; install a CUDA build")
    import triton

    properties = torch.cuda.get_device_properties(0)
    measured = _measured(Clock(torch.device("cuda")))
    known = next((v for k, v in PEAKS.items() if k in properties.name), None)
    rates = known or measured
    yield {
        "what": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gb_per_s": rates[0],
        "half_tera": rates[1],
        "int8_tera": rates[2],
        "rates": "stated" if known else "measured",
        "measured_gb_per_s": measured[0],
        "measured_half_tera": measured[1],
        "measured_int8_tera": measured[2],
    }


def _measured(clock: Clock) -> tuple[float, float, float]:
    """Returns GB/s of a copy, and rates of a float16 and of an INT8 product."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / clock.milliseconds(lambda: target.copy_(source)) / 1e6
    size = 8192
    half = torch.randn(size, size, device="cuda", dtype=torch.float16)
    whole = torch.ones(size, size, device="cuda", dtype=torch.int8)
    tera = 2 * size**3 / 1e9  # per millisecond
    products = clock.milliseconds(lambda: half @ half)
    integers = clock.milliseconds(lambda: torch_matmul(whole, whole))
    return copied, tera / products, tera / integers
