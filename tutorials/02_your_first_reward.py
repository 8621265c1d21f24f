"""Your first reward: write it, test it, see whether it can teach, train on it.

    python tutorials/02_your_first_reward.py           # about half a minute; starts a server by itself
    marimo edit tutorials/02_your_first_reward.py      # as a notebook

Either way it needs marimo: pip install --editable '.[tutorials]'.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App()


@app.cell(hide_code=True)
def _():
    import marimo as mo

    mo.md("""
    # Your first reward

    In reinforcement learning you do not show the model what to say. You say what an answer is worth, and that is all it
    ever learns from: **the reward is the specification**. Here the task is adding two numbers. The bundled model knows
    how, but likes to drop a carry.
    """)
    return (mo,)


@app.cell
def _():
    import random

    import mint
    from mint import types

    trainer = mint.ServiceClient().create_lora_training_client(base_model="mint/tiny", rank=16, seed=0)
    tokenizer = trainer.get_tokenizer()

    def ask(sampler, problems, group_size, seed):
        """Answers to every problem, as sampled: tokens with the log-probs the policy gave them."""
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(tokens=tokenizer.encode(f"Q: What is {a} + {b}?\nA:")),
                num_samples=group_size,
                sampling_params=types.SamplingParams(max_tokens=8, temperature=1.0, seed=1000 * seed + n),
            )
            for n, (a, b) in enumerate(problems)
        ]
        return [future.result().sequences for future in futures]

    def text_of(sequence):
        return tokenizer.decode(sequence.tokens, skip_special_tokens=True)

    base = trainer.save_weights_and_get_sampling_client()
    print("What is 47 + 38?", [text_of(s) for s in ask(base, [(47, 38)], 8, seed=0)[0]])
    return ask, base, random, text_of, tokenizer, trainer, types


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Write it, and test it

    A reward is a function. Like any other it deserves a test before a GPU is spent on it: the right answer must earn
    1, and what you do not want must not. The two mistakes that waste most runs are a reward the right answer cannot
    reach, and one that something else reaches too.
    """)
    return


@app.cell
def _():
    from mint.rl.answers import digit_match, exact_match

    def exact(text, problem):
        return exact_match(text, sum(problem))

    print()
    for said in (" 85", " The answer is 85.", " 75", " 8", " 85 or 86 or 87", ""):
        print(f"{said!r:24} earns {exact(said, (47, 38)):.0f}")
    assert exact(" 85", (47, 38)) == 1 and exact(" 75", (47, 38)) == 0
    return digit_match, exact


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ` 85 or 86 or 87` earns 1: this reward reads the first number and no further. With eight tokens to an answer nobody
    can hedge like that here, but look for such doors before the model does.

    ## Can it teach?

    An answer is compared with the others of its group. Where all earn the same there is nothing to learn, so the first
    thing to ask of a reward is how many groups have signal. Partial credit raises that number: below, a reward that
    counts right digits finds differences between answers that are all wrong.
    """)
    return


@app.cell
def _(ask, base, digit_match, exact, random, text_of):
    def draw(rng, count):
        return [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(count)]

    def partial(text, problem):
        return 0.8 * exact(text, problem) + 0.2 * digit_match(text, sum(problem))

    def share_with_signal(reward, problems, answers):
        spreads = [
            {round(reward(text_of(s), problem), 6) for s in group}
            for problem, group in zip(problems, answers, strict=True)
        ]
        return sum(len(spread) > 1 for spread in spreads) / len(spreads)

    print()
    probe = draw(random.Random(1), 40)
    for size in (2, 4, 8):
        drawn = ask(base, probe, size, seed=1)
        shares = [share_with_signal(reward, probe, drawn) for reward in (exact, partial)]
        print(f"Groups of {size} with signal: {shares[0]:.0%} exact, {shares[1]:.0%} partial")
    return draw, partial


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Train on it

    The loop has four lines of thought: sample from the present policy, score, subtract the group's mean, train on the
    sampled tokens. The prompt gets weight 0, so only what the model wrote is learned from.
    """)
    return


@app.cell
def _(ask, draw, exact, partial, random, text_of, tokenizer, trainer, types):
    def datums_of(problem, group):
        rewards = [partial(text_of(sequence), problem) for sequence in group]
        mean = sum(rewards) / len(rewards)
        if min(rewards) == max(rewards):
            return []
        prompt = tokenizer.encode(f"Q: What is {problem[0]} + {problem[1]}?\nA:")
        datums = []
        for sequence, reward in zip(group, rewards, strict=True):
            full, prefix, length = prompt + sequence.tokens, len(prompt) - 1, len(sequence.tokens)
            datums.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens=full[:-1]),
                    loss_fn_inputs={
                        "target_tokens": full[1:],
                        "weights": [0.0] * prefix + [1.0] * length,
                        "logprobs": [0.0] * prefix + sequence.logprobs,
                        "advantages": [0.0] * prefix + [reward - mean] * length,
                    },
                )
            )
        return datums

    print()
    rng = random.Random(0)
    for step in range(1, 13):
        sampler = trainer.save_weights_and_get_sampling_client()
        problems = draw(rng, 16)
        answers = ask(sampler, problems, 8, seed=100 + step)
        data = [d for problem, group in zip(problems, answers, strict=True) for d in datums_of(problem, group)]
        trainer.forward_backward(data, loss_fn="importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        right = [exact(text_of(s), problem) for problem, group in zip(problems, answers, strict=True) for s in group]
        print(f"Step {step}: accuracy={sum(right) / len(right):.1%}, datums={len(data)}")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Where to go from here

    - `mint.rl.rewards`: rewards composed of weighted terms with declared ranges, each logged by its own name.
    - `mint.rl.judges`: a model as the judge, by comparison or by rubric. `mint.rl.sandbox`: tests for code.
    - `demos/rl`: this loop in one file, with one adapter for each kind of reward.
    - `mint.rl.train`: the loop with holdout, KL, schedules, checkpoints and resume.
    """)
    return


if __name__ == "__main__":
    app.run()
