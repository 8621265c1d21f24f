"""Measuring saved checkpoints again, on the holdout of the run that made them.

A run directory holds its configuration as values, not as code, and names the file its dataset builder came from. From
these the builder is made again; if it describes itself otherwise than the run did, it is refused. Where values are not
enough (a strategy, further evaluators, data inside the builder), name the recipe: a Python file or module with a
`Config` in it, which then gets the run's values.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mint
from mint.errors import BadRequest
from mint.rl.config import Config, describe
from mint.rl.rundir import CheckpointRecord, Json, RunDir
from mint.rl.setup import build_datasets, build_evaluators
from mint.rl.types import RLDatasetBuilder

PLAIN = (bool, int, float, str, type(None))
ONLY_FROM_A_RECIPE = ("rollout_error_tolerance", "termination", "evaluator_builders")
"""Fields an evaluation needs and values cannot say."""


def find_checkpoints(run_dir: RunDir) -> list[CheckpointRecord]:
    """Those that can be sampled from, oldest first; a version saved twice counts once."""
    by_version = {record.batch: record for record in run_dir.checkpoints() if record.sampler_path is not None}
    if not by_version:
        raise BadRequest(f"{run_dir.path} has no checkpoint to sample from; set save_every.")
    return [by_version[version] for version in sorted(by_version)]


def source_of(builder: RLDatasetBuilder) -> str | None:
    """The file a dataset builder's class is in, for config.json."""
    try:
        file = inspect.getsourcefile(type(builder))
    except (TypeError, OSError):  # typed at a prompt
        return None
    return None if file is None else str(Path(file).resolve())


def load_config(run_dir: RunDir, recipe: str | None = None) -> Config:
    """As much of the run's configuration as evaluating needs. `recipe`: `path/to/file.py` or `package.module`, and
    `:NAME` if it holds several configurations."""
    saved = run_dir.config()
    if saved is None:
        raise BadRequest(f"{run_dir.path} is not a run directory: it has no config.json.")
    known = {f.name for f in fields(Config)}
    values: dict[str, Any] = {k: v for k, v in saved.items() if k in known and isinstance(v, PLAIN)}
    if recipe is not None:
        config = find_config(recipe)
        config = replace(config, **values, dataset_builder=_with_values(config.dataset_builder, saved))
    else:
        if missing := [name for name in ONLY_FROM_A_RECIPE if not isinstance(saved.get(name) or None, PLAIN)]:
            raise BadRequest(f"{missing[0]} of this run is code; name the recipe it came from (--recipe file.py).")
        config = Config(**{"learning_rate": 0.0} | values, dataset_builder=_rebuild(saved))
    if describe(config.dataset_builder) != saved["dataset_builder"]:
        raise BadRequest(
            f"this makes another dataset than the run had: {describe(config.dataset_builder)} now, "
            f"{saved['dataset_builder']} in {run_dir.config_file}. Name the recipe the run was made with."
        )
    return config


class CheckpointEvaluator:
    """The run's own evaluation, of any of its checkpoints."""

    def __init__(self, config: Config, service: mint.ServiceClient) -> None:
        self.config = config
        self.service = service

    async def __call__(self, record: CheckpointRecord) -> dict[str, float]:
        _, test_set = await build_datasets(self.config)
        evaluators = build_evaluators(self.config, test_set)
        if not evaluators:
            raise BadRequest("the run has no holdout: its dataset builder makes no test set and holdout is 0.")
        client = await self.service.create_sampling_client_async(model_path=record.sampler_path)
        metrics: dict[str, float] = {}
        for evaluator in [*evaluators, *(build() for build in self.config.evaluator_builders)]:
            metrics |= await evaluator(client)
        return metrics

    async def metric(self, record: CheckpointRecord, name: str) -> float:
        metrics = await self(record)
        if name not in metrics:
            raise BadRequest(f"the evaluation has no metric {name!r}; there are {', '.join(sorted(metrics))}.")
        return metrics[name]


# --------------------------------------------------------------------------------------------------------------------


def find_config(recipe: str) -> Config:
    """The configuration in a Python file or module; `:NAME` chooses among several."""
    place, _, name = recipe.partition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise BadRequest(f"{place!r} cannot be imported: {error}.") from error
    found = {key: value for key, value in vars(module).items() if isinstance(value, Config)}
    if name in found:
        return found[name]
    if not name and len(found) == 1:
        return next(iter(found.values()))
    there = ", ".join(sorted(found)) or "none"
    raise BadRequest(f"{recipe!r} does not name one mint.rl.train.Config; the module has {there}.")


def _rebuild(saved: Json) -> RLDatasetBuilder:
    described, source = saved["dataset_builder"], saved.get("dataset_source")
    if source is None:
        raise BadRequest("config.json does not say where the dataset builder came from; name the recipe (--recipe).")
    found: Any = _import_file(Path(source))
    for part in described["type"].split("."):
        found = getattr(found, part, None)
    if found is None:
        raise BadRequest(f"{source} has no {described['type']} any more; name the recipe the run was made with.")
    values = {name: value for name, value in described.items() if name != "type"}
    if unknown := [name for name, value in values.items() if not isinstance(value, PLAIN)]:
        raise BadRequest(f"{unknown[0]} of {described['type']} is not a plain value; name the recipe (--recipe).")
    builder: RLDatasetBuilder = found(**values)
    return builder


def _with_values(builder: Any, saved: Json) -> Any:
    """The builder with the plain values the run's builder had."""
    described = saved["dataset_builder"]
    if described.get("type") != type(builder).__qualname__:
        return builder
    plain = {name: value for name, value in described.items() if name != "type" and isinstance(value, PLAIN)}
    return replace(builder, **{n: v for n, v in plain.items() if isinstance(getattr(builder, n, builder), PLAIN)})


def _import_file(path: Path) -> ModuleType:
    """As a module, so that what is under `if __name__ == "__main__"` does not run."""
    if not path.is_file():
        raise BadRequest(f"{path} is not a file; name the recipe the run was made with (--recipe).")
    folder = path.resolve().parent
    if str(folder) not in sys.path and not (folder / "__init__.py").is_file():
        sys.path.insert(0, str(folder))  # as for a script, so that it finds its neighbours; a package has its own way
    name = f"mint_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
