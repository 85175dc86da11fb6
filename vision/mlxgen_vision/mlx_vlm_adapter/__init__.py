"""The optional adapter for mlx-vlm: families that mlxgen has no file for, with coarser checkpoints.

It asks mlx-vlm to load and to compute, and takes nothing on trust: a trial at load compares what mlxgen will do (one
picture at a time, prompts in chunks, two requests in turn) with what mlx-vlm does in one go, and refuses the model
where they differ. Facts about mlx-vlm are of version 0.7.10.
"""
