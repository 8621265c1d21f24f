"""Fixtures for tests that need the whole system."""

from collections.abc import Iterator

import hypothesis
import pytest

import mint

# The same examples each time, and no clock beside them: neither what is drawn nor a machine that is slow for a moment
# decides whether a change may go in.
hypothesis.settings.register_profile(
    "mint", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("mint")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mint.ServiceClient]:
    """A local server on the bundled model, started the way a script starts it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MINT_BASE_URL", "TINKER_BASE_URL", "MINT_API_KEY", "TINKER_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("MINT_HOME", str(tmp_path_factory.mktemp("home")))
        with mint.ServiceClient() as client:
            client.get_server_capabilities()  # by now it runs, with its home where the patch put it
            yield client
