"""The dense definition of correctness, and the tiled CPU engine, the model of every kernel."""
