"""The least of mlx-vlm's surface that the adapter uses, with one model, `toy`, that can be told to have faults."""

__version__ = "0.0.fake"
