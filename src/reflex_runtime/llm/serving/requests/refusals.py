"""What is wrong with a request, by the name of its field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from reflex_runtime.web.errors import ClientError, NotFound
from reflex_runtime.web.json import printable


class BadRequest(ClientError):
    """A field is wrong. param: its name, None for the request as a whole. told: the error code in the answer."""

    def __init__(self, message: str, param: str | None = None, told: str | None = None) -> None:
        super().__init__(printable(message))
        self.param, self.told = param, told

    def __reduce__(self) -> Any:
        return (BadRequest, (self.message, self.param, self.told))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """A BadRequest from within names fields, and what is below them, as its caller wrote them. names: theirs, by the
    name that is raised."""
    try:
        yield
    except BadRequest as error:
        for raised, name in names.items():
            whole = error.param is not None and (error.param + ".").startswith((raised + ".", raised + "["))
            if error.param is not None and whole and error.message.startswith(raised):
                param, message = (name + text[len(raised) :] for text in (error.param, error.message))
                raise BadRequest(message, param, error.told) from None
        raise


class ModelNotFound(NotFound):
    """No model of that name is served."""


def too_deep() -> BadRequest:
    """For a body that the decoder took, and that others cannot walk through."""
    return BadRequest("its values nest too deeply")
