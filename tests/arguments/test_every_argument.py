"""No argument is silently ignored: everything anybody can give is in the table of `table.py`, and nothing else is."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import mint
from docs.generate_arguments import PAGE, page
from mint import types, wire
from mint.arguments import HONOURED, REFUSED
from mint.config import ServerConfig
from mint.proto import MESSAGES
from mint.server import openai_requests, requests
from mint.server.app import create_app
from tests.arguments.table import TABLE, Entry, Inert, Refused
from tests.fakes import FakeBackend
from tests.server.live import Live

TESTS = Path(__file__).parents[1]
CLIENTS = (mint.ServiceClient, mint.TrainingClient, mint.SamplingClient, mint.RestClient)
# Made by other clients, never by a user.
MADE_BY_CLIENTS = {"TrainingClient.__init__", "SamplingClient.__init__"}


def models_of(module: ModuleType) -> dict[str, list[str]]:
    """The fields each request model adds to those of its parent."""
    found = {}
    for name, kind in vars(module).items():
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and kind.__module__ == module.__name__:
            own = [field.alias or name for name, field in kind.model_fields.items() if name in kind.__annotations__]
            if own:
                found[name] = own
    return found


def bodies() -> dict[str, list[str]]:
    """What `mint.wire` reads, by the error that lists what may be given."""

    def listed(read: Any, *args: Any) -> list[str]:
        with pytest.raises(mint.BadRequest) as refusal:
            read({"no such field": 1}, *args)
        return re.sub(r".*may have (.*)\.$", r"\1", str(refusal.value)).split(", ")

    inner = {"no such field": 1}
    with pytest.raises(mint.BadRequest) as refusal:
        wire.forward_backward_from_json({"model_id": "m", "forward_backward_input": inner}, "forward_backward_input")
    given = re.sub(r".*may have (.*)\.$", r"\1", str(refusal.value)).split(", ")
    return {
        "asample": listed(wire.sample_call_from_json),
        "forward_backward": listed(wire.forward_backward_from_json, "forward_backward_input"),
        "forward_backward_input": given,
        **{f"protobuf {name}": list(_fields(name)) for name in _reachable("ForwardBackwardRequest")},
    }


def _fields(message: str) -> dict[str, Any]:
    return {field.name: field for field in MESSAGES[message].DESCRIPTOR.fields}


def _reachable(message: str) -> Iterator[str]:
    """The message and all it may hold, but for what is refused whole."""
    yield message
    for field in _fields(message).values():
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            kind = kind.fields_by_name["value"].message_type
        if kind is not None and kind.name not in ("ProvenanceSpan", "ImageChunk", "DmelChunk"):
            yield from _reachable(kind.name)


def queries() -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        described = create_app(ServerConfig(data=Path(folder)), FakeBackend()).openapi()
    found = {}
    for path, methods in described["paths"].items():
        for method, details in methods.items():
            names = [p["name"] for p in details.get("parameters", []) if p["in"] == "query"]
            if names:
                found[f"{method.upper()} {path}"] = names
    return found


def parameter_types() -> dict[str, list[str]]:
    kinds = ("SamplingParams", "SampleRequest", "AdamParams", "LoraConfig", "TensorData", "Datum", "ModelInput")
    more = ("ReverseKLDatum", "EncodedTextChunk")
    return {kind: list(inspect.signature(getattr(types, kind)).parameters) for kind in (*kinds, *more)}


def client_calls() -> dict[str, list[str]]:
    found = {}
    for client in CLIENTS:
        for name, call in vars(client).items():
            public = not name.startswith("_") or name == "__init__"
            if callable(call) and public and not name.endswith("_async"):  # twins take the same: tests/client
                names = [p for p in inspect.signature(call).parameters if p != "self"]
                if names and f"{client.__name__}.{name}" not in MADE_BY_CLIENTS:
                    found[f"{client.__name__}.{name}"] = names
    return found


GIVEN = {
    "Requests with a JSON body": lambda: models_of(requests),
    "Training data and samples on the wire": bodies,
    "Query parameters": queries,
    "The OpenAI-compatible routes": lambda: models_of(openai_requests),
    "Parameter types": parameter_types,
    "The clients": client_calls,
}


@pytest.mark.parametrize("part", list(TABLE))
def test_the_table_holds_every_argument_and_no_other(part: str) -> None:
    given = GIVEN[part]()
    table = {name: sorted(entries) for name, entries in TABLE[part].items()}
    assert table == {name: sorted(set(names)) for name, names in given.items()}


def test_what_can_be_sampled_is_what_the_wire_reads() -> None:
    assert {field.name for field in fields(types.SampleRequest)} <= set(bodies()["asample"])


def test_the_capabilities_name_what_is_honoured_and_refused() -> None:
    parts = {
        "sampling_params": TABLE["Parameter types"]["SamplingParams"],
        "sample": TABLE["Parameter types"]["SampleRequest"],
        "lora_config": TABLE["Parameter types"]["LoraConfig"],
        "adam_params": {k: v for k, v in TABLE["Parameter types"]["AdamParams"].items() if k != "betas"},
    }
    for part, table in parts.items():
        assert sorted(HONOURED[part]) == sorted(table)
    refused = {where.rpartition(": ")[2] for where, entry in entries() if isinstance(entry, Refused)}
    assert set(REFUSED) <= refused
    with tempfile.TemporaryDirectory() as folder:
        live = Live(Path(folder))
        try:
            with mint.ServiceClient(live.url) as service:
                told = service.get_server_capabilities()
        finally:
            live.stop()
    assert (told.honoured, told.refused) == (HONOURED, REFUSED)


@cache
def source(file: str) -> str:
    return (TESTS / file).read_text()


def entries() -> list[tuple[str, Entry]]:
    return [
        (f"{where}: {name}", entry)
        for part in TABLE.values()
        for where, arguments in part.items()
        for name, entry in arguments.items()
    ]


def test_every_test_the_table_names_is_there() -> None:
    for where, entry in entries():
        if isinstance(entry, Inert):
            continue
        file, _, function = (entry.test if isinstance(entry, Refused) else entry).partition("::")
        assert f"def {function}(" in source(file), f"{where} names {file}::{function}, which does not exist"


def test_whatever_does_nothing_says_why_and_is_rare() -> None:
    inert = [(where, entry.reason) for where, entry in entries() if isinstance(entry, Inert)]
    assert all(len(reason) > 20 for _, reason in inert)
    assert len(inert) < 0.12 * len(entries())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m docs.generate_arguments"
