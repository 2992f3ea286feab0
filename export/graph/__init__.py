"""The portable graph, built from a spec and stored weights."""
