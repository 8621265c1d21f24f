"""Rollouts older than the policy that learns from them."""

from __future__ import annotations

import numpy as np

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown

CLIPPED = frozenset({"ppo", "cispo", "gspo"})
FAR = 0.15
"""Nats a token between the policy that sampled and the one that learns: a ratio is then typically 1.16, or 1 / 1.16."""


def check(run: Evidence) -> list[Finding]:
    old = [s for s in run.samples if s.step - s.version >= 1]
    if not old:
        return []
    config = run.config
    allowed = (config.get("async_config") or {}).get("max_steps_off_policy") or config.get("max_lag") or 0
    oldest = max(s.step - s.version for s in old)
    gaps = [s.gap for s in old if s.gap is not None]
    gap = float(np.mean(gaps)) if gaps else 0.0
    figures: dict[str, float | str] = {"oldest, in steps": oldest, "allowed": allowed, "gap in nats a token": gap}
    samples = shown(sorted(old, key=lambda s: -(s.gap or 0.0)))
    if oldest > allowed:
        return [
            Finding(
                "staleness",
                "alarm",
                run.span,
                f"Rollouts are up to {oldest} policy versions old although max_lag allows {allowed}: the sampler is "
                "not refreshed.",
                "Refresh the sampling client after every optimizer step.",
                0.97,
                figures,
                samples,
            )
        ]
    clipped = config.get("loss_fn") in CLIPPED
    if oldest < 2 and gap <= FAR:
        return []
    return [
        Finding(
            "staleness",
            "warning" if gap > FAR and not clipped else "notice",
            run.span,
            f"Rollouts are up to {oldest} policy versions old, and the policy has moved {gap:.2g} nats a token "
            "meanwhile"
            + (
                "; the loss clips its ratios, which bounds the harm."
                if clipped
                else ", with ratios that are not clipped."
            ),
            "Lower max_lag or the learning rate" + ("." if clipped else ", or take a loss that clips: ppo or cispo."),
            0.7 if gap > FAR and not clipped else 0.3,
            figures,
            samples,
        )
    ]
