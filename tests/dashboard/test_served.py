"""The dashboard inside `mint serve`: behind the server's keys, asking the server itself."""

import threading
from collections.abc import Iterator

import pytest
import uvicorn
from playwright.sync_api import Page, expect

from mint.cli.serving import show
from mint.config import ServerConfig
from mint.server.app import create_app
from tests.dashboard.folders import write_run
from tests.fakes import FakeBackend
from tests.waiting import eventually


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with two keys over a fake backend, with the dashboard joined to it as `mint serve` does."""
    folder = tmp_path_factory.mktemp("served")
    write_run(folder / "runs/one")
    config = ServerConfig(models=("mint/tiny",), data=folder / "data", api_keys=("house-key", "tenant-key"))
    backend = FakeBackend()
    app = create_app(config, backend)
    show(app, folder / "runs")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: server.started or not thread.is_alive())
    assert server.started, "the server did not start"
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    backend.let_go()
    server.should_exit = True
    thread.join()


def sign_in(page: Page, address: str, key: str, path: str = "/dashboard/") -> None:
    page.goto(address + path)
    page.wait_for_selector("#key")
    page.fill("#key", key)
    page.keyboard.press("Enter")


def test_a_key_opens_the_page_that_was_asked_for(page: Page, address: str) -> None:
    sign_in(page, address, "house-key", "/dashboard/step/one?step=2&group=1")
    expect(page.locator(".promptbox")).to_have_text("Question 1 of step 2")
    page.get_by_text("Curves").click()
    page.wait_for_url("**/dashboard/run/one")
    expect(page.locator(".tiles")).to_contain_text("4 / 4")
    page.get_by_title("Sign out").click()
    page.wait_for_selector("#key")


def test_a_tenant_sees_no_runs_of_the_house(page: Page, address: str) -> None:
    sign_in(page, address, "tenant-key")
    expect(page.locator(".page")).to_contain_text("No runs yet")
    page.goto(f"{address}/dashboard/run/one")
    expect(page.locator(".page")).to_contain_text("No such run")
    page.goto(f"{address}/dashboard/run/..%2Fone")
    expect(page.locator(".page")).to_contain_text("No such run")


def test_the_server_page_asks_the_server_it_is_part_of(page: Page, address: str) -> None:
    sign_in(page, address, "house-key", "/dashboard/server")
    expect(page.locator(".page")).to_contain_text("mint/tiny")
    expect(page.locator(".page")).to_contain_text("Nobody has trained here yet.")


def test_two_policies_answer_side_by_side_with_log_probs(page: Page, address: str) -> None:
    sign_in(page, address, "house-key", "/dashboard/playground")
    page.wait_for_selector(".pair")
    page.get_by_role("button", name="Complete").click()
    page.locator("textarea").fill("Two and two")
    page.keyboard.press("Enter")
    for side in range(2):
        expect(page.locator(".side .meta").nth(side)).to_contain_text("tokens · log-prob")
        expect(page.locator(".side .reply").nth(side)).to_contain_text("Two and two")
        assert page.locator(".side").nth(side).locator(".t").count() > 0
