"""The file of a sweep, and the runs that it plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl_train.config import RunConfig, load_config
from agentrl_train.config.section import Count, CountOrOff, Section
from agentrl_train.config.toml import Table, flat, problems, read_toml
from agentrl_train.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
OWN = ("run.name", "run.folder", "run.seed", "run.threads")
"""Settings that the sweep sets itself."""


class SweepConfig(Section):
    """The file of ``agentrl-train sweep``: presets and variants of one configuration, and seeds."""

    name: Name
    """Name of the folder inside ``folder``."""
    config: str
    """Configuration that the runs vary, relative to this file."""
    folder: str = "runs"
    """Parent of the sweep's folder, relative to the working directory."""
    seeds: Annotated[tuple[CountOrOff, ...], Field(min_length=1)] = (0, 1, 2, 3, 4)
    """Seeds of every variant."""
    presets: tuple[str, ...] = ()
    """Presets of algorithms. Each preset is a variant with its name."""
    variants: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    """Variants by name: tables with settings of a run. Paths in them are relative to ``config``."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings of every run. Settings of a variant override them."""
    baseline: str | None = None
    """Variant that the others are compared with, by default the first."""
    processes: Count | None = None
    """Number of concurrent runs, by default one for each core."""
    keep_checkpoints: bool = True
    """Keep the checkpoints of finished runs. The newest takes three times the size of the model or more."""

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Return variant -> its settings."""
        presets = {Path(preset).stem: {"algorithm": {"preset": preset}} for preset in self.presets}
        return presets | self.variants

    def problems(self) -> list[str]:
        """Return violated constraints between the fields, one sentence each."""
        found = []
        if not self.presets and not self.variants:
            found.append("there is nothing to run: name presets, or give at least one table [variants.NAME]")
        stems = [Path(preset).stem for preset in self.presets]
        if twice := [name for name in [*stems, *self.variants] if [*stems, *self.variants].count(name) > 1]:
            found.append(f"two variants are called {twice[0]!r}: rename one")
        if len(set(self.seeds)) < len(self.seeds):
            found.append(f"seeds = {list(self.seeds)} has duplicates")
        if self.baseline is not None and self.baseline not in self.changes:
            found.append(f"baseline = {self.baseline!r} is not one of {', '.join(self.changes)}")
        for where, table in (("set", self.set), *((f"variants.{k}", v) for k, v in self.variants.items())):
            if own := sorted(set(OWN) & flat(table).keys()):
                found.append(f"{where} sets {own[0]}, which the sweep sets itself: remove it")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a sweep."""

    variant: str
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.config.run_folder

    @property
    def file(self) -> Path:
        """Return the configuration file that the run is started with."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    @property
    def log(self) -> Path:
        """Return the file with the output of its process."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def usage(self) -> Path:
        """Return the file with the time that its processes took."""
        return self.folder.with_name(f"{self.folder.name}.usage.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A validated sweep."""

    path: Path
    """Path of its file."""
    config: SweepConfig
    folder: Path
    processes: int
    """Number of concurrent runs."""
    runs: tuple[PlannedRun, ...]
    """All runs. The first seed of every variant comes first."""

    @property
    def baseline(self) -> str:
        """Return the variant that the others are compared with."""
        return self.config.baseline or next(iter(self.config.changes))

    @property
    def notes(self) -> list[str]:
        """Return the notes on the settings of its runs, each once, with its variants if others lack it."""
        variants: dict[str, dict[str, None]] = {}
        for run in self.runs:
            for note in run.config.notes:
                variants.setdefault(note, {})[run.variant] = None
        everywhere = len(self.config.changes)
        return [
            note if len(names) == everywhere else f"{', '.join(names)}: {note}"
            for note, names in variants.items()
        ]


def load_sweep(path: Path, *, cores: int, processes: int | None = None) -> Sweep:
    """Read the file of a sweep and validate every run of it.

    Args:
        path: the file.
        cores: processor cores, which the runs share.
        processes: number of concurrent runs; None uses the number in the file, or one for each core.

    Raises:
        ConfigError: the file, or a run that it plans, is invalid. The message has all problems.
    """
    table = read_toml(path)
    if found := problems(table, SweepConfig):
        lines = "\n".join(f"  - {problem}" for problem in found)
        raise ConfigError(f"{path} is invalid; please correct:\n{lines}")
    config = SweepConfig.model_validate(table)
    folder = Path(config.folder).expanduser().absolute() / config.name
    count = len(config.changes) * len(config.seeds)
    processes = min(count, processes or config.processes or cores)
    runs = _runs(path, config, folder=folder, threads=max(1, cores // processes))
    return Sweep(path=path, config=config, folder=folder, processes=processes, runs=tuple(runs))


def _runs(path: Path, config: SweepConfig, *, folder: Path, threads: int) -> Iterator[PlannedRun]:
    base = path.parent / Path(config.config).expanduser()
    loaded: dict[tuple[int, str], RunConfig] = {}
    wrong: dict[str, str] = {}
    for seed, (variant, changes) in product(config.seeds, config.changes.items()):
        own: Table = {
            "run": {"name": f"seed-{seed}", "folder": str(folder / variant), "seed": seed, "threads": threads}
        }
        tables = [_of_seed(table, seed) for table in (config.set, changes)]
        try:
            loaded[seed, variant] = load_config(base, changes=(*tables, own))
        except ConfigError as error:
            wrong.setdefault(variant, str(error))
            continue
        if not loaded[seed, variant].eval.samples:
            wrong.setdefault(variant, "eval.samples is 0, so there is nothing to rank: raise it")
    if wrong:
        raise ConfigError("\n".join(f"variant {name} of {path}: {text}" for name, text in wrong.items()))
    for (seed, variant), run in loaded.items():
        yield PlannedRun(variant=variant, seed=seed, config=run)


def _of_seed(value: Any, seed: int) -> Any:
    """Return a setting with ``{seed}`` replaced by the seed of a run."""
    if isinstance(value, str):
        return value.replace("{seed}", str(seed))
    if isinstance(value, dict):
        return {key: _of_seed(one, seed) for key, one in value.items()}
    return [_of_seed(one, seed) for one in value] if isinstance(value, list) else value
