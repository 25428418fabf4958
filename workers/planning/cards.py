"""Well-known cards: memory, and what their vendors state of their speed.

Bandwidth and dense rates are NVIDIA's data sheets' (rates with sparsity halved); memory
is what the driver reports as the device's own, which is less than the name says.
Links are one way: half of the two-way figure of NVLink, and what PCIe gives in practice
for cards without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from ...shared.errors import ConfigError
from ...shared.typed import shown

GIB: Final = 1024**3
_PCIE_4: Final = 25e9
"""Bytes a second of 16 lanes of PCIe 4.0 one way, of 32 GB/s in theory."""
_PCIE_3: Final = 12e9
_PCIE_5: Final = 50e9
_NVLINK_LATENCY_S: Final = 10e-6
"""Of one small all-reduce, launch included: an assumption."""
_PCIE_LATENCY_S: Final = 30e-6
"""The same over the host's bus."""
_WITHOUT_BFLOAT16: Final = {
    "bfloat16": "cards before compute capability 8.0 compute it in software"
}
PER_NODE: Final = 8
"""Cards that one host has, unless said otherwise."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or a host that computes by itself."""

    name: str
    memory_bytes: int
    bandwidth: float
    """Bytes a second of its memory."""
    tflops: Mapping[str, float]
    """Dense 10^12 operations a second by type of the product: float32, half, int8.
    One multiply-add is two operations."""
    link: float
    """Bytes a second one way between cards of a host."""
    link_latency_s: float
    """Of one small all-reduce."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, where known."""
    is_host: bool = False
    """A CPU with the host's memory: ranks share it."""
    unfit: Mapping[str, str] = {}
    """Precisions of weights that it computes badly, and why."""


def _nvidia(
    name: str,
    capability: tuple[int, int],
    gib: float,
    gb_per_s: float,
    tflops: tuple[float, float, float],
    nvlink_gb_per_s: float = 0.0,
    bus: float = _PCIE_4,
) -> Card:
    """Makes a card; `tflops` are float32, half and INT8, NVLink's rate is two-way."""
    has_link = nvlink_gb_per_s > 0
    return Card(
        name=name,
        memory_bytes=int(gib * GIB),
        bandwidth=gb_per_s * 1e9,
        tflops=dict(zip(("float32", "half", "int8"), tflops, strict=True)),
        link=nvlink_gb_per_s * 1e9 / 2 if has_link else bus,
        link_latency_s=_NVLINK_LATENCY_S if has_link else _PCIE_LATENCY_S,
        capability=capability,
        unfit={} if capability >= (8, 0) else _WITHOUT_BFLOAT16,
    )


