"""The target: checkpoints, the exact decoder, its self-test and its memory plan."""
