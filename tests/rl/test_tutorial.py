"""The published tutorial on RL hyperparameters, word for word but for the package name, prints what it printed."""

import contextlib
import io

CODE = '''
import torch

from mint.rl.data_processing import compute_advantages
from mint.rl.train import Config, KLReferenceConfig

# Example: KL penalty against the base model
kl_config = KLReferenceConfig(
    base_model="Qwen/Qwen3-4B-Instruct-2507",
    load_checkpoint_path=None,  # Use base model weights as reference
)

print("KL reference config:")
print(f"  base_model: {kl_config.base_model}")
print(f"  checkpoint:  {kl_config.load_checkpoint_path}")
print()

from mint.rl.types import Trajectory, TrajectoryGroup

def make_mock_group(rewards):
    """Create a TrajectoryGroup with the given rewards (no actual trajectories needed for advantage computation)."""
    trajs = [Trajectory(transitions=[], final_ob=None) for _ in rewards]
    return TrajectoryGroup(
        trajectories_G=trajs,
        final_rewards_G=rewards,
        metrics_G=[{} for _ in rewards],
    )

# Compare group sizes: same total reward distribution, different grouping
all_rewards = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]

# Group size 2: 4 groups
groups_2 = [make_mock_group(all_rewards[i:i+2]) for i in range(0, 8, 2)]
advs_2 = compute_advantages(groups_2)
print("Group size 2:")
for i, adv in enumerate(advs_2):
    print(f"  Group {i}: rewards={all_rewards[i*2:i*2+2]}, advantages={adv.tolist()}")

print()

# Group size 4: 2 groups
groups_4 = [make_mock_group(all_rewards[i:i+4]) for i in range(0, 8, 4)]
advs_4 = compute_advantages(groups_4)
print("Group size 4:")
for i, adv in enumerate(advs_4):
    print(f"  Group {i}: rewards={all_rewards[i*4:i*4+4]}, advantages={adv.tolist()}")

print()

# Group size 8: 1 group
groups_8 = [make_mock_group(all_rewards)]
advs_8 = compute_advantages(groups_8)
print("Group size 8:")
print(f"  Group 0: rewards={all_rewards}, advantages={advs_8[0].tolist()}")

from mint.rl.data_processing import remove_constant_reward_groups

groups = [
    make_mock_group([1.0, 1.0, 1.0, 1.0]),  # All correct -- no signal
    make_mock_group([0.0, 1.0, 0.0, 1.0]),  # Mixed -- has signal
    make_mock_group([0.0, 0.0, 0.0, 0.0]),  # All wrong -- no signal
]

filtered = remove_constant_reward_groups(groups)
print(f"Before filtering: {len(groups)} groups")
print(f"After filtering:  {len(filtered)} groups")
print(f"Kept rewards: {[g.get_total_rewards() for g in filtered]}")
'''

PRINTED = """\
KL reference config:
  base_model: Qwen/Qwen3-4B-Instruct-2507
  checkpoint:  None

Group size 2:
  Group 0: rewards=[0.0, 0.0], advantages=[0.0, 0.0]
  Group 1: rewards=[1.0, 0.0], advantages=[0.5, -0.5]
  Group 2: rewards=[1.0, 1.0], advantages=[0.0, 0.0]
  Group 3: rewards=[0.0, 1.0], advantages=[-0.5, 0.5]

Group size 4:
  Group 0: rewards=[0.0, 0.0, 1.0, 0.0], advantages=[-0.25, -0.25, 0.75, -0.25]
  Group 1: rewards=[1.0, 1.0, 0.0, 1.0], advantages=[0.25, 0.25, -0.75, 0.25]

Group size 8:
  Group 0: rewards=[0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0], advantages=[-0.5, -0.5, 0.5, -0.5, 0.5, 0.5, -0.5, 0.5]
Before filtering: 3 groups
After filtering:  1 groups
Kept rewards: [[0.0, 1.0, 0.0, 1.0]]
"""


def test_the_tutorial_prints_what_it_printed() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(CODE, "tutorial", "exec"), {})
    assert printed.getvalue() == PRINTED
