"""The APIs of a model server: from the body of a request to its answer, in each dialect."""
