"""A host with a keeper of versions whose workers are only played."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from support.shard_client import KEYS

from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import ConfigError
from tokenmill.shared.pool.output import Output
from tokenmill.shared.pool.processes import Child, ChildSpec, ChildState
from tokenmill.shared.pool.versions import VersionKeeper

MODEL = KEYS.model
SETTINGS = ModelConfig(name=MODEL)


class Host:
    """A keeper and the workers that it has, none of which is a process."""

    def __init__(self, client, directory: Path, name: str = "here") -> None:
        self.output = Output(directory, lambda *_: None, logs_too=False)
        self.plan_fails = False
        self.hired: list[Child] = []
        self.gone: list[Child] = []
        self.dismissal = asyncio.Event()
        self.dismissal.set()
        self.keeper = VersionKeeper(client, self, self.planned, [SETTINGS], 1, name)

    def planned(self, model: ModelConfig) -> list[ChildSpec]:
        if self.plan_fails:
            raise ConfigError("models", "it cannot be placed here")
        return [ChildSpec(name=f"w-{model.version}", command=(), env=dict)]

    def employ(self, specs: Sequence[ChildSpec]) -> list[Child]:
        made = [Child(spec, self.output, lambda _: None) for spec in specs]
        self.hired += made
        return made

    async def dismiss(self, children: Sequence[Child]) -> None:
        if children:
            await self.dismissal.wait()
        self.gone += children

    def last_words(self, _name: str) -> list[str]:
        return ["error: it does not load"]

    def fail(self) -> None:
        """Its newest worker does not load, as often as it is tried."""
        self.hired[-1].state, self.hired[-1].exit_code = ChildState.FAILED, 14
