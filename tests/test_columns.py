"""A batch in columns says the same as its datums, and is judged as they are one by one."""

import pickle
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mint.checks import check_data
from mint.columns import Columns, compact, token_count
from mint.errors import BadRequest
from mint.mistakes import check_plausible, warnings_about
from mint.types import Datum, EncodedTextChunk, ModelInput
from mint.wire import ForwardBackwardCall, forward_backward_from_proto, forward_backward_to_proto


def rl(prompt: list[int], answer: list[int], **changed: list[float]) -> Datum:
    full, before = prompt + answer, len(prompt) - 1
    inputs = {
        "target_tokens": full[1:],
        "logprobs": [0.0] * before + [-0.5] * len(answer),
        "advantages": [0.0] * before + [1.0] * len(answer),
    }
    return Datum(ModelInput.from_ints(full[:-1]), inputs | changed)


BATCH = [rl([1, 2, 3], [4, 5]), rl([6, 7], [8, 9, 1, 2]), rl([3], [5])]


def test_columns_hold_the_datums_they_were_made_of() -> None:
    columns = Columns.of(BATCH)
    assert columns is not None
    assert list(columns) == BATCH == columns[:]
    assert columns[1] == BATCH[1] and columns[-1] == BATCH[-1]
    assert token_count(columns) == token_count(BATCH) == 4 + 5 + 1
    assert pickle.loads(pickle.dumps(columns)) == BATCH
    assert columns.starts.tolist() == [0, 4, 9]


def test_chunks_of_one_input_are_one_run_of_tokens() -> None:
    whole = BATCH[0]
    halves = ModelInput([EncodedTextChunk([1, 2]), EncodedTextChunk([3, 4])])
    assert compact([Datum(halves, whole.loss_fn_inputs)]) == [whole]


@pytest.mark.parametrize(
    "other",
    [
        Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]}),
        Datum(
            ModelInput.from_ints([1, 2]), {"target_tokens": [[2, 3], [3, 4]], "logprobs": [0, 0], "advantages": [0, 0]}
        ),
        rl([1, 2], [3], logprobs=[0.0, 0.0, 0.0]),
        Datum(ModelInput([EncodedTextChunk([2**70])]), {"target_tokens": [1], "logprobs": [0], "advantages": [0]}),
        Datum(ModelInput([EncodedTextChunk(np.ones((2, 2)))]), {"target_tokens": [1] * 2}),
    ],
    ids=["other inputs", "soft targets", "another length", "no token", "no run of tokens"],
)
def test_what_columns_cannot_tell_stays_as_it_is(other: Datum) -> None:
    data = [*BATCH, other]
    assert Columns.of(data) is None
    assert compact(data) is data
    assert Columns.of([]) is None


def test_a_batch_in_columns_is_sent_as_its_datums_are() -> None:
    plain, columns = (
        forward_backward_to_proto(ForwardBackwardCall("m", 3, data, "importance_sampling", {"temperature": 0.5}))
        for data in (BATCH, compact(BATCH))
    )
    arrived = [forward_backward_from_proto(body) for body in (plain, columns)]
    assert arrived[0] == arrived[1]
    assert isinstance(arrived[0].data, Columns) and arrived[0].data == BATCH


def verdict(check: Callable[[Sequence[Datum]], object], data: Sequence[Datum]) -> str | None:
    try:
        check(data)
    except BadRequest as error:
        return str(error)
    return None


def _spoilt(rng: random.Random) -> Datum:
    """A datum with one thing about it changed, most often for the worse."""
    prompt, answer = ([rng.randrange(9) for _ in range(rng.randint(1, 5))] for _ in range(2))
    good = rl(prompt, answer)
    arrays = {key: tensor.to_numpy().copy() for key, tensor in good.loss_fn_inputs.items()}
    tokens = good.model_input.to_ints()
    size = len(tokens)
    at = rng.randrange(size)
    kind = rng.randrange(14)
    if kind == 0:
        arrays["target_tokens"][at] = 12
    elif kind == 1:
        arrays["logprobs"][at] = rng.choice([np.nan, np.inf, 0.5, 0.0])
    elif kind == 2:
        arrays["advantages"] = np.ones(size, np.float32)
    elif kind == 3:
        arrays["weights"] = (arrays["advantages"] == 0).astype(np.float32)
    elif kind == 4:
        arrays["weights"] = np.array([rng.randrange(2) for _ in range(size)], np.float32)
        arrays["mask"] = arrays["weights"].copy()
        arrays["mask"][at] += rng.randrange(2)
    elif kind == 5:
        arrays["target_tokens"] = np.array(tokens)
    elif kind == 6:
        arrays["advantages"] = np.roll(arrays["advantages"], rng.choice([-1, 1]))
    elif kind == 7:
        arrays["advantages"][:] = 0
    elif kind == 8:
        arrays["logprobs"][:] = 0
    elif kind == 9:
        tokens[at] = rng.choice([-1, 11])
    return Datum(ModelInput.from_ints(tokens), arrays)


def test_a_batch_is_judged_in_columns_as_datum_by_datum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of each datum are the reference: with columns out of the way they are all there is."""
    rng = random.Random(0)
    batches: list[list[Datum]] = []
    for _ in range(1500):
        spoilt, beside = _spoilt(rng), _spoilt(rng)
        batches.append([*BATCH, spoilt] if rng.random() < 0.5 else [spoilt] * rng.randint(1, 3) + [beside])

    def judge(data: list[Datum]) -> tuple[str | None, str | None, list[str]]:
        right = verdict(lambda given: check_data(given, "importance_sampling", 10, 8), data)
        if right is not None:
            return right, None, []
        plausible = verdict(lambda given: check_plausible(given, "importance_sampling"), data)
        return None, plausible, list(warnings_about(data, "importance_sampling"))

    assert sum(Columns.of(data) is not None for data in batches) > 1000
    in_columns = [judge(data) for data in batches]
    monkeypatch.setattr(Columns, "of", staticmethod(lambda data: None))
    one_by_one = [judge(data) for data in batches]
    assert in_columns == one_by_one
    kinds = [(right is not None, plausible is not None, bool(warned)) for right, plausible, warned in one_by_one]
    for kind in [(True, False, False), (False, True, False), (False, False, True), (False, False, False)]:
        assert kinds.count(kind) > 10, kind
