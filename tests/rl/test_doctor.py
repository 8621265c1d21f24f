"""The doctor: names planted faults in real runs, keeps quiet on clean ones, and says the same while a run goes."""

import json
import logging
import math
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mint.errors import BadRequest
from mint.rl.doctor import Finding, Watch, diagnose, examine
from mint.rl.doctor import report as report_module
from mint.rl.doctor.evidence import Evaluation, Evidence, Sample, Step, read_evidence, sample_of
from mint.rl.doctor.finding import FOLLOWS_FROM, merged, ordered
from mint.rl.doctor.statistics import binomial_tail, change_of, change_of_values, correlation, holdout_change, moved
from mint.rl.rundir import RolloutRecord, RunDir, TurnRecord, read_jsonl
from mint.rl.strategies import RetryOnFailure
from mint.rl.train import Config, train
from tests.rl.conftest import ROOT
from tests.rl.fake_service import Batches, FakeService, HalfBuilder, HalfDataset

sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    from doctor import RUNS, folder_name, told_live
    from planted_faults import CLEAN, FAULTS, Fault
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

RECORDED = ROOT / "tests" / "data" / "doctor_runs.tar.xz"
PAGE = ROOT / "docs" / "doctor.md"


# --------------------------------------------------------------------------------------------------------------------
# Planted faults, in runs of the bundled model recorded by benchmarks/doctor.py


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("fault", [f for f in RUNS["faults"] if not f.missed], ids=lambda fault: fault.name)
def test_a_planted_fault_stands_first_in_the_report(recorded, fault):
    findings = diagnose(recorded / folder_name(fault))
    assert findings and findings[0].kind == fault.finding, [f.kind for f in findings]
    first = findings[0]
    assert first.severity in ("warning", "alarm") and first.follows_from is None
    assert first.sentence.endswith(".") and first.remedy.endswith(".") and 1 <= len(first.samples) <= 2
    assert f"`{first.kind}`" in PAGE.read_text()
    json.dumps([finding.to_json() for finding in findings])


@pytest.mark.parametrize("fault", [f for f in RUNS["faults"] if f.missed], ids=lambda fault: fault.name)
def test_a_fault_known_to_be_missed_is_missed(recorded, fault):
    """Found one day, it loses its mark."""
    assert fault.finding not in {finding.kind for finding in diagnose(recorded / folder_name(fault))}


@pytest.mark.parametrize("clean", RUNS["clean"], ids=lambda clean: clean.name)
def test_a_clean_run_raises_no_alarm(recorded, clean):
    assert [f.lines() for f in diagnose(recorded / folder_name(clean)) if f.severity != "notice"] == []


@pytest.mark.parametrize("clean", RUNS["clean"][::4], ids=lambda clean: clean.name)
def test_a_clean_run_raises_no_alarm_while_it_goes(recorded, clean):
    run = RunDir(recorded / folder_name(clean))
    alarms = {f.kind for f in diagnose(run)} | set(told_live(run))
    assert alarms <= {"saturation", "no_progress", "truncated", "length_drift", "all_right", "never_positive"}


@pytest.mark.parametrize("fault", FAULTS[::4], ids=lambda fault: fault.name)
def test_one_step_is_too_little_for_any_alarm_but_facts(recorded, fault):
    run = read_evidence(RunDir(recorded / folder_name(fault)))
    facts = {"stop_token_missing", "truncated", "stops_at_once", "wrong_tokenizer", "leaked_holdout", "wrong_advantage"}
    facts |= {"mask", "reward_sign", "rejects_reference", "contradictory_grades", "grader_errors"}
    kinds = {f.kind for f in examine(run.window(0, 0)) if f.severity != "notice"}
    assert kinds <= facts


def test_what_is_not_a_run_directory_is_refused(tmp_path):
    with pytest.raises(BadRequest, match=r"no config\.json"):
        diagnose(tmp_path)


