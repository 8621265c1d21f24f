"""One client of the fault campaign: a fixed training program, told line by line as JSON.

    python faults_client.py mint|tinker ADDRESS STEPS [patient]

The same with our client and with the official SDK. It knows nothing of kills; `patient` makes it go on when a save is
refused because the disk is full.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def first_contact(tinker: Any, address: str) -> Any:
    """A server that never answered before may be a wrong address, so clients do not wait for it for long."""
    while True:
        try:
            service = tinker.ServiceClient(base_url=address, api_key="tml-faults")
            service.get_server_capabilities()
            return service
        except Exception:
            time.sleep(0.5)


def main(package: str, address: str, steps: int, patient: bool) -> None:
    tinker = importlib.import_module(package)
    types = tinker.types
    service = first_contact(tinker, address)
    training = service.create_lora_training_client("mint/tiny", rank=4, seed=11)
    tell(model=training.model_id)

    def datum(n: int) -> Any:
        tokens = [3 + (7 * n + k * k) % 200 for k in range(12)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 11}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    refused = set()

    def save(name: str) -> str | None:
        try:
            path = training.save_state(name).result().path
        except Exception as error:
            if name in refused and "exists already" in str(error):  # see "What is not promised" in docs/durability.md
                path = f"tinker://{training.model_id}/weights/{name}"
            elif patient and "full" in str(error):
                refused.add(name)
                tell(refused=name)
                return None
            else:
                raise
        tell(saved=path)
        return path

    saved = None
    for n in range(steps):
        passes = [training.forward_backward([datum(n), datum(n + 1)], "cross_entropy")]
        if n % 3 == 0:
            passes.append(training.forward_backward([datum(n + 2)], "cross_entropy"))
        # All of them, because the defaults of the two clients differ.
        adam = types.AdamParams(
            learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0
        )
        step = training.optim_step(adam)
        losses = [p.result().metrics["loss:sum"] for p in passes]
        step.result()
        tell(step=n, losses=losses)
        if n % 4 == 3:
            saved = save(f"step-{n}") or saved
        if n % 5 == 2:
            sampler = training.save_weights_and_get_sampling_client()
            prompt = types.ModelInput.from_ints([5, 6, 7])
            params = types.SamplingParams(max_tokens=6, seed=n, temperature=1.0)
            samples = [sampler.sample(prompt, 2, params) for _ in range(3)]
            tell(sampled=[s.tokens for sample in samples for s in sample.result().sequences])
        if n % 9 == 8 and saved is not None and not patient:
            training.load_state_with_optimizer(saved).result()
            tell(loaded=saved)
    while save("final") is None:
        pass
    tell(finished=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), "patient" in sys.argv[4:])
