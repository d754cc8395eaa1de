"""Measuring: prompt sets and the statistics of comparisons. Never imports torch."""
