"""The model of a server: in the server's process or in runtime processes, and its states."""
