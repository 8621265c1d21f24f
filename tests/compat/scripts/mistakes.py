"""What a user does wrong: each mistake is answered at once and in words, and the next good request works."""

from __future__ import annotations

import os
from typing import Any

from common import (
    MODEL,
    PATIENCE,
    SUMS,
    datum,
    encode,
    refusal,
    report,
    rest_client,
    scenario,
    scenario_of,
    sdk,
    train,
    training_client,
    types,
)

WRONG_KEY = "sk-wrong" if os.environ["COMPAT_CLIENT"] == "mint" else "tml-wrong"


def sampled(sampler: Any, tokens: list[int], **params: Any) -> Any:
    params = {"max_tokens": 2} | params
    return sampler.sample(types.ModelInput.from_ints(tokens), 1, types.SamplingParams(**params)).result(PATIENCE)


@scenario
def wrong_key() -> Any:
    return refusal(lambda: sdk.ServiceClient(api_key=WRONG_KEY).create_lora_training_client(MODEL, rank=4))


@scenario
def unknown_model() -> Any:
    service = sdk.ServiceClient()
    return {
        "training": refusal(lambda: service.create_lora_training_client("no-such/model", rank=4)),
        "sampling": refusal(lambda: service.create_sampling_client(base_model="no-such/model")),
        "path": refusal(lambda: service.create_sampling_client(model_path="tinker://nobody/sampler_weights/none")),
    }


@scenario
def bad_data() -> Any:
    """Each kind of bad datum on one model, and a good step after all of them."""
    client = training_client()
    rl = {"logprobs": [-1.0, -1.0], "advantages": [float("nan"), 1.0]}
    attempts = {
        "unequal_lengths": ([datum([65, 66, 67], weights=[1.0])], "cross_entropy"),
        "beyond_the_vocabulary": ([datum([65, 5000, 67], weights=[1.0, 1.0])], "cross_entropy"),
        "nan_advantages": ([datum([65, 66, 67], **rl)], "importance_sampling"),
        "missing_input": ([datum([65, 66, 67])], "ppo"),
        "unknown_loss": (SUMS, "no_such_loss"),
        "too_long": ([datum([65] * 4000, weights=[1.0] * 3999)], "cross_entropy"),
    }
    found = {
        name: refusal(lambda data=data, loss=loss: client.forward_backward(data, loss).result(PATIENCE))
        for name, (data, loss) in attempts.items()
    }
    return {"refusals": found, "losses": [train(client), train(client)]}


@scenario
def a_bad_datum_in_a_pipeline() -> Any:
    """Sent ahead of good requests that are not held back for its answer."""
    client = training_client()
    bad = client.forward_backward([datum([65, 66, 67], weights=[1.0])], "cross_entropy")
    good = client.forward_backward(SUMS, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=1e-3))
    return {
        "bad": refusal(lambda: bad.result(PATIENCE)),
        "loss": good.result(PATIENCE).metrics["loss:sum"],
        "step": step.result(PATIENCE).metrics is not None,
        "after": train(client),
    }


@scenario
def bad_samples() -> Any:
    sampler = sdk.ServiceClient().create_sampling_client(base_model=MODEL)
    prompt = encode("A:")
    attempts: dict[str, Any] = {
        "empty_prompt": ([], {}),
        "beyond_the_vocabulary": ([65, 5000], {}),
        "beyond_the_context": (prompt, {"max_tokens": 100_000}),
        "negative_temperature": (prompt, {"temperature": -1.0}),
    }
    found = {name: refusal(lambda t=t, p=p: sampled(sampler, t, **p)) for name, (t, p) in attempts.items()}
    return {"refusals": found, "good": len(sampled(sampler, prompt).sequences)}


@scenario_of(since=36)
def unsupported() -> Any:
    """What 0.36 can ask for and this server does not have: refused in words, never a hang."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=4)
    picture = types.ModelInput(chunks=[types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)])
    see = types.Datum(model_input=picture, loss_fn_inputs={"target_tokens": [1], "weights": [1.0]})
    rl = datum([65, 66, 67], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])
    rest, state = rest_client(service), client.save_state("state").result(PATIENCE).path
    session = service.holder.get_session_id()
    dimuon = sdk.DimuonOptimizerConfig()
    attempts = {
        "image": lambda: client.forward_backward([see], "cross_entropy").result(PATIENCE),
        "stable_reinforce": lambda: client.forward_backward([rl], "stable_reinforce").result(PATIENCE),
        "dimuon": lambda: service.create_lora_training_client(MODEL, rank=4, optimizer=dimuon),
        "age_encryption": lambda: client.save_weights_external("x", age_encryption_recipients=["age1"]).result(
            PATIENCE
        ),
        "projects": lambda: rest.assign_session_project(session, "p").result(PATIENCE),
        "copy_to_a_project": lambda: rest.copy_weights(state, "p").result(PATIENCE),
        "audit_log": lambda: sdk.AdminClient().get_audit_log().result(PATIENCE),
    }
    return {"refusals": {name: refusal(call) for name, call in attempts.items()}, "loss": train(client)}


report()
