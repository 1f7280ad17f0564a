"""How a replica on Ray asks all of them."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve

from reflex_runtime.cluster.together import WITHIN


class RayPeers:
    """See `Peers`: those of the application in whose replica this is."""

    def __init__(self) -> None:
        self._handle: Any = None

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """See `Peers.call`."""
        try:
            async with asyncio.timeout(WITHIN):
                if self._handle is None:
                    context = serve.get_replica_context()
                    self._handle = serve.get_deployment_handle(context.deployment, app_name=context.app_name)
                sent = await self._handle.broadcast(method, *arguments)._fetch_replica_results_async()
        except Exception:  # of Ray's own: no replica runs yet, or its controller is away
            return []
        asked = [asyncio.ensure_future(result.get_async()) for result in sent]
        if asked:
            await asyncio.wait(asked, timeout=WITHIN)
        for one in asked:
            one.cancel()
        return [one.result() if _well(one) else None for one in asked]


def _well(asked: asyncio.Future[Any]) -> bool:
    return asked.done() and not asked.cancelled() and asked.exception() is None