def test_a_run_without_a_step_has_no_findings(tmp_path):
    RunDir(tmp_path).write_config({})
    assert diagnose(tmp_path) == []


# --------------------------------------------------------------------------------------------------------------------
# Live, on a real server


def fault_named(name: str) -> Fault:
    return next(fault for fault in [*FAULTS, *CLEAN] if fault.name == name)


def test_a_fault_is_told_while_the_run_goes(tiny_server, tmp_path):
    """Five more such runs are in tutorial 04, which has a test of its own."""
    fault = fault_named("stale sampler")
    with fault.run_with(tmp_path / "run", tiny_server) as config:
        run = train(config)
    assert diagnose(run)[0].kind == fault.finding
    told = read_jsonl(run.health_file)
    assert fault.finding in {line["kind"] for line in told}
    assert all(0 <= line["step"] <= config.dataset_builder.batches for line in told)


def test_a_clean_run_is_left_in_peace(tiny_server, tmp_path):
    run = train(fault_named("default, seed 1").config(tmp_path / "run", tiny_server))
    assert [f.kind for f in diagnose(run) if f.severity != "notice"] == []
    assert [line for line in read_jsonl(run.health_file) if line["severity"] != "notice"] == []
    assert change_of(read_evidence(run), "reward").size > 0


def test_the_findings_of_the_loop_are_those_of_the_report(recorded, tmp_path):
    for fault in FAULTS[:30:3]:
        source = RunDir(recorded / folder_name(fault))
        watch = Watch(RunDir(tmp_path / folder_name(fault)), source.config(), every=5)
        for line in source.metrics():
            if line["step"] in source.rollout_steps("test"):
                watch.add_evaluation(line["step"], "test", source.rollouts(line["step"], "test"))
            if line["step"] in source.rollout_steps():
                watch.add_step(line["step"], line, source.rollouts(line["step"]))
        assert [f.kind for f in watch.look(99)] == [f.kind for f in diagnose(source)]


# --------------------------------------------------------------------------------------------------------------------
# False alarms, where the truth is known: draws from a policy that does not change


def a_sample(**fields: object) -> Sample:
    values: dict[str, object] = {
        "step": 0, "group": 0, "member": 0, "problem": "p", "prompt": "Q", "completion": "A", "reference": None,
        "prompt_key": 0, "completion_key": 0, "reward": 0.0, "terms": {}, "advantage": None, "sent": None,
        "sent_spread": 0.0, "uneven": False, "version": 0, "temperature": 1.0, "length": 5, "cut_off": False,
        "repeats": False,
        "surprise": 0.4, "gap": 1e-6, "shifted_gap": 0.5, "agrees": None, "misread": None, "garbled": False,
        "end_inside": False, "logprobs": (), "tokens": (), "exact": None, "response": "", "trained": False,
        "prompt_length": 20, "ended_by": "<end>", "oddity": None, "turns": 1, "last_turn_only": False,
    }  # fmt: skip
    return Sample(**(values | fields))


