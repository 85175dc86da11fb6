"""What the tests of vision in sessions share: tiny checkpoints of every family, one job, and counters."""
