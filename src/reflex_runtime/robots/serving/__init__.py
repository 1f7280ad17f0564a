"""`POST /act`: the server of robot policies."""