def unchanging_run(rng: np.random.Generator, steps: int, groups: int, size: int) -> Evidence:
    """Problems of very different difficulty, lengths and entropies; evaluations of forty of them."""

    def draw(step: int, group: int, member: int, problem: int, rate: float, base: float) -> Sample:
        reward = float(rng.random() < rate)
        return a_sample(
            step=step, group=group, member=member, problem=str(problem), prompt_key=problem, version=step,
            completion_key=int(rng.integers(4)) + 10 * problem + 5 * int(reward), reward=reward,
            terms={"correct": reward, "format": float(rng.random() < 0.9)}, length=int(rng.integers(3, 9)),
            surprise=float(base * rng.lognormal(0, 0.5)), agrees=bool(reward), gap=float(rng.lognormal(-13, 1)),
        )  # fmt: skip

    lines, count = [], 0
    for number in range(steps):
        samples = []
        for group in range(groups):
            count += 1
            rate, base = rng.beta(1.2, 2), rng.lognormal(-1, 0.5)
            members = [draw(number, group, member, count, rate, base) for member in range(size)]
            mean = float(np.mean([s.reward for s in members]))
            samples += [replace(s, advantage=s.reward - mean, sent=s.reward - mean) for s in members]
        metrics = {
            "env/all/reward/total": float(np.mean([s.reward for s in samples])), "train/optim_steps": 1.0,
            "optim/grad_norm": float(rng.lognormal(3, 0.4)), "optim/lr": 1e-5, "optim/update_norm": 0.01,
            "optim/weight_norm": 10.0, "sampling/temperature": 1.0, "env/all/by_group/frac_mixed": 0.7,
        }  # fmt: skip
        lines.append(Step(number, metrics, samples))
    rates = rng.beta(1.2, 2, size=40)
    evaluations = []
    for version in range(0, steps + 1, 10):
        held_out = [draw(version, i, 0, 10_000 + i, rate, 0.4) for i, rate in enumerate(rates)]
        tokens = [
            replace(s, tokens=(1, 2, 3), logprobs=tuple(-0.3 + 0.01 * version + rng.normal(0, 0.01, 3)))
            for s in held_out
        ]
        evaluations.append(Evaluation(version, tokens))
    return Evidence({"temperature": 1.0, "max_lag": 0}, lines, evaluations)


def test_chance_alone_raises_no_alarm():
    rng = np.random.default_rng(0)
    for trial in range(30):
        steps, groups, size = [(10, 8, 4), (40, 8, 4), (20, 4, 8)][trial % 3]
        run = unchanging_run(rng, steps, groups, size)
        found = [f for last in range(9, steps, 10) for f in examine(run.window(0, last)) if f.severity != "notice"]
        assert not found, (trial, found[0].lines())


# --------------------------------------------------------------------------------------------------------------------
# The tests behind it


def test_a_change_is_that_of_the_ends_in_standard_errors():
    values = [0.0, 0.1, 0.2, 5.0, 5.0, 5.0, 1.0, 1.1, 1.2]
    change = change_of_values(values, [0.1] * 9)
    assert change.before == pytest.approx(0.1) and change.after == pytest.approx(1.1)
    assert change.error == pytest.approx(math.sqrt(2) * math.sqrt(math.pi / 2) * 0.1 / math.sqrt(3))
    assert change.sure == pytest.approx(1.0 / change.error)
    assert change_of_values(values[:5]) is None


def test_one_odd_step_makes_no_trend():
    steady = [0.3 + 0.01 * (i % 2) for i in range(20)]
    odd = [*steady[:17], 90.0, *steady[18:]]
    assert change_of_values(odd, [0.02] * 17 + [9.0] + [0.02] * 2).size == pytest.approx(0, abs=0.01)


def test_the_sign_test_counts_as_a_coin_does():
    assert binomial_tail(3, 3) == 1 / 8 and binomial_tail(2, 3) == 4 / 8 and binomial_tail(0, 5) == 1
    before = Evaluation(0, [a_sample(group=i, reward=1.0) for i in range(12)])
    after = Evaluation(5, [a_sample(group=i, reward=float(i == 0)) for i in range(12)])
    change = holdout_change(Evidence({}, [], [before, after]))
    assert (change.rose, change.fell) == (0, 11) and change.chance_of_fall == 2**-11
    assert change.size == pytest.approx(-11 / 12)


def test_few_or_constant_pairs_have_no_correlation():
    assert correlation([1.0] * 40, list(range(40))) is None
    assert correlation([1.0, 2.0], [2.0, 4.0]) is None
    assert correlation(list(range(40)), [-2.0 * i for i in range(40)]) == pytest.approx(-1)


