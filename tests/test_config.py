"""Configuration: who wins over whom."""

from pathlib import Path

import pytest

from mint.config import ClientConfig, ServerConfig, data_home, load_dotenv

NAMES = ("MINT_BASE_URL", "MINT_API_KEY", "TINKER_BASE_URL", "TINKER_API_KEY", "MINT_HOME")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_with_nothing_set_there_is_no_address() -> None:
    assert ClientConfig.resolve() == ClientConfig(None, None)


def test_arguments_win_over_mint_and_mint_over_tinker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://tinker")
    monkeypatch.setenv("TINKER_API_KEY", "tml-1")
    assert ClientConfig.resolve() == ClientConfig("http://tinker", "tml-1")
    monkeypatch.setenv("MINT_BASE_URL", "http://mint")
    monkeypatch.setenv("MINT_API_KEY", "sk-1")
    assert ClientConfig.resolve() == ClientConfig("http://mint", "sk-1")
    assert ClientConfig.resolve("http://given", "k") == ClientConfig("http://given", "k")


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_BASE_URL", "")
    monkeypatch.setenv("TINKER_BASE_URL", "http://tinker")
    assert ClientConfig.resolve().base_url == "http://tinker"


def test_dotenv_fills_in_what_the_environment_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_API_KEY", "from-environment")
    monkeypatch.setenv("MINT_HOME", "")  # so that monkeypatch restores it
    monkeypatch.delenv("MINT_HOME")
    (tmp_path / ".env").write_text("# a comment\nexport MINT_HOME='/data'\nMINT_API_KEY=from-file\n\nnonsense\n")
    assert load_dotenv(tmp_path / ".env") == {"MINT_HOME": "/data", "MINT_API_KEY": "from-file"}
    assert data_home() == Path("/data")
    assert ClientConfig.resolve().api_key == "from-environment"
    monkeypatch.delenv("MINT_HOME")


def test_a_missing_dotenv_is_no_fault(tmp_path: Path) -> None:
    assert load_dotenv(tmp_path / ".env") == {}


def test_the_server_takes_several_keys_and_a_folder_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", "/data")
    config = ServerConfig.resolve({"MINT_API_KEY": "a, b,,"}, port=9000, host=None)
    assert config == ServerConfig(host="127.0.0.1", port=9000, data=Path("/data"), api_keys=("a", "b"))
