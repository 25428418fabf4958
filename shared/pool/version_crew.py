"""The children of `tokenmill up`: those of the settings, and workers of versions."""

import platform
import re
from collections.abc import Callable, Sequence
from zlib import crc32

import msgspec
import redis.asyncio

from ..config import Config
from ..config_model import ModelConfig
from ..connection import state_dir
from ..errors import TokenmillError
from ..redis import translate
from .lines import line
from .output import Output
from .plan import PoolOptions, model_of_worker, plan_workers
from .processes import Child, ChildSpec, Supervisor
from .version_failures import Key
from .versions import TRIES, VersionKeeper
from .watching import Forfeiter, is_worker

OnChange = Callable[[Child], None]


class VersionCrew:
    """Makes the pool's children, and gives the keeper of versions a hand.

    Args:
        client: Redis.
        options: What was asked for.
        config: Settings in force.
        url: Redis, for the children.
        output: Where they write.
        on_change: Called whenever one's state changes.
        console: Whether a person reads their logs.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        options: PoolOptions,
        config: Config,
        url: str,
        output: Output,
        on_change: OnChange,
        *,
        console: bool,
    ) -> None:
        self._options = options
        self._config = config
        self._url = url
        self._output = output
        self._on_change = on_change
        self._console = console
        self._forfeit = Forfeiter(client)
        self._versions = {one.name: one.version for one in config.models}
        self._keeper = VersionKeeper(
            client,
            self,
            self._planned,
            config.models,
            config.pool.partitions,
            # Two pools of one host have a state directory each.
            f"{platform.node()} ({state_dir(config)})",
        )
        self.supervisor = Supervisor([])

    async def begin(self, specs: Sequence[ChildSpec]) -> None:
        """Starts the children of the settings, and workers of further versions.

        Args:
            specs: As planned by the settings; workers of versions that were drained
                are left out.
        """
        stopped = await self._stopped()
        found: dict[Key, list[Child]] = {}
        for spec in specs:
            child = self._make(spec)
            if is_worker(child):
                model = model_of_worker(spec)
                key = (model, self._versions[model])
                if key in stopped:
                    continue
                found.setdefault(key, []).append(child)
            self.supervisor.add(child)
        for key, children in found.items():
            self._keeper.adopt(key, children)
        if self._options.with_workers:
            await self._keeper.look()

    async def run(self) -> None:
        """Keeps workers as their versions say, until cancelled."""
        await self._keeper.run()

    async def _stopped(self) -> set[Key]:
        if not self._options.with_workers:
            return set()
        try:
            with translate():
                stopped = await self._keeper.stopped()
        except TokenmillError as error:
            line(f"warning: versions cannot be read, all workers start: {error}")
            return set()
        for model, version in sorted(stopped):
            line(
                f"version {version} of {model} was drained and stays so; "
                f"tokenmill models load {model} {version} starts it"
            )
        return stopped

    def _planned(self, model: ModelConfig) -> list[ChildSpec]:
        said = f"{model.name}-{model.version}"
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", said)
        if name != said or "-" in model.version:
            # Another model's version could be called the same.
            name += f"-{crc32(f'{model.name} {model.version}'.encode()):08x}"
        planned = plan_workers(
            self._options,
            self._config,
            self._url,
            console=self._console,
            models=[model],
            prefix=f"worker-{name}",
            extra=("--version", model.version),
        )
        return [
            msgspec.structs.replace(spec, essential=False, tries=TRIES)
            for spec in planned
        ]

    def _make(self, spec: ChildSpec) -> Child:
        return Child(spec, self._output, self._on_change, self._forfeit)

    # --- what the keeper asks for --------------------------------------------------
    def employ(self, specs: Sequence[ChildSpec]) -> list[Child]:
        """Starts processes; see `Crew`."""
        children = [self._make(spec) for spec in specs]
        for child in children:
            self.supervisor.add(child)
        return children

    async def dismiss(self, children: Sequence[Child]) -> None:
        """Stops processes and forgets them; see `Crew`."""
        if children:
            await self.supervisor.remove(children)

    def last_words(self, name: str) -> list[str]:
        """The end of a child's log; see `Crew`."""
        return self._output.last_words(name)