def test_movement_is_measured_on_the_tokens_two_answers_begin_with():
    before = Evaluation(0, [a_sample(tokens=(1, 2, 3), logprobs=(-1.0, -2.0, -3.0))])
    after = Evaluation(5, [a_sample(tokens=(1, 2, 9), logprobs=(-1.5, -2.1, -9.0))])
    assert moved(before, after) == (pytest.approx(0.3), 2)
    assert moved(before, Evaluation(5, [a_sample(tokens=(7,), logprobs=(-1.0,))])) is None


# --------------------------------------------------------------------------------------------------------------------
# What is read off a rollout


def a_record(completion: str, **fields: object) -> RolloutRecord:
    logs = fields.pop("logs", {})
    tokens = [ord(c) for c in completion]
    values: dict[str, object] = {
        "step": 0, "group": 0, "member": 0, "policy_version": 0, "temperature": 1.0, "reward": 0.0,
        "prompt_text": "Q: 1 + 1?", "completion_text": completion, "completion_tokens": tokens,
        "completion_pieces": list(completion), "mask": [1] * len(tokens), "logprobs": [-0.5] * len(tokens),
        "turns": [TurnRecord(0, len(tokens), logs=logs)],
    }  # fmt: skip
    return RolloutRecord(**(values | fields))


def test_the_reference_must_stand_in_the_response_as_a_word():
    def agrees(response: str) -> bool | None:
        return sample_of(a_record(response, logs={"reference": "12", "response": response})).agrees

    assert agrees("it is 12.") and not agrees("it is 112") and not agrees("twelve")
    assert sample_of(a_record("12")).agrees is None


def test_a_question_the_model_does_not_read_is_noticed():
    assert sample_of(a_record("2", logs={"question": "Q: 1 + 1?", "response": " 2"})).misread is None
    assert sample_of(a_record("2", logs={"question": "Q: 1 + 2?"})).misread == "prompt"
    assert sample_of(a_record("2<|im_end|>2", logs={"response": "22"})).misread is None
    assert sample_of(a_record("2", logs={"response": "3"})).misread == "response"


def test_an_end_token_counts_only_before_the_end_of_its_turn():
    pieces = ["4", "<|im_end|>", "5"]
    inside = a_record("4e5", completion_pieces=pieces)
    turns = [TurnRecord(0, 2), TurnRecord(2, 3)]
    assert sample_of(inside).end_inside and not sample_of(replace(inside, turns=turns)).end_inside


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ("eeeeeeeeee", True),
        ("can be very can be very can be very ", True),
        (" 111", False),
        ("A shy fox is calm.", False),
    ],
)
def test_repetition_is_half_of_the_pieces_standing_elsewhere_too(text, repeats):
    assert sample_of(a_record(text)).repeats is repeats


def test_a_rollout_without_tokens_is_no_trouble():
    sample = sample_of(a_record("", turns=[]))
    assert sample.length == 0 and sample.gap is None and not sample.garbled


# --------------------------------------------------------------------------------------------------------------------
# Order


def a_finding(kind: str, likelihood: float = 0.5, **fields: object) -> Finding:
    return Finding(
        kind, fields.pop("severity", "alarm"), fields.pop("steps", (0, 9)), "It is so.", "Mend it.", likelihood
    )


def test_an_effect_stands_behind_its_cause():
    findings = ordered([a_finding("all_wrong", 0.9), a_finding("truncated", 0.8), a_finding("stop_token_missing", 0.6)])
    assert [f.kind for f in findings] == ["stop_token_missing", "all_wrong", "truncated"]
    assert findings[1].follows_from == "truncated" and findings[2].follows_from == "stop_token_missing"


def test_a_notice_explains_nothing():
    notice = a_finding("length_drift", 0.9, severity="notice")
    assert ordered([notice, a_finding("truncated")])[1].follows_from is None


def test_no_finding_follows_from_itself():
    assert all(effect not in causes for effect, causes in FOLLOWS_FROM.items())