CARDS: Final[Mapping[str, Card]] = {
    card.name: card
    for card in (
        # NVIDIA A100 Tensor Core GPU data sheet (SXM and PCIe columns).
        _nvidia("A100-40G", (8, 0), 39.4, 1555, (19.5, 312, 624), 600),
        _nvidia("A100-80G", (8, 0), 79.2, 2039, (19.5, 312, 624), 600),
        _nvidia("A100-PCIE-80G", (8, 0), 79.2, 1935, (19.5, 312, 624)),
        # NVIDIA H100 and H200 Tensor Core GPU data sheets.
        _nvidia("H100", (9, 0), 79.1, 3350, (67, 989, 1979), 900),
        _nvidia("H100-PCIE", (9, 0), 79.1, 2000, (51, 756, 1513), bus=_PCIE_5),
        _nvidia("H200", (9, 0), 139.7, 4800, (67, 989, 1979), 900),
        # NVIDIA L4, L40S, A10, A30 and A40 data sheets.
        _nvidia("L4", (8, 9), 22.0, 300, (30.3, 121, 242)),
        _nvidia("L40S", (8, 9), 44.4, 864, (91.6, 362, 733)),
        _nvidia("A10", (8, 6), 22.0, 600, (31.2, 125, 250)),
        _nvidia("A30", (8, 0), 23.5, 933, (10.3, 165, 330)),
        _nvidia("A40", (8, 6), 44.4, 696, (37.4, 149.7, 299.3)),
        # NVIDIA Ada and Ampere GA102 architecture papers (float32 accumulation).
        _nvidia("RTX-4090", (8, 9), 23.6, 1008, (82.6, 165.2, 660.6)),
        _nvidia("RTX-3090", (8, 6), 23.7, 936, (35.6, 71, 284)),
        # NVIDIA T4 and V100 data sheets; a V100 has no integer tensor cores (dp4a).
        _nvidia("T4", (7, 5), 14.6, 320, (8.1, 65, 130), bus=_PCIE_3),
        _nvidia("V100-16G", (7, 0), 15.8, 900, (15.7, 125, 62.8), 300),
        _nvidia("V100-32G", (7, 0), 31.7, 900, (15.7, 125, 62.8), 300),
    )
}
"""By name."""
HOST: Final = "cpu"
"""Stands for a host such as this one."""
_EXTRA: Final = re.compile(r"(NVIDIA|TESLA|GEFORCE|SXM\d?|HBM\d?E?)$")
"""What sellers and nvidia-smi add to a card's name."""
_SIZE: Final = re.compile(r"(\d{2,3})GI?B?")
MOST_CARDS: Final = 999_999
"""Of a fleet."""
_DIGITS: Final = 7
_FLEET: Final = re.compile(r"\s*(?:([0-9]+)\s*[xX*\u00d7]\s*)?([A-Za-z][^,]*?)\s*")


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Cards that are there for one model."""

    card: Card
    count: int
    per_node: int = PER_NODE
    """Cards of one host: tensor parallelism stays within it."""

    @property
    def nodes(self) -> int:
        """Hosts that they stand in."""
        return -(-self.count // self.per_node)

    def replicas(self, tp: int) -> int:
        """Returns how many groups of `tp` cards there are, each within one host."""
        full, rest = divmod(self.count, self.per_node)
        return full * (self.per_node // tp) + rest // tp


def parse_fleet(text: str) -> tuple[int, str]:
    """Reads "8xA100-80G": how many, and the card's name as given.

    Raises:
        ConfigError: Not of that form.
    """
    found = _FLEET.fullmatch(text)
    # Python reads no number of thousands of digits.
    digits = (found[1] or "1").lstrip("0")[:_DIGITS] if found else ""
    if found is None or not 1 <= int(digits or 0) <= MOST_CARDS:
        raise ConfigError(
            "gpus",
            f"value {shown(text)}; expected a number from 1 to {MOST_CARDS:,} and one "
            "kind of card, as 8xA100-80G, 4xL4 or cpu",
            "command line",
        )
    return int(digits), found[2]


def known_card(name: str) -> Card | None:
    """Returns a card of the table, however it is spelt; None if it is not there.

    Args:
        name: As people, sellers or nvidia-smi write it. A size of memory that the
            table's name leaves out must be the card's.
    """
    base, size = _words(name)
    for card in CARDS.values():
        own_base, own_size = _words(card.name)
        if base != own_base:
            continue
        if size == own_size or (own_size is None and _holds(card, size)):
            return card
    return None


def _holds(card: Card, size: int | None) -> bool:
    """Whether a card may be sold as one of so many GB: its driver reports less."""
    whole = (size or 0) * GIB
    return 0.85 * whole < card.memory_bytes <= whole


def unknown_card(name: str) -> ConfigError:
    """Returns the error for a card that is neither in the table nor described."""
    begin = _words(name)[0][:4]
    near = [card for card in CARDS if begin and _words(card)[0].startswith(begin)]
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return ConfigError(
        "gpus",
        f"card {name!r} is not known{hint}; known are {', '.join(CARDS)} and "
        f"{HOST}; for another give --card-memory-gb, --bandwidth-gb-s and --tflops",
        "command line",
    )


def _words(name: str) -> tuple[str, int | None]:
    """Returns a name without size, makers and sockets, and the size in GB if it is
    there.
    """
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]
    sizes = [int(found[1]) for word in words if (found := _SIZE.fullmatch(word))]
    kept = (word for word in words if not (_SIZE.fullmatch(word) or _EXTRA.match(word)))
    return "".join(kept), sizes[0] if sizes else None
