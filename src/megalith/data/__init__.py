"""Datasets: .bin/.idx files, sample indices, data loaders, and preprocessing of text into them.

Only `loader` imports torch; preprocessing never does.
"""
