"""RL hyperparameters: the KL penalty, the size of a group, groups without signal.

    python tutorials/01_rl_hyperparameters.py           # prints everything; needs no server
    marimo edit tutorials/01_rl_hyperparameters.py      # as a notebook

Either way it needs marimo: pip install --editable '.[tutorials]'.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App()


@app.cell(hide_code=True)
def _():
    import marimo as mo

    mo.md("""
    # RL hyperparameters

    Besides the learning rate, three choices decide whether a run is stable and whether it learns at all: how strongly
    the policy is held to a reference (KL), how many answers are compared with each other (group size), and what
    happens to groups in which all answers earned the same.
    """)
    return (mo,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## KL to a reference policy

    A policy that only chases reward may drift far from the model it was: it exploits the grader, forgets what it could
    do, repeats itself. The KL penalty makes distance cost something. Per token,

        adjusted_advantage = original_advantage + kl_coef * (avg_kl - per_token_kl)

    so tokens that are further from the reference than the average lose advantage and the others gain it; over a batch
    the adjustments add up to zero. `kl_penalty_coef` turns it on, and `KLReferenceConfig` says what the reference is
    (left out, it is the base model itself).
    """)
    return


@app.cell
def _():
    from mint.rl.train import KLReferenceConfig

    kl_config = KLReferenceConfig(
        base_model="Qwen/Qwen3-4B-Instruct-2507",
        load_checkpoint_path=None,  # the base model's own weights
    )

    print("KL reference config:")
    print(f"  base_model: {kl_config.base_model}")
    print(f"  checkpoint:  {kl_config.load_checkpoint_path}")
    print()
    print("Typical kl_penalty_coef values:")
    print("  0.0   -- no KL penalty (default)")
    print("  0.01  -- light regularization")
    print("  0.05  -- moderate (good starting point)")
    print("  0.1+  -- strong (may slow reward improvement)")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Group size

    Every problem is answered several times, and an answer's advantage is its reward less the mean of its group:

        advantage_i = reward_i - mean(rewards in group)

    Small groups (2 to 4) give noisy advantages and often no signal at all; large ones (8 to 16) estimate better and
    cost more. Below, the same eight rewards in groups of 2, 4 and 8.
    """)
    return


@app.cell
def _():
    from mint.rl.data_processing import compute_advantages
    from mint.rl.types import Trajectory, TrajectoryGroup

    def make_mock_group(rewards):
        """A group with these rewards; what was said to earn them does not matter here."""
        return TrajectoryGroup(
            trajectories_G=[Trajectory(transitions=[], final_ob=None) for _ in rewards],
            final_rewards_G=rewards,
            metrics_G=[{} for _ in rewards],
        )

    all_rewards = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]

    for size in (2, 4, 8):
        parts = [all_rewards[start : start + size] for start in range(0, 8, size)]
        print()
        print(f"Group size {size}:")
        for number, advantages in enumerate(compute_advantages([make_mock_group(part) for part in parts])):
            print(f"  Group {number}: rewards={parts[number]}, advantages={advantages.tolist()}")
    return (make_mock_group,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    How often a group of size n has any signal is a matter of arithmetic: with a pass rate p it has none if all answers
    are right or all are wrong, so the chance of signal is 1 - p^n - (1 - p)^n. Problems that are always solved, or
    never, teach nothing at any size.
    """)
    return


@app.cell
def _():
    print()
    print("Chance that a group has signal, by pass rate and size:")
    print("  rate " + "".join(f"{n:>7}" for n in (2, 4, 8, 16)))
    for rate in (0.01, 0.1, 0.3, 0.5, 0.9):
        print(f"  {rate:<5}" + "".join(f"{1 - rate**n - (1 - rate) ** n:7.0%}" for n in (2, 4, 8, 16)))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Groups without signal

    `remove_constant_reward_groups=True` leaves groups of equal rewards out of the batch. Metrics count them all the
    same, so that you see when a dataset has become too easy.
    """)
    return


@app.cell
def _(make_mock_group):
    from mint.rl.data_processing import remove_constant_reward_groups

    groups = [
        make_mock_group([1.0, 1.0, 1.0, 1.0]),  # all right: nothing to learn
        make_mock_group([0.0, 1.0, 0.0, 1.0]),  # mixed
        make_mock_group([0.0, 0.0, 0.0, 0.0]),  # all wrong: nothing to learn
    ]

    filtered = remove_constant_reward_groups(groups)
    print()
    print(f"Before filtering: {len(groups)} groups")
    print(f"After filtering:  {len(filtered)} groups")
    print(f"Kept rewards: {[g.get_total_rewards() for g in filtered]}")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## In one table

    | field of `mint.rl.train.Config` | default | range | effect |
    |---|---|---|---|
    | `learning_rate` | none | 1e-6 to 1e-4 for models of billions | step size; too high is unstable |
    | `kl_penalty_coef` | 0.0 | 0.01 to 0.1 | holds the policy to the reference |
    | `group_size`, of your dataset | 4 | 2 to 16 | quality of the advantages |
    | `num_substeps` | 1 | 1 to 4 | optimizer steps a batch is split into |
    | `loss_fn` | importance_sampling | also ppo, cispo, gspo | the policy-gradient estimator |
    | `temperature` | 1.0 | 0.7 to 1.0 | exploration |
    | `remove_constant_reward_groups` | False | | leaves out groups without signal |

    Start with `learning_rate=1e-5`, groups of 4 and `kl_penalty_coef=0.05`, then look at the reward curves.
    `mint/tiny` is so small that it wants a hundred times that learning rate. What the coefficient does to the measured
    KL is in `benchmarks/results/kl_order.json`.
    """)
    return


if __name__ == "__main__":
    app.run()
