"""The dense definition of correctness, and the tiled CPU engine that is the model of every kernel."""
