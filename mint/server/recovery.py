"""Taking up what an earlier server on the same data and port left: every model, every request, every result.

Reads each model's journal, verified, before the first request is let in. Bringing the models back in the backend goes
on in the background; requests are accepted meanwhile, and wait their turn.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from typing import TYPE_CHECKING
from urllib.parse import unquote

from mint import wire
from mint.errors import Internal
from mint.server.futures import Answer, Promise, error_answer
from mint.server.journal import Found, Head, Journal, Place
from mint.server.records import Damaged
from mint.server.sequencer import Sequencer
from mint.server.steps import FORWARDS, announce_snapshot

if TYPE_CHECKING:
    from mint.server.state import Server

log = logging.getLogger("mint.server")


async def recover(server: Server) -> None:
    for folder in sorted(server.home.models.iterdir()):
        if folder.name.startswith("."):  # was being deleted
            shutil.rmtree(folder, ignore_errors=True)
            continue
        journal = Journal(folder, server.disk)
        try:
            found = await asyncio.to_thread(journal.read)
        except Damaged as error:
            _give_up(server, unquote(folder.name), error)
            continue
        if server.sessions.revive(found.created["session"]):
            _Recovery(server, journal, found).run()
        else:
            journal.delete()
    for session_id, snapshot in server.samplers.snapshots_on_disk():
        if not server.sessions.revive(session_id):  # else they go when the session does
            shutil.rmtree(snapshot, ignore_errors=True)


def _give_up(server: Server, model_id: str, error: Damaged) -> None:
    log.error("training model %s cannot be brought back: %s", model_id, error)
    server.models.corrupted[model_id] = str(error)


class _Recovery:
    """Of one model."""

    def __init__(self, server: Server, journal: Journal, found: Found) -> None:
        self._server, self._journal, self._found = server, journal, found
        self._owner: str = found.created["owner"]
        self._results = {
            place.record.head["of"]: place
            for place in (*found.old, *found.live)
            if place.record.head["kind"] == "result"
        }

    def run(self) -> None:
        server, found = self._server, self._found
        for place in found.old:
            if place.record.head["kind"] == "request":
                self._answer(place, self._promise(place))
        if found.damage is not None:
            for place in found.live:
                if place.record.head["kind"] == "request":
                    self._answer(place, self._promise(place))
            _give_up(server, found.created["model"], found.damage)
            return
        sequencer = Sequencer(
            server.limits.gap_seconds, following=found.resume["next"], handled=found.resume["handled"]
        )
        model = server.models.add(found.created, self._journal, sequencer)
        created = self._creation(found.created)
        for place in found.live:
            head = place.record.head
            match head["kind"]:
                case "skip":
                    sequencer.skip(head["seq"])
                case "jump":
                    sequencer.jump(head["seq"])
                case "request":
                    promise = self._promise(place)
                    entry = server.models.enter(model, place, promise)
                    if (result := self._results.get(head["id"])) is not None:
                        entry.answered, entry.failed = True, result.record.head["failed"]
                        promise.settle(self._read(head, result))
                    elif head["op"] == "snapshot":
                        announce_snapshot(server, model.run, head["fixed"]["sampler"], promise)
        created.run(server.models.bring_up(model))

    def _creation(self, created: Head) -> Promise:
        same = bytes.fromhex(created["same"])
        promise = self._server.futures.open(
            self._owner, created["key"], same, request_id=created["request"], session=created["session"]
        )
        promise.envelope["model_id"] = created["model"]
        promise.accepted.set_result(None)
        return promise

    def _promise(self, place: Place) -> Promise:
        head, model_id = place.record.head, self._found.created["model"]
        key = None if head["seq"] is None else f"seq_id {head['seq']} of model {model_id}"
        same, session = bytes.fromhex(head["same"]), self._found.created["session"]
        promise = self._server.futures.open(self._owner, key, same, request_id=head["id"], session=session)
        promise.envelope["model_id"] = model_id
        promise.accepted.set_result(None)
        return promise

    def _answer(self, place: Place, promise: Promise) -> None:
        """For a request that will not be carried out again."""
        head = place.record.head
        if (result := self._results.get(head["id"])) is not None:
            promise.settle(self._read(head, result))
        elif (damage := self._found.damage) is not None:
            promise.fail(damage)
        else:
            promise.fail(Internal("the request was carried out, but its result was lost with the server's machine."))

    def _read(self, head: Head, result: Place) -> Answer:
        try:
            body = self._journal.payload(result)
        except (Damaged, OSError) as error:
            return error_answer(error)
        media = result.record.head["media"]
        reader = wire.forward_backward_output_from_proto if media == wire.PROTOBUF and head["op"] in FORWARDS else None
        return Answer(body, media, reader, result.record.head["failed"])
