"""What a run needs before its first step: data, clients, the KL reference, its log file, a note of the code."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import mint
from mint.errors import BadRequest
from mint.rl.config import Config, KLReferenceConfig
from mint.rl.evaluate import RLTestSetEvaluator, split_holdout
from mint.rl.kl_modes import KLTerm, choose_kl
from mint.rl.rundir import CheckpointRecord, RunDir
from mint.rl.strategies import as_strategy
from mint.rl.types import RLDataset

logger = logging.getLogger(__name__)


async def build_datasets(config: Config) -> tuple[RLDataset, RLDataset | None]:
    """The training set and the test set, which is made from the training set if there is none."""
    dataset, test_set = await config.dataset_builder()
    if test_set is None and config.holdout and config.eval_every:
        dataset, test_set = split_holdout(dataset, config.holdout)
    if len(dataset) == 0:
        raise BadRequest(f"{type(config.dataset_builder).__name__} made a training set without a single batch.")
    return dataset, test_set


def build_evaluators(config: Config, test_set: RLDataset | None) -> list[RLTestSetEvaluator]:
    if test_set is None:
        return []
    strategy = as_strategy(config.rollout_error_tolerance)
    return [
        RLTestSetEvaluator(
            test_set,
            config.max_tokens,
            num_groups_to_log=config.num_groups_to_log,
            strategy=strategy,
            termination=config.termination,
            seed=config.seed,
        )
    ]


async def open_trainer(
    config: Config, service: mint.ServiceClient, start: CheckpointRecord | None
) -> mint.TrainingClient:
    if start is not None:
        logger.info("Resuming after step %d from %s.", start.batch, start.state_path)
        return await service.create_training_client_from_state_with_optimizer_async(start.state_path)
    if config.load_checkpoint_path is not None:
        return await service.create_training_client_from_state_async(config.load_checkpoint_path)
    return await service.create_lora_training_client_async(config.model_name, rank=config.lora_rank, seed=config.seed)


async def kl_term(config: Config, service: mint.ServiceClient) -> KLTerm:
    if config.lag > 1 and config.loss_fn == "importance_sampling":
        logger.warning(
            "Sampling may lag %d steps behind and importance_sampling does not clip its ratios, which is unstable that "
            "far off policy; ppo and cispo do.",
            config.lag,
        )
    reference = config.kl_reference_config
    if reference is None:
        if not config.kl_penalty_coef:
            return KLTerm()
        logger.warning("No kl_reference_config: KL is measured against the base model, %s.", config.model_name)
        reference = KLReferenceConfig(config.model_name)
    mode, estimator = choose_kl(config.kl_mode, config.kl_estimator, config.kl_discount_factor)
    client = await open_reference(reference, service)
    return mode.term(client, config.kl_penalty_coef, config.kl_discount_factor, estimator)


async def open_reference(reference: KLReferenceConfig, service: mint.ServiceClient) -> mint.SamplingClient:
    path = reference.load_checkpoint_path
    if path is None:
        return await service.create_sampling_client_async(base_model=reference.base_model)
    if "/sampler_weights/" in path:
        return await service.create_sampling_client_async(model_path=path)
    frozen = await service.create_training_client_from_state_async(path)
    return await frozen.save_weights_and_get_sampling_client_async()


@contextmanager
def log_to_file(run_dir: RunDir) -> Iterator[None]:
    """Everything this package says goes to logs.log, from INFO up."""
    run_dir.path.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(run_dir.log_file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("mint")
    level = package.level
    package.addHandler(handler)
    if not package.isEnabledFor(logging.INFO):
        package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.setLevel(level)
        package.removeHandler(handler)
        handler.close()


def record_code(run_dir: RunDir) -> None:
    """code.diff: the commit of the working directory and what differs from it; nothing outside a git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace", timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is not None:
        run_dir.diff_file.write_text(f"# commit {commit.strip()}\n{git('diff', 'HEAD') or ''}")