def test_findings_of_one_kind_become_one():
    both = merged([a_finding("spike", steps=(3, 5), severity="warning"), a_finding("spike", steps=(20, 30))])
    assert len(both) == 1 and both[0].steps == (3, 30) and both[0].severity == "alarm"


def test_what_went_wrong_late_in_a_long_run_is_found():
    calm, rng = [], np.random.default_rng(1)
    for number in range(100):
        rate = 0.0 if number >= 80 else 0.5
        samples = [
            a_sample(step=number, group=g, member=m, prompt_key=100 * number + g, version=number,
                     completion_key=int(rng.integers(10**6)), reward=float(rng.random() < rate))
            for g in range(8) for m in range(4)
        ]  # fmt: skip
        calm.append(Step(number, {}, samples))
    run = Evidence({}, calm)
    assert examine(run.window(0, 39)) == []
    assert {f.kind for f in examine(run.window(60, 99))} == {"all_wrong", "reward_fell"}


# --------------------------------------------------------------------------------------------------------------------
# In the loop


def fake_config(tmp_path: Path, **fields: object) -> Config:
    values: dict[str, object] = {"learning_rate": 0.05, "eval_every": 0, "save_every": 4} | fields
    return Config(
        dataset_builder=HalfDataset(num_batches=8, groups_per_batch=8, group_size=1), model_name="fake",
        recipe_name="test", max_tokens=4, log_path=str(tmp_path / "run"), loggers=(), **values,
    )  # fmt: skip


def test_a_finding_is_told_once_and_rewound_with_its_step(tmp_path):
    run = train(fake_config(tmp_path, doctor_every=2), FakeService(tmp_path / "service"))
    told = read_jsonl(run.health_file)
    kinds = [line["kind"] for line in told if line["severity"] != "notice"]
    assert kinds == ["group_of_one", "truncated"] and [line["step"] for line in told][:2] == [1, 3]
    run.rewind(3)
    assert [line["kind"] for line in read_jsonl(run.health_file)] == ["group_of_one"]


def test_a_resumed_run_takes_up_the_window_where_it_was(tmp_path):
    run = train(fake_config(tmp_path, doctor_every=2), FakeService(tmp_path / "service"))
    watch = Watch(run, run.config(), every=2)
    assert [step.number for step in watch.steps] == list(range(8)) and watch.look(8) == []
    assert [f.kind for f in Watch(RunDir(tmp_path / "empty"), {}, every=2).look(0)] == []


class Failing(HalfDataset):
    async def __call__(self):
        train_set, _ = await super().__call__()
        return Batches([[FailingBuilder(b.prompt) for b in batch] for batch in train_set.batches]), None


class FailingBuilder(HalfBuilder):
    async def compute_group_rewards(self, trajectory_group, env_group):
        raise RuntimeError("no judge today")


def test_a_run_in_which_every_rollout_fails_is_told_apart(tmp_path):
    config = replace(
        fake_config(tmp_path), dataset_builder=Failing(8, 8, 4), rollout_error_tolerance=RetryOnFailure(0), holdout=0.0
    )
    run = train(config, FakeService(tmp_path / "service"))
    findings = diagnose(run)
    assert [f.kind for f in findings] == ["grader_errors"] and findings[0].severity == "alarm"
    assert "RuntimeError" in findings[0].sentence


def test_the_doctor_can_be_sent_away(tmp_path):
    run = train(fake_config(tmp_path, doctor_every=0), FakeService(tmp_path / "service"))
    assert not run.health_file.exists()


def test_a_mistake_of_the_doctors_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def broken(run: Evidence) -> list[Finding]:
        raise ZeroDivisionError

    monkeypatch.setattr(report_module, "CHECKS", (broken,))
    with caplog.at_level(logging.ERROR):
        run = train(fake_config(tmp_path), FakeService(tmp_path / "service"))
    assert len(run.metrics()) == 8 and "The doctor failed" in caplog.text
