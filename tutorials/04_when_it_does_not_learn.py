"""When it does not learn: five broken runs, what the doctor says, the fix, and the curve after.

    python tutorials/04_when_it_does_not_learn.py           # half a minute; starts a server by itself
    marimo edit tutorials/04_when_it_does_not_learn.py      # as a notebook

Either way it needs marimo: pip install --editable '.[tutorials]'.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App()


@app.cell(hide_code=True)
def _():
    import marimo as mo

    mo.md("""
    # When it does not learn

    A reinforcement-learning run that is broken rarely crashes. It samples, grades, takes gradient steps and logs
    plausible numbers, and the reward just does not rise. Here are five such runs, each broken by one line. They are
    short; the signs are the same in long ones.

    The task is adding two numbers, in a class of a few methods, so that each can be broken by itself.
    """)
    return (mo,)


@app.cell
def _():
    import random
    import tempfile
    from dataclasses import dataclass
    from pathlib import Path
    from statistics import mean

    import mint
    from mint.client.tokenizers import load_tokenizer
    from mint.rl.answers import exact_match
    from mint.rl.datasets import ListRLDataset
    from mint.rl.doctor import diagnose
    from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
    from mint.rl.renderers import PlainRenderer
    from mint.rl.train import Config, main
    from mint.rl.types import RLDatasetBuilder

    class Addition(ProblemEnv):
        def __init__(self, problem, tokenizer):
            super().__init__(PlainRenderer(tokenizer), format_coef=0.0)
            self.problem = problem

        def get_question(self):
            return f"Q: What is {self.problem[0]} + {self.problem[1]}?\nA:"

        def get_reference_answer(self):
            return str(sum(self.problem))

        def check_answer(self, text):
            return exact_match(text, sum(self.problem))

        def check_format(self, text):
            return True

    @dataclass(frozen=True)
    class Additions(RLDatasetBuilder):
        env: type = Addition
        steps: int = 6

        async def __call__(self):
            tokenizer, rng = load_tokenizer("mint/tiny"), random.Random(0)
            pairs = [(a, b) for a in range(100) for b in range(100)]
            rng.shuffle(pairs)

            def group(pair, size):
                return ProblemGroupBuilder(lambda: self.env(pair, tokenizer), size)

            train = ListRLDataset([group(pair, 4) for pair in pairs[: 8 * self.steps]], 8, seed=None)
            return train, ListRLDataset([group(pair, 1) for pair in pairs[-32:]], 32, seed=None)

    service, folder = mint.ServiceClient(), Path(tempfile.mkdtemp())

    async def run(name, env=Addition, steps=6, **settings):
        config = Config(
            **{"learning_rate": 2e-3, "max_tokens": 8} | settings,
            dataset_builder=Additions(env, steps),
            model_name="mint/tiny",
            recipe_name="tutorial",
            lora_rank=16,
            eval_every=5,
            save_every=0,
            loggers=(),
            log_path=str(folder / name),
        )
        run_dir = await main(config, service)
        logs = [[r.turns[0].logs for r in run_dir.rollouts(step)] for step in run_dir.rollout_steps()]
        right = [mean(exact_match(log["response"], int(log["reference"])) for log in some) for some in logs]
        print(f"\n{name}: right answers by step  " + " ".join(f"{share:.2f}" for share in right))
        return run_dir

    def say(run_dir):
        findings = diagnose(run_dir)
        print("\n".join(findings[0].lines()) if findings else "Nothing to report.")
        return findings

    return Addition, exact_match, run, say


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 1. Answers that do not end

    The model ends an answer with a special token. If that token is not among the stops, it goes on: the answer is
    followed by whatever comes to its mind, and most of what is trained on is noise. `mint doctor RUN` prints the same
    as `say` does here. The second run is the mended one: the same, with its stops left alone.
    """)
    return


@app.cell
async def _(Addition, run, say):
    class NoStops(Addition):
        async def initial_observation(self):
            prompt, _ = await super().initial_observation()
            return prompt, []  # nothing ends an answer

    endless = say(await run("stops-missing", NoStops, steps=4, max_tokens=16))
    assert endless[0].kind == "stop_token_missing"

    say(await run("mended", steps=14))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 2. A grader that does not know a right answer

    Rewards of zero everywhere look like a task that is too hard. Before making it easier, look at the two answers in
    the finding: if they are right, the grader is wrong. (Mended, this run is the one above, to the last token: the
    same seeds give the same run, so we need not make it again.)
    """)
    return


@app.cell
async def _(Addition, run, say):
    class Pedantic(Addition):
        def check_answer(self, text):
            return float(text == str(sum(self.problem)))  # the model says " 85", with a space

    strict = say(await run("grader-broken", Pedantic, steps=4))
    assert strict[0].kind == "rejects_reference"
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 3. A minus too many

    Every number looks healthy: groups have signal, gradients flow, the reward rises a little, sampler and trainer
    agree. The policy learns exactly what it is told, which is to be wrong. (The mended run is again the one above.)
    """)
    return


@app.cell
async def _(Addition, exact_match, run, say):
    class Distance(Addition):
        def check_answer(self, text):
            return 1.0 - exact_match(text, sum(self.problem))  # a distance, used as a reward

    flipped = say(await run("sign-flipped", Distance))
    assert flipped[0].kind == "reward_sign"
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 4. A learning rate from another world

    A rate that suits full fine-tuning, or that lost a digit, moves a LoRA so little that noise hides it. Evaluations
    repeat their seeds, so the doctor can compare the same tokens before and after: they hardly changed at all. The
    runs above have a rate of 2e-3 and nothing else that differs: the mended one is once more the first.
    """)
    return


@app.cell
async def _(run, say):
    slow = say(await run("rate-too-small", learning_rate=1e-7))
    assert slow[0].kind == "learning_rate_small"
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## 5. A reward that is easier to get than the task

    The reward rises, beautifully. But it pays for any even number, and that is what it gets. What gives it away is a
    second measure that does not follow: here `correct`, which the environment reports and does not pay for. Always log
    one. (Paid for right answers instead, it is the mended run of part 1.)
    """)
    return


@app.cell
async def _(Addition, run, say):
    class Even(Addition):
        async def step(self, action, *, extra=None):
            result = await super().step(action, extra=extra)
            result.reward = float(str(result.logs["response"]).strip()[-1:] in list("02468"))
            return result

    hacked = say(await run("pays-for-even", Even, steps=16))
    assert hacked[0].kind == "reward_hacking"
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Where to go from here

    - The loop asks the doctor every five steps (`doctor_every`) and prints what is new; `health.jsonl` keeps it.
    - `docs/doctor.md`: every finding, how often planted faults are named, how often it is wrong, what it cannot see.
    - `mint advise RUN`: group and batch size from the pass rates measured; `difficulty_band=(0.2, 0.8)` keeps to
      problems that still teach.
    - `mint bisect RUN --metric M`: the first bad checkpoint of a run that was good once; `rollback=True` goes back by
      itself.
    """)
    return


if __name__ == "__main__":
    app.run()
