"""Ray Serve's choice of a replica for each request: an episode begins on the replica that owns it, and stays there."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from reflex_runtime import rendezvous


class EpisodeRouter(RequestRouter):
    """Sends a request to the owner of its episode by rendezvous hash, so that all routers agree without state.

    The episode is Ray's session id, which `EpisodeFront` sets: EPISODE, or EPISODE;REPLICA for one that runs and stays
    on that replica while there is one of this name. A request without it goes to any replica; a websocket is one
    request, and stays where it was opened.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica of the episode; behind it the next owner, in case this one does not answer Ray."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        asked = pending_request.metadata
        replicas: dict[str, Any] = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        episode, _, runs_on = (asked.session_id or asked.internal_request_id).partition(";")
        order = rendezvous.preference(episode, replicas)
        if runs_on in replicas:
            order = [runs_on, *(name for name in order if name != runs_on)]
        return [[replicas[name]] for name in order[:2]]
