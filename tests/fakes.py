"""A backend without a model: instant, deterministic, and able to be slow or to fail on demand."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from mint.backend import AdapterFacts, ModelFacts, OnTokens
from mint.errors import BadRequest, Interrupted, NotFound
from mint.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TensorData,
)

TINY = Path(__file__).parent.parent / "mint" / "models" / "tiny"


class FakeBackend:
    """Implements `mint.backend.Backend`. Calls are recorded in order; `hold` makes them wait until `let_go`."""

    def __init__(self, models: Sequence[str] = ("mint/tiny",), words: Sequence[int] = (72, 105, 258)) -> None:
        self.words = list(words)
        """Every sample, cut to max_tokens; by default "Hi" and the end of turn of mint/tiny."""
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Exception] = {}
        """Method name to the error its futures get."""
        self.steps: defaultdict[str, int] = defaultdict(int)
        """Optimizer steps of each adapter: stands for its weights."""
        self.policies: dict[str, int] = {}
        self.adapters: dict[str, LoraConfig] = {}
        self.closed = False
        self.generation = 0
        self.deadly: str | None = None
        """Method name of the calls that kill the engine."""
        self._models = list(models)
        self._futures: list[tuple[str, Future[Any]]] = []
        self._held: list[Callable[..., None]] | None = None
        self._lock = threading.Lock()

    # Control --------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        self._held = []

    def let_go(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
        for finish in held:
            finish()

    def forget_held(self) -> None:
        self._held = []

    def lose_engine(self) -> None:
        """As when the engine dies and another is started: what is held fails, and nothing is known any more."""
        with self._lock:
            held, self._held = self._held or [], None
            self.generation += 1
        for state in (self.steps, self.policies, self.adapters):
            state.clear()
        for finish in held:
            finish(True)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def cancelled(self, name: str) -> int:
        """How many of the held calls of this name were cancelled."""
        return sum(future.cancelled() for held, future in self._futures if held == name)

    def _do(self, name: str, work: Callable[[], Any], *told: Any) -> Future[Any]:
        self.calls.append((name, *told))
        future: Future[Any] = Future()
        self._futures.append((name, future))

        def finish(died: bool = False) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if name == self.deadly and not died:
                    self.lose_engine()
                    died = True
                if died:
                    raise Interrupted("the engine died")
                if name in self.fail:
                    raise self.fail[name]
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._held is not None:
                self._held.append(finish)
                return future
        finish()
        return future

    # Backend --------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return list(self._models)

    def load_model(self, base_model: str) -> Future[ModelFacts]:
        def work() -> ModelFacts:
            if base_model not in self._models:
                raise NotFound(f"no model {base_model!r}; there are {', '.join(self._models)}.")
            return ModelFacts(base_model, str(TINY), "Qwen3ForCausalLM", 264, 1024, 1000, "float32", "cpu")

        return self._do("load_model", work, base_model)

    def create_adapter(self, adapter: str, base_model: str, lora: LoraConfig) -> Future[AdapterFacts]:
        def work() -> AdapterFacts:
            self.adapters[adapter] = lora
            return AdapterFacts(1000, ("q_proj",))

        return self._do("create_adapter", work, adapter, base_model, lora)

    def forward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._do("forward", lambda: self._output(data), adapter, list(data), loss_fn, dict(config))

    def forward_backward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._do("forward_backward", lambda: self._output(data), adapter, list(data), loss_fn, dict(config))

    def _output(self, data: Sequence[Datum]) -> ForwardBackwardOutput:
        """The log-prob of a target token is minus a hundredth of its id."""
        targets = [datum.loss_fn_inputs["target_tokens"].to_numpy() for datum in data]
        outputs = [{"logprobs": TensorData((-t / 100).astype(np.float32), "float32")} for t in targets]
        return ForwardBackwardOutput(outputs, {"loss:sum": float(sum(t.sum() for t in targets)) / 100})

    def reverse_kl(
        self,
        adapter: str,
        reference: str | None,
        data: Sequence[Datum],
        reference_data: Sequence[Datum],
        temperature: float,
    ) -> Future[ForwardBackwardOutput]:
        def work() -> ForwardBackwardOutput:
            self._saved(reference) if reference is not None else None
            losses = [{"loss": TensorData.of(np.full(datum.model_input.length, 0.5, np.float32))} for datum in data]
            return ForwardBackwardOutput(losses, {"loss:sum": 1.0})

        return self._do("reverse_kl", work, adapter, reference, data, reference_data, temperature)

    def optim_step(self, adapter: str, params: AdamParams) -> Future[dict[str, float]]:
        def work() -> dict[str, float]:
            self.steps[adapter] += 1
            return {"step": float(self.steps[adapter])}

        return self._do("optim_step", work, adapter, params)

    def save_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[int]:
        def work() -> int:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "adapter_config.json").write_text('{"r": 8}')
            (Path(folder) / "adapter_model.safetensors").write_bytes(self.steps[adapter].to_bytes(8, "little"))
            return 16

        return self._do("save_adapter", work, adapter, folder, optimizer)

    def combine(self, folders: Sequence[str], coefficients: Sequence[float], folder: str) -> Future[LoraConfig]:
        def work() -> LoraConfig:
            shutil.copytree(folders[0], folder)
            return LoraConfig(rank=8 * len(folders))

        return self._do("combine", work, folders, coefficients, folder)

    def load_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[None]:
        def work() -> None:
            self.steps[adapter] = self._saved(folder)

        return self._do("load_adapter", work, adapter, folder, optimizer)

    def _saved(self, folder: str) -> int:
        file = Path(folder) / "adapter_model.safetensors"
        if not file.exists():
            raise BadRequest(f"there is no checkpoint folder {folder}.")
        return int.from_bytes(file.read_bytes()[:8], "little")

    def save_state(self, adapter: str, folder: str) -> Future[int]:
        def work() -> int:
            Path(folder).mkdir(parents=True)
            (Path(folder) / "adapter_model.safetensors").write_bytes(self.steps[adapter].to_bytes(8, "little"))
            return 8

        return self._do("save_state", work, adapter, folder)

    def load_state(self, adapter: str, folder: str) -> Future[None]:
        def work() -> None:
            self.steps[adapter] = self._saved(folder)

        return self._do("load_state", work, adapter, folder)

    def snapshot(self, adapter: str, policy: str, folder: str | None = None) -> Future[dict[str, float]]:
        def work() -> dict[str, float]:
            self.policies[policy] = self.steps[adapter]
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                (Path(folder) / "adapter_model.safetensors").write_bytes(self.steps[adapter].to_bytes(8, "little"))
            return {}

        return self._do("snapshot", work, adapter, policy)

    def load_policy(self, policy: str, base_model: str, folder: str | None) -> Future[None]:
        def work() -> None:
            self.policies[policy] = 0 if folder is None else self._saved(folder)

        return self._do("load_policy", work, policy, base_model, folder)

    def sample(self, policy: str, request: SampleRequest, on_tokens: OnTokens | None = None) -> Future[SampleResponse]:
        return self._do("sample", lambda: self._sample(policy, request, on_tokens), policy, request)

    def _sample(self, policy: str, request: SampleRequest, on_tokens: OnTokens | None) -> SampleResponse:
        """Log-probs tell the policy's steps, so that a test sees whose weights were sampled."""
        if policy not in self.policies:
            raise NotFound(f"there is no policy {policy!r}.")
        logprob = -0.5 - self.policies[policy]
        tokens = self.words[: request.sampling_params.max_tokens]
        reason = "stop" if len(tokens) == len(self.words) else "length"
        k = request.topk_sample_logprobs
        topk = [[(t, logprob), (0, -9.0)][:k] for t in tokens] if k else None
        for n in range(request.num_samples):
            for token in tokens if on_tokens else ():
                on_tokens(n, [token], [logprob])
        prompt = request.prompt.to_ints()
        tops = [None, *([(t, -t / 100)] for t in prompt[1:])]
        scores = [None, *(-t / 100 for t in prompt[1:])]
        alternatives = np.zeros((len(prompt) - 1, request.prompt_alt_tokens_k), np.int64)
        targets = request.target_prompt_logprobs
        return SampleResponse(
            sequences=[
                SampledSequence(tokens, [logprob] * len(tokens), reason, topk_logprobs=topk)
                for _ in range(request.num_samples)
            ],
            prompt_logprobs=scores if request.prompt_logprobs else None,
            topk_prompt_logprobs=tops if request.topk_prompt_logprobs else None,
            target_prompt_logprobs=targets and TensorData(np.zeros(targets.shape), "float32"),
            prompt_alt_tokens=PromptAltTokens(TensorData.of(alternatives), TensorData(alternatives, "float32"))
            if request.prompt_alt_tokens_k
            else None,
        )

    def release(self, name: str) -> Future[None]:
        def work() -> None:
            self.adapters.pop(name, None)
            self.policies.pop(name, None)

        return self._do("release", work, name)

    def stats(self) -> Future[dict[str, float]]:
        """Not recorded and never held: servers ask now and then, whatever else goes on."""
        told: Future[dict[str, float]] = Future()
        if "stats" in self.fail:
            told.set_exception(self.fail["stats"])
        else:
            told.set_result({})
        return told

    def close(self) -> None:
        self.closed = True
