"""The pages in a real browser: what a person sees, clicks and types."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from mint.rl.rundir import RunDir
from tests.dashboard.conftest import served
from tests.dashboard.folders import SCRIPT, write_run, write_step

CHART = "getElement(+document.querySelector('.nicegui-echart').id.slice(1)).chart.getOption()"
"""What the first chart of a page was told to draw."""


def names(page: Page) -> list[str]:
    return page.locator(".q-table tbody .name").all_inner_texts()


def test_runs_are_listed_with_what_one_wants_to_know_first(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator(".q-table tbody tr")).to_have_count(6)
    assert set(names(page)) == {"good", "seeds/0", "seeds/1", "agent", "starting", "broken"}  # a model is no run
    row = page.locator("tr", has_text="good")
    for text in ("finished", "4 / 4", "0.550", "1"):
        expect(row).to_contain_text(text)
    expect(row.locator("svg.spark")).to_be_visible()
    expect(row.locator(".chip.alarm")).to_have_attribute("title", "truncated (step 3)")
    expect(page.locator("tr", has_text="starting").locator(".chip.starting")).to_be_visible()


def series(page: Page, chart: int = 0) -> list[dict]:
    """What a chart shows, by name."""
    page.wait_for_function(f"document.querySelectorAll('.nicegui-echart canvas').length > {chart}")
    return page.evaluate(
        "n => { const e = document.querySelectorAll('.nicegui-echart')[n];"
        " return getElement(+e.id.slice(1)).chart.getOption().series.map(s => ({name: s.name, data: s.data})) }",
        chart,
    )


def test_seeds_are_joined_with_an_interval(page: Page, address: str) -> None:
    page.goto(address)
    assert {s["name"] for s in series(page)} >= {"good", "seeds/0", "seeds/1"}
    page.get_by_text("Join seeds").click()
    page.wait_for_function(f"{CHART}.series.some(s => s.name.endsWith('runs)'))")
    drawn = {s["name"]: s["data"] for s in series(page)}
    family = next(name for name in drawn if name.endswith("(4 runs)"))  # good and broken are seed 0 as well
    assert [round(value, 6) for _, value in drawn[family]] == [0.275, 0.375, 0.475, 0.575]
    assert drawn[f"{family} (band)"][0][1] > 0


def test_choosing_runs_does_not_leave_the_page_and_a_click_on_a_row_does(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator(".q-table tbody tr")).to_have_count(6)
    assert len(series(page)) == 4  # all that have two points; the agent has one, the starting one none
    page.locator("tr", has_text="good").locator(".q-checkbox").click()
    page.wait_for_function(f"{CHART}.series.length == 3")
    page.locator("tr", has_text="good").locator(".name").click()
    page.wait_for_url("**/run/good")


def test_from_a_point_on_a_curve_to_the_figures_of_a_token_in_three_clicks(page: Page, address: str) -> None:
    page.goto(f"{address}/run/good")
    drawn = series(page)
    assert drawn[0]["data"] == [[0, 0.25], [1, 0.35], [2, 0.45], [3, 0.55]]
    chart = page.locator(".nicegui-echart").first
    chart.scroll_into_view_if_needed()
    at = page.evaluate(
        "() => { const e = document.querySelector('.nicegui-echart'); const c = getElement(+e.id.slice(1)).chart;"
        " return c.convertToPixel('grid', [2, 0.45]) }"
    )
    page.wait_for_function("getElement(+document.querySelector('.nicegui-echart').id.slice(1)).chart.mintOpens")
    chart.click(position={"x": at[0], "y": at[1]})
    page.wait_for_url(re.compile(r"/step/good\?step=2"))
    page.locator(".groupline").nth(1).click()
    expect(page.locator(".promptbox")).to_have_text("Question 1 of step 2")
    page.locator(".rollout").first.locator(".t").nth(2).hover()
    tip = page.locator(".tip")
    for name, value in {
        "advantage": "+0.770", "log-prob (sampler)": "−2.50", "log-prob (trainer)": "−2.40", "ratio": "1.10517",
        "log-prob (reference)": "−2.75", "KL term": "+0.250",
    }.items():  # fmt: skip
        expect(tip.locator(".f", has=page.get_by_text(name, exact=True))).to_contain_text(value)
    expect(tip).to_contain_text('" 10"')


def test_samples_stand_side_by_side_sorted_by_reward_and_keys_move_among_them(page: Page, address: str) -> None:
    page.goto(f"{address}/step/good?step=0&group=2")
    expect(page.locator(".promptbox")).to_have_text("Question 2 of step 0")
    assert page.locator(".rollout .reward").all_inner_texts() == ["1", "0", "0", "0"]
    chosen = page.locator(".rollout.here .end")
    expect(chosen).to_contain_text("#0")
    page.keyboard.press("ArrowRight")
    expect(chosen).to_contain_text("#1")
    page.keyboard.press("w")
    expect(chosen).to_contain_text("#3")
    page.keyboard.press("b")
    expect(chosen).to_contain_text("#0")
    page.keyboard.press("k")
    expect(page.locator(".promptbox")).to_have_text("Question 1 of step 0")
    page.keyboard.press("j")
    expect(page.locator(".promptbox")).to_have_text("Question 2 of step 0")
    page.keyboard.press("?")
    expect(page.locator(".help")).to_contain_text("next, previous group")
    page.keyboard.press("Escape")
    expect(page.locator(".help")).to_have_count(0)
    page.keyboard.press("]")
    page.wait_for_url(re.compile("step=1"))


def test_tokens_are_coloured_by_what_is_chosen(page: Page, address: str) -> None:
    page.goto(f"{address}/step/good?step=0&group=0")
    tokens = page.locator(".rollout").first.locator(".t")
    worse = page.locator(".rollout").nth(3).locator(".t")
    expect(tokens).to_have_count(4)

    def tint(cell: int, of: str = "tokens") -> str:
        return (tokens if of == "tokens" else worse).nth(cell).evaluate("e => e.style.background")

    assert tint(0).startswith("rgba(18, 163, 127") and tint(0, "worse").startswith("rgba(229, 72, 77")
    page.get_by_role("button", name="Log-prob").click()
    page.wait_for_function("document.querySelector('.t').style.background.startsWith('rgba(139')")
    strength = [float(tint(i).split(",")[3].rstrip(")")) for i in range(4)]
    assert strength == sorted(strength) and strength[0] < strength[3]
    page.keyboard.press("4")
    page.wait_for_function("document.querySelector('.t').style.background.startsWith('rgba(240')")
    expect(page.locator(".scale")).to_contain_text("likelier")


def test_text_is_searched_in_prompts_and_completions(page: Page, address: str) -> None:
    page.goto(f"{address}/step/good?step=0")
    expect(page.locator(".groupline")).to_have_count(3)
    page.keyboard.press("/")
    page.keyboard.type("SUM 21")
    expect(page.locator(".groupline")).to_have_count(1)
    page.locator(".groupline").click()
    expect(page.locator(".t.hit")).to_have_text([" sum", " 21"])
    page.locator("input[type=search]").fill("nowhere")
    expect(page.locator(".groups .empty")).to_contain_text("nowhere")


def test_what_a_model_wrote_is_shown_and_never_run(page: Page, address: str) -> None:
    page.goto(f"{address}/step/good?step=1&group=1")
    expect(page.locator(".rollout").first.locator(".t").first).to_have_text(SCRIPT)
    page.locator(".rollout").first.locator(".t").first.hover()
    expect(page.locator(".tip")).to_contain_text("<script>")
    for path in ("/run/good", "/doctor/good", "/ledger/good"):
        page.goto(address + path)
        page.wait_for_selector(".tabs")
        page.wait_for_timeout(300)
        assert page.evaluate("window.stolen") is None
    page.goto(f"{address}/step/good?step=1&group=1")
    page.wait_for_selector(".t")
    assert page.evaluate("window.stolen") is None


def test_turns_and_tool_calls_of_an_agent_are_told_apart(page: Page, address: str) -> None:
    page.goto(f"{address}/step/agent?step=0")
    first = page.locator(".rollout").first
    expect(first.locator(".turn")).to_have_text(["model, turn 1", "environment", "model, turn 2"])
    expect(first.locator(".t.env")).to_have_text(["tool says", " 2"])
    expect(first.locator(".call")).to_have_text("calculator(expression='1+1') → 2")
    expect(page.get_by_role("button", name="Ratio")).to_be_disabled()


def test_the_ledger_leads_to_the_samples_of_a_visit(page: Page, address: str) -> None:
    page.goto(f"{address}/ledger/good")
    row = page.locator(".q-table tbody tr").filter(has_text="problem-2")
    expect(row).to_contain_text("25 %")
    expect(row.locator(".strip a")).to_have_count(4)
    row.locator(".strip a").nth(1).click()
    page.wait_for_url(re.compile(r"/step/good\?step=1"))
    expect(page.locator(".promptbox")).to_have_text("Question 2 of step 1")
    page.get_by_text("history of this prompt").click()
    expect(page.locator(".q-table tbody tr")).to_have_count(1)


def test_the_doctor_says_what_to_do(page: Page, address: str) -> None:
    page.goto(f"{address}/doctor/good")
    expect(page.locator(".flow .muted").first).to_contain_text("Examined 4 steps")
    expect(page.locator(".finding").first.locator(".remedy")).to_contain_text("What to do")
    page.locator(".finding").filter(has=page.locator(".sample")).first.locator(".sample").first.click()
    page.wait_for_url(re.compile(r"/step/good\?step=\d+&group=\d+&member=\d+"))
    expect(page.locator(".rollout.here")).to_be_visible()


def test_a_broken_line_is_told_and_the_rest_is_shown(page: Page, address: str) -> None:
    page.goto(f"{address}/run/broken")
    expect(page.locator(".banner.warning")).to_contain_text("metrics.jsonl, line 5: not JSON")
    assert len(series(page)[0]["data"]) == 4


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/run/starting", "This run is starting"),
        ("/step/starting", "No rollouts yet"),
        ("/ledger/starting", "No ledger yet"),
        ("/doctor/starting", "Nothing to examine yet"),
        ("/run/model", "This folder is not a run"),
        ("/run/nothing", "No such run"),
        ("/step/good?step=77", "Nothing was written for step 77"),
        ("/run/..%2F..%2Fetc", "No such run"),
        ("/server", "No server answers"),
        ("/playground", "No server answers at http://127.0.0.1:9"),
    ],
)
def test_where_there_is_nothing_the_page_says_why(page: Page, address: str, path: str, told: str) -> None:
    page.goto(address + path)
    expect(page.locator(".page")).to_contain_text(told)


def test_pages_fit_a_laptop_and_change_between_dark_and_light(page: Page, address: str) -> None:
    page.goto(f"{address}/run/good")
    page.wait_for_selector(".charts canvas")
    expect(page.locator("body")).to_have_class(re.compile("body--dark"))  # as the system asks
    page.keyboard.press("t")
    expect(page.locator("body")).to_have_class(re.compile("body--light"))
    for path in ("/", "/run/good", "/step/good?step=0", "/ledger/good", "/doctor/good"):
        page.goto(address + path)
        page.wait_for_selector(".page > *")
        expect(page.locator("body")).to_have_class(re.compile("body--light"))  # remembered
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_empty_folder_says_how_to_begin_and_then_runs_appear_and_grow(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path / "runs") as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator(".empty")).to_contain_text("No runs yet")
        expect(page.locator(".empty")).to_contain_text(f"{tmp_path / 'runs'}, which does not exist yet")
        write_run(tmp_path / "runs/live", steps=50, done=2)
        expect(page.locator(".q-table tbody tr")).to_contain_text("2 / 50")
        page.goto(f"{address}/run/live")
        expect(page.locator(".tiles")).to_contain_text("2 / 50")
        write_step(RunDir(tmp_path / "runs/live"), 2, 50)
        expect(page.locator(".tiles")).to_contain_text("3 / 50")
        page.wait_for_function(f"{CHART}.series[0].data.length == 3")
        page.close()
