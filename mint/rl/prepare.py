"""From the groups of a step to the datums it trains on: filter, advantages, KL penalty, entropy bonus, in that
order.

The formulas live in `data_processing`, `advantages` and `kl`; sending the datums is `mint.rl.update`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mint.rl.config import Config
from mint.rl.data_processing import assemble_training_data, compute_advantages, has_signal
from mint.rl.kl import add_entropy_bonus
from mint.rl.kl_modes import KLTerm
from mint.rl.sampler import SampledGroup
from mint.types import Datum


@dataclass(frozen=True)
class Prepared:
    """What came of some groups. Indices in `metadata_D` and `advantages` are the groups' numbers in their step."""

    advantages: dict[int, np.ndarray]
    """One advantage a member, of the groups that were kept."""
    data_D: list[Datum]
    metadata_D: list[dict[str, int]]
    metrics: dict[str, float] = field(default_factory=dict)


async def prepare(sampled_P: Sequence[SampledGroup], config: Config, kl: KLTerm) -> Prepared:
    kept_P = [s for s in sampled_P if s.wrapped is not None and not s.replaced]
    if config.remove_constant_reward_groups:
        kept_P = [s for s in kept_P if has_signal(s.group)]
    groups_P = [s.group for s in kept_P]
    advantages_P = compute_advantages(groups_P, config.advantage)
    data_D, metadata_D = assemble_training_data(groups_P, advantages_P, config.mask_truncated)
    metrics = await kl.adjust(data_D)
    if config.entropy_coef:
        add_entropy_bonus(data_D, config.entropy_coef)
    return Prepared(
        {s.number: advantages_G for s, advantages_G in zip(kept_P, advantages_P, strict=True)},
        data_D,
        [meta | {"group_idx": kept_P[meta["group_idx"]].number} for meta in metadata_D],
        metrics,
    )
