"""A server in a hundred lines that records what it is told and fails on demand.

Its model is a table of next-token logits (a bigram model), so losses and gradients can be computed by hand.
"""

import asyncio
import json
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mint import types, wire

VOCABULARY = 11


@dataclass
class Received:
    path: str
    method: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> tuple[bytes, str]:
        if isinstance(self.body, bytes):
            return self.body, wire.PROTOBUF
        return json.dumps(self.body).encode(), wire.JSON


class Stub:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.received: list[Received] = []
        self.faults: dict[str, deque[Answer]] = defaultdict(deque)
        self.results: dict[str, Answer] = {}
        self.logits = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
        self.gradient = np.zeros_like(self.logits)
        self.let_go = threading.Event()
        """While it is not set, polls for results are kept waiting."""
        self.let_go.set()
        self.polls_open = self.most_polls_open = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {k.decode().lower(): v.decode() for k, v in scope["headers"]}
        path = scope["path"].removeprefix("/api/v1/")
        request = Received(path, scope["method"], headers, body)
        self.received.append(request)
        answer = self.faults[path].popleft() if self.faults[path] else await self.answer(request)
        content, kind = answer.encoded()
        named = {"content-type": kind, "content-length": str(len(content))} | answer.headers
        pairs = [(k.encode(), v.encode()) for k, v in named.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
        await send({"type": "http.response.body", "body": content})

    def said(self, path: str) -> list[Any]:
        return [r.json for r in self.received if r.path == path]

    def paths(self) -> list[str]:
        return [r.path for r in self.received if r.path != "session_heartbeat"]

    # ----------------------------------------------------------------------------------------------------------------

    async def answer(self, request: Received) -> Answer:
        match request.path.split("/"):
            case ["client", "config"]:
                return Answer(self.settings)
            case ["create_session"]:
                return Answer({"session_id": "s"})
            case ["create_model"]:
                return self.future({"model_id": f"s:train:{request.json['model_seq_id']}"})
            case ["create_sampling_session"]:
                return Answer({"sampling_session_id": f"s:sample:{request.json['sampling_session_seq_id']}"})
            case ["forward_backward"]:
                return self.forward_backward(request)
            case ["optim_step"]:
                return self.future({"metrics": {}})
            case ["save_weights_for_sampler"]:
                return self.save_for_sampler(request.json)
            case ["save_weights"]:
                return self.future({"path": f"tinker://s:train:0/weights/{request.json['path']}"})
            case ["load_weights"]:
                return self.future({"path": request.json["path"]})
            case ["weights_info"]:
                return Answer({"base_model": "base", "is_lora": True, "lora_rank": 8, "train_mlp": False})
            case ["asample"]:
                return self.sample(request.json)
            case ["retrieve_future"]:
                return await self.retrieve(request.json["request_id"])
            case ["join_sampling_session"]:
                return Answer({"client_counter": 7})
            case ["auth", "token"]:
                return Answer({"jwt": "opaque"})
        return Answer({})

    def future(self, result: Any, **envelope: Any) -> Answer:
        request_id = f"f{len(self.results)}"
        self.results[request_id] = Answer(result)
        return Answer({"request_id": request_id} | envelope)

    async def retrieve(self, request_id: str) -> Answer:
        self.polls_open += 1
        self.most_polls_open = max(self.most_polls_open, self.polls_open)
        while not self.let_go.is_set():
            await asyncio.sleep(0.002)
        self.polls_open -= 1
        return self.results[request_id]

    def save_for_sampler(self, body: dict[str, Any]) -> Answer:
        if "path" in body:
            return self.future({"path": f"tinker://s:train:0/sampler_weights/{body['path']}"})
        return self.future({"sampling_session_id": f"s:sample:{body['sampling_session_seq_id']}"})

    def sample(self, body: dict[str, Any]) -> Answer:
        """Every sample is one token: the number of its request, modulo the vocabulary."""
        n = body.get("num_samples", 1)
        sequence = types.SampledSequence([body["seq_id"] % VOCABULARY], [-1.0], "length")
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        logprobs = [None] + [-float(token) for token in prompt[1:]] if body.get("prompt_logprobs") else None
        response = types.SampleResponse([sequence] * n, prompt_logprobs=logprobs)
        ids = [f"{body['seq_id']}-{i}" for i in range(n)]
        return self.future(wire.sample_response_to_proto(response), sample_sequence_ids=ids)

    def forward_backward(self, request: Received) -> Answer:
        body = request.body
        if request.headers.get("content-encoding") == "zstd":
            import zstandard

            body = zstandard.decompress(body)
        call = wire.forward_backward_from_proto(body)
        outputs, loss = [], 0.0
        for datum in call.data:
            inputs, targets = np.array(datum.model_input.to_ints()), datum.loss_fn_inputs["target_tokens"].to_numpy()
            logprob, slope, part = self.datum_loss(call.loss_fn, inputs, targets, datum)
            outputs.append({"logprobs": types.TensorData(logprob, "float32")})
            loss += part
            if not call.forward_only:
                self.backpropagate(inputs, targets, slope)
        result = types.ForwardBackwardOutput(outputs, {"loss:sum": loss, "datums:mean": float(len(outputs))})
        return self.future(wire.forward_backward_output_to_proto(result))

    def datum_loss(
        self, loss_fn: str, inputs: np.ndarray, targets: np.ndarray, datum: types.Datum
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """The targets' log-probs, the slope of the loss in each of them, and the loss."""
        logits = self.logits[inputs]
        logprob = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(inputs)), targets]
        given = {key: tensor.to_numpy() for key, tensor in datum.loss_fn_inputs.items()}
        if loss_fn == "cross_entropy":
            return logprob, -given["weights"], float(-(given["weights"] * logprob).sum())
        ratio = np.exp(logprob - given["logprobs"])
        return logprob, -ratio * given["advantages"], float(-(ratio * given["advantages"]).sum())

    def backpropagate(self, inputs: np.ndarray, targets: np.ndarray, slope: np.ndarray) -> None:
        probabilities = np.exp(self.logits[inputs])
        probabilities /= probabilities.sum(-1, keepdims=True)
        for token, target, p, s in zip(inputs, targets, probabilities, slope, strict=True):
            self.gradient[token] -= s * p
            self.gradient[token, target] += s
