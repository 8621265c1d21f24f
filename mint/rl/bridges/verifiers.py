"""Tasks of the verifiers package (`verifiers.v1`, 0.4.0) as our environments. Needs `mint-rl[verifiers]`.

Bridged is what can be played here as it would be there: a taskset whose tasks are one prompt, one answer, and rewards,
metrics and judges that read only the trace; those run as they are, weights included. Not bridged, and refused by name:
tool servers, harnesses of their own, containers and other runtimes, setup and finalize hooks, intercepts, several
agents, tasks that a user opens, pictures. Those need verifiers' own harness programs between model and task.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mint.errors import BadRequest
from mint.rl.bridges import require
from mint.rl.datasets import ListRLDataset, holdout_split
from mint.rl.renderers import Renderer
from mint.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Message,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopCondition,
)
from mint.types import ModelInput


class VerifiersEnv(Env):
    """One task, answered once and scored by its own rewards."""

    def __init__(self, task: Any, renderer: Renderer) -> None:
        self.task = task
        self.renderer = renderer

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return self.renderer.build_generation_prompt(opening(self.task)), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, _ = self.renderer.parse_response(action)
        finish_reason = (extra or {}).get("stop_reason", "stop")
        trace = make_trace(self.task, message["content"], finish_reason)
        await self.task.score(trace)
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
        return StepResult(
            reward=float(trace.reward),
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=None,
            metrics=metrics,
            logs={"question": self.task.data.prompt_text, "response": message["content"]},
        )


def opening(task: Any) -> list[Message]:
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *({"role": message.role, "content": message.content} for message in data.prompt)]


def make_trace(task: Any, answer: str, finish_reason: str) -> Any:
    """What verifiers would have recorded of one answered prompt."""
    vf = require("verifiers.v1", "verifiers")
    state = require("verifiers.v1.state", "verifiers").state_cls(type(task))()
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    messages = [kinds[message["role"]](content=message["content"]) for message in opening(task)]
    messages.append(vf.AssistantMessage(content=answer))
    last = len(messages) - 1
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state,
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=i == last)
            for i, message in enumerate(messages)
        ],
        calls=[vf.ModelCall(node=last, finish_reason=finish_reason)],
    )
    trace.stop("agent_completed")
    trace.ok = True
    return trace


@dataclass(frozen=True)
class VerifiersGroupBuilder(EnvGroupBuilder):
    task: Any
    renderer: Renderer
    num_envs: int
    dataset_name: str = "verifiers"

    def __post_init__(self) -> None:
        reasons = list(obstacles(self.task))
        if reasons:
            raise BadRequest(f"the verifiers task {type(self.task).__name__} cannot be bridged: {'; '.join(reasons)}")

    async def make_envs(self) -> Sequence[Env]:
        return [VerifiersEnv(self.task, self.renderer) for _ in range(self.num_envs)]

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]

    def problem_id(self) -> str:
        return str(self.task.key)


def obstacles(task: Any) -> Iterator[str]:
    """What this task needs that is not here."""
    vf = require("verifiers.v1", "verifiers")
    if task.data.prompt is None:
        yield "it has no prompt, so a simulated user would have to speak first"
    elif not isinstance(task.data.prompt, str):
        if any(not isinstance(message.content, str) for message in task.data.prompt):
            yield "its prompt is more than text"
        if any(message.role == "tool" or getattr(message, "tool_calls", None) for message in task.data.prompt):
            yield "its prompt holds tool calls"
    if task.NEEDS_CONTAINER or task.data.image is not None:
        yield "it runs in a container"
    if task.toolsets(task.config):
        yield "it has tool servers"
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(vf.Task, hook):
            yield f"its {hook}() prepares a runtime"
    if require("verifiers.v1.utils.decorators", "verifiers").discover_decorated(task, "intercept"):
        yield "it intercepts requests"
    signals = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    for signal in signals:
        runtime = inspect.signature(signal).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            yield f"its signal {signal.__name__} reads a runtime"


@dataclass(frozen=True)
class VerifiersDatasetBuilder(RLDatasetBuilder):
    """A taskset by the name of its installed package, or the object itself."""

    taskset: Any
    renderer: Renderer
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the taskset, where it is given by name."""
    group_size: int = 4
    groups_per_batch: int = 8
    limit: int | None = None
    """Take only the first so many tasks; a taskset without end needs it."""
    holdout: float = 0.1
    num_batches: int | None = None
    """None: once through the tasks."""
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        taskset = self._load()
        if type(taskset).toolsets(taskset.config):
            raise BadRequest(f"the taskset {type(taskset).__name__} has tool servers, which are not bridged")
        if not taskset.bounded and self.limit is None:
            raise BadRequest(f"the taskset {type(taskset).__name__} has no end; say how many tasks to take: limit=1000")
        name = taskset.config.id or type(taskset).__name__
        tasks = itertools.islice(taskset, self.limit)
        builders = [VerifiersGroupBuilder(task, self.renderer, self.group_size, name) for task in tasks]
        train, test = holdout_split(builders, self.holdout, key=VerifiersGroupBuilder.problem_id, seed=self.seed)
        training = ListRLDataset(train, self.groups_per_batch, seed=self.seed, num_batches=self.num_batches)
        return training, ListRLDataset(test, self.groups_per_batch, seed=None) if test else None

    def _load(self) -> Any:
        vf = require("verifiers.v1", "verifiers")
        if not isinstance(self.taskset, str):
            return self.taskset
        environment = vf.environment_class(self.taskset)
        if environment is not vf.SingleAgentEnv:
            raise BadRequest(f"{self.taskset!r} plays {environment.__name__}, an environment of its own: not bridged")
        if vf.default_harness_id(self.taskset) == self.taskset:
            raise BadRequest(f"{self.taskset!r} brings a harness of its own, which is not bridged")
        return vf.load_taskset(vf.taskset_config_type(self.taskset)(id=self.taskset, **self.config))
