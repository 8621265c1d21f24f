"""Writes docs/metrics.md from `mint.rl.metric_names`: `python -m docs.generate_metrics`."""

from __future__ import annotations

from pathlib import Path

from mint.rl.metric_names import TABLE

PAGE = Path(__file__).parent / "metrics.md"
HEAD = """# Metrics

Every step of a run is one line of `metrics.jsonl`; these are the names in it. They are an API: curves, the doctor and
the dashboard read them. `<...>` stands for one piece of a name. A name under `env/<tag>/` is the figure of `env/all/`
for the groups with that tag, and a name under `test/` the same for the held-out problems.

Look first at `env/all/reward/total` beside `test/env/all/reward/total`, then at `env/all/by_group/frac_mixed` (is there
anything to learn from?), `env/all/truncated` (is it cut off?), `optim/kl_sample_train_v2` (are ratios right?) and
`optim/entropy` (is it still trying?). `mint doctor` looks at all of them.

<!-- Made by docs/generate_metrics.py from mint/rl/metric_names.py. -->
"""


def page() -> str:
    parts = [HEAD]
    for title, metrics in TABLE.items():
        rows = [f"| `{name.replace('|', ', ')}` | {sentence} |" for name, sentence in metrics.items()]
        parts.append("\n".join([f"## {title}", "", "| name | what it says |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
