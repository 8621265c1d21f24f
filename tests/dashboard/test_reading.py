"""Following files as they are written, and rollouts by their place in a file."""

import json
import os
from pathlib import Path

import pytest

from mint.dashboard import index as index_module
from mint.dashboard.data import Library
from mint.dashboard.index import Rollouts
from mint.dashboard.tail import JsonlTail
from mint.errors import BadRequest, NotFound
from mint.rl.rundir import RunDir, append_jsonl
from tests.dashboard.folders import GROUPS, MEMBERS, SCRIPT, STEPS, record, write_run, write_step


def test_only_new_bytes_are_read_and_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    tail = JsonlTail(file)
    assert tail.read() == (False, [{"step": 0}, {"step": 1}])
    with open(file, "r+b") as written:  # had it read the start again, it would see this
        written.write(b'{"step": 9}')
    with open(file, "ab") as more:
        more.write(b'ep": 2}\n')
    assert tail.read() == (False, [{"step": 2}])
    assert not tail.changed and tail.read() == (False, [])


def test_a_file_that_is_replaced_or_cut_short_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n')
    tail = JsonlTail(file)
    tail.read()
    other = tmp_path / "other"
    other.write_text('{"step": 5}\n{"step": 6}\n')
    os.replace(other, file)
    assert tail.changed and tail.read() == (True, [{"step": 5}, {"step": 6}])
    file.write_text('{"step": 7}\n')
    assert tail.read() == (True, [{"step": 7}])
    file.unlink()
    assert tail.changed and tail.read() == (True, [])


def test_a_broken_line_is_noted_by_number_and_the_rest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\nnot json\n[1]\n{"step": 1}\n')
    tail = JsonlTail(file)
    assert tail.read()[1] == [{"step": 0}, {"step": 1}]
    assert [(line.file, line.line) for line in tail.broken] == [("metrics.jsonl", 2), ("metrics.jsonl", 3)]


def test_a_run_is_followed_as_it_grows_and_as_it_is_rewound(tmp_path: Path) -> None:
    written = write_run(tmp_path / "a", steps=10, done=3)
    library = Library(tmp_path)
    run = library.run("a")
    assert (run.last_step, run.total_steps, run.status) == (2, 10, "running")
    assert run.seconds_left == pytest.approx(7 * 2.0)
    before = run.version
    write_step(written, 3, 10)
    assert run.refresh() > before and run.series("env/all/reward/total").values[-1] == pytest.approx(0.55)
    written.rewind(2)
    run.refresh()
    assert run.last_step == 1 and len(run.series("optim/entropy")) == 2


def test_a_run_says_what_has_become_of_it(tmp_path: Path) -> None:
    library = Library(tmp_path)
    RunDir(tmp_path / "new").write_config({"log_path": "new"})
    assert library.run("new").status == "starting"
    old = write_run(tmp_path / "old", steps=10, done=3)
    for file in (old.config_file, old.metrics_file):
        os.utime(file, (0, 0))
    assert library.run("old").status == "stopped"
    write_run(tmp_path / "done")
    assert library.run("done").status == "finished"
    for name, steps in (("by_hand", 2), ("cut_short", 3)):
        by_hand = RunDir(tmp_path / name)
        by_hand.write_config({"steps": steps})
        for step in range(2):
            by_hand.append_metrics(step, {"reward": 0.5})
        for file in (by_hand.config_file, by_hand.metrics_file):
            os.utime(file, (0, 0))
    assert library.run("by_hand").status == "finished" and library.run("cut_short").status == "stopped"
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.json").write_text('{"log_path": "x", ')
    assert library.run("torn").status == "unreadable" and "config.json" in str(library.run("torn").config_fault)


def test_only_runs_below_the_folder_are_found(tmp_path: Path) -> None:
    inside, outside = tmp_path / "runs", tmp_path / "secret"
    write_run(inside / "deep/er/run")
    write_run(outside)
    (inside / "link").symlink_to(outside)
    (inside / "model").mkdir()
    (inside / "model/config.json").write_text('{"hidden_size": 8}\n')
    library = Library(inside)
    assert library.names() == ["deep/er/run"]
    for name in ("../secret", "link", "deep/../../secret", str(outside)):
        with pytest.raises(NotFound, match="outside"):
            library.run(name)
    with pytest.raises(BadRequest, match="not a run"):
        library.run("model")
    with pytest.raises(NotFound, match="no folder"):
        library.run("nothing")
    assert Library(outside).names() == ["secret"]  # a run directory itself


def test_the_index_holds_what_a_full_reading_says(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    found = Rollouts(run).step(1)
    assert found is not None and not found.broken
    assert list(found.groups) == list(range(GROUPS)) and len(found.members) == GROUPS * MEMBERS
    whole = {(r.group, r.member): r for r in run.rollouts(1)}
    for head in found.members:
        full = whole[head.group, head.member]
        assert found.record(head) == full
        assert (head.reward, head.advantage, head.tokens) == (full.reward, full.advantage, sum(full.mask))
        assert (head.prompt, head.completion, head.terms) == (full.prompt_text, full.completion_text, full.reward_terms)
    assert found.groups[0].rewards == [1.0, 0.0, 0.0, 0.0]


def test_the_index_does_not_parse_token_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a")
    longest = []
    real = json.loads
    monkeypatch.setattr(index_module.json, "loads", lambda text: longest.append(text) or real(text))
    index_module.read_index(run.rollouts_file(0))
    assert len(longest) == GROUPS * MEMBERS and not any(b"logprobs" in text for text in longest)


def test_a_completion_that_looks_like_the_record_itself_is_read_right(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    text = ', "prompt_tokens": [1], "mask": [1, 1, 1]'
    run.write_rollouts(0, [record(0, 0, 0, completion_text=text, mask=[1, 0, 1, 0])])
    found = Rollouts(run).step(0)
    assert found is not None and found.members[0].completion == text and found.members[0].tokens == 2


def test_lines_that_are_no_rollouts_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with open(run.rollouts_file(0), "a") as file:
        file.write('{"half": \n{"group": 1}\n')
    found = Rollouts(run).step(0)
    assert found is not None and found.broken == 2 and len(found.members) == GROUPS * MEMBERS
    assert Rollouts(run).step(99) is None


def test_the_ledger_is_followed(tmp_path: Path) -> None:
    written = write_run(tmp_path / "a")
    run = Library(tmp_path).run("a")
    assert [visit.step for visit in run.ledger().visits["problem-1"]] == list(range(STEPS))
    append_jsonl(written.ledger_file, {"step": 4, "batch": 2, "choice": ["problem-1"]})
    write_step(written, 4)
    assert len(run.ledger().visits["problem-1"]) == STEPS + 1


def test_seeds_of_one_configuration_are_one_family(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"s{seed}", seed=seed)
    library = Library(tmp_path)
    assert library.run("s0").family == library.run("s1").family
    RunDir(tmp_path / "other").write_config({"recipe_name": SCRIPT, "log_path": "other"})
    assert library.run("other").family != library.run("s0").family
