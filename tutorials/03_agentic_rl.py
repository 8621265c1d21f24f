"""Agentic RL: several turns, a tool, and a reward at the end.

    python tutorials/03_agentic_rl.py           # under a minute; starts a server by itself
    marimo edit tutorials/03_agentic_rl.py      # as a notebook

Either way it needs marimo: pip install --editable '.[tutorials]'.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App()


@app.cell(hide_code=True)
def _():
    import marimo as mo

    mo.md("""
    # Agentic RL

    An agent acts, sees what came of it, and acts again. The reward comes at the end, and it is paid for everything the
    model wrote on the way. Here the model may ask a calculator before it answers; it knows that there is one, but
    would rather guess.
    """)
    return (mo,)


@app.cell
async def _():
    import mint
    from mint.rl.calculator import calculator
    from mint.rl.completers import SamplingMessageCompleter
    from mint.rl.renderers import ChatRenderer
    from mint.rl.tools import sample_with_trace

    service = mint.ServiceClient()
    base = service.create_sampling_client(base_model="mint/tiny")
    renderer = ChatRenderer(base.get_tokenizer())
    untrained = SamplingMessageCompleter(base, renderer, max_tokens=32)

    for asked in ("What is 312 * 47?", "What is 58 + 761?"):
        for _ in range(3):
            answer, trace = await sample_with_trace(asked, untrained, tools=[calculator])
            calls = [call["arguments"]["expression"] for call in trace["tool_calls"]]
            print(f"{asked} asks {calls}, answers {answer!r}")
    return calculator, renderer, service


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## An environment

    `ToolMessageEnv` is a conversation in which tools may be called: a message with a call gets the tool's answer, a
    message without one is the final answer and goes to the reward. The reward may look at the whole `trace`. This one
    pays 1 for the right number and takes a little back for every call beyond the first: tools cost money.
    """)
    return


@app.cell
def _(calculator, renderer):
    from mint.rl.answers import exact_match
    from mint.rl.calculator import evaluate
    from mint.rl.envs import EnvFromMessageEnv
    from mint.rl.rewards import Reward, Term
    from mint.rl.tools import ToolMessageEnv
    from mint.rl.types import EnvGroupBuilder

    def right(prompt, answer):
        return exact_match(answer, evaluate(prompt.removeprefix("What is ").removesuffix("?")))

    def extra_calls(prompt, answer, trace):
        return -min(max(len(trace["tool_calls"]) - 1, 0), 5) / 5

    reward = Reward((Term("right", right), Term("extra_calls", extra_calls, weight=0.2, low=-1.0, high=0.0)))

    class CalculatorGroup(EnvGroupBuilder):
        """Several attempts at one question."""

        def __init__(self, question, size):
            self.question, self.size = question, size

        async def make_envs(self):
            message = {"role": "user", "content": self.question}
            talks = [ToolMessageEnv([message], reward, [calculator], max_turns=3) for _ in range(self.size)]
            return [EnvFromMessageEnv(renderer, talk, failed_parse_reward=0.0) for talk in talks]

        def problem_id(self):
            return self.question

    return (CalculatorGroup,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## A dataset

    Problems in batches. A tenth is held out and measured before the first step and after the last.
    """)
    return


@app.cell
def _(CalculatorGroup):
    import random

    from mint.rl.datasets import ListRLDataset
    from mint.rl.types import RLDatasetBuilder

    class CalculatorDataset(RLDatasetBuilder):
        async def __call__(self):
            rng = random.Random(0)
            questions = [
                f"What is {rng.randint(11, 999)} {rng.choice('+-*')} {rng.randint(11, 999)}?" for _ in range(48 + 24)
            ]
            train = [CalculatorGroup(question, 8) for question in questions[:48]]
            test = [CalculatorGroup(question, 1) for question in questions[48:]]
            return ListRLDataset(train, groups_per_batch=6), ListRLDataset(test, groups_per_batch=24, seed=None)

    return (CalculatorDataset,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Train

    One configuration, one call. Everything that happens goes to the run directory, which is the truth about the run:
    here we read the rewards and one rollout back from it.
    """)
    return


@app.cell
async def _(CalculatorDataset, service):
    import tempfile

    from mint.rl.train import Config, main

    config = Config(
        model_name="mint/tiny",
        recipe_name="agentic_tutorial",
        dataset_builder=CalculatorDataset(),
        learning_rate=1e-3,
        lora_rank=16,
        max_tokens=32,
        eval_every=8,
        save_every=0,
        loggers=(),
        log_path=tempfile.mkdtemp(prefix="agentic-"),
    )
    run = await main(config, service)

    print()
    for line in run.metrics():
        measured = [
            f"{name} {line[key]:.3f}"
            for name, key in {
                "reward": "env/all/reward/total",
                "tool calls": "env/all/episode/tool_calls",
                "held out": "test/env/all/reward/total",
            }.items()
            if key in line
        ]
        print(f"Step {line['step']}: {', '.join(measured)}")
    return (run,)


@app.cell
def _(run):
    rollout = max(run.rollouts(7), key=lambda record: record.reward)
    written = [piece for piece, mask in zip(rollout.completion_pieces, rollout.mask, strict=True) if mask]
    print()
    print(f"{rollout.prompt_text}{rollout.completion_text}")
    print(f"Reward {rollout.reward}, for what the model wrote: {''.join(written)!r}")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    The two turns were trained on as one sequence: the tool's words are in it, with weight 0, because the model did not
    write them.

    Next: `mint.rl.rollout_limits` for budgets of turns, tokens and calls; `mint.rl.judges` where no program can tell
    right from wrong; `max_lag=1` in the configuration to sample while training.
    """)
    return


if __name__ == "__main__":
    app.run()
