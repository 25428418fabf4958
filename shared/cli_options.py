"""Options that commands of the pool's operator have in common."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings file (TOML).")
]
RedisUrl = Annotated[str | None, typer.Option("--url", help="Redis URL of the pool.")]
PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EngineKind = Annotated[
    str, typer.Option(help="model; echo or echo:<ms per step> try the queue alone.")
]
