"""From text files to batches of tokens: .bin/.idx files, sample indices, loaders, preprocessing.

Only `loader` imports torch; preprocessing never does.
"""
