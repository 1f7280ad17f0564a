"""Paths with names in them."""

from __future__ import annotations

import pytest

from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, named_in


async def answer(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200)


PATHS = (
    "/m", "/m/{model}", "/m/{model}/infer", "/m/{model}/versions/{version}", "/m/{model}/versions/{version}/infer",
    "/episodes/{id}/outcome",
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/m/pi0", "/m/{model}"), ("/m/lab/pi0", "/m/{model}"), ("/m/lab/pi0/infer", "/m/{model}/infer"),
        ("/m/lab/pi0/versions/1", "/m/{model}/versions/{version}"), ("/m/p/versions/1/2", "/m/{model}"),
        ("/m/lab/pi0/versions/1/infer", "/m/{model}/versions/{version}/infer"), ("/m/", None), ("/m", None),
        ("/episodes/a/b\n/outcome", "/episodes/{id}/outcome"), ("/episodes//outcome", None), ("/other", None),
    ],
)  # fmt: skip
def test_a_path_with_names_is_of_the_route_that_says_most(path: str, found: str | None) -> None:
    route = named_in([Route(path, answer) for path in PATHS])(path)
    assert (None if route is None else route.path) == found
