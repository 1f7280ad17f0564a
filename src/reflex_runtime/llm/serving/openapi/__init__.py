"""/openapi.json of a model server."""
