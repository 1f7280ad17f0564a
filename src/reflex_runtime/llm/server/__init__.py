"""Where the model of a server runs, in its process or in runtime processes, and the states that it goes through."""
