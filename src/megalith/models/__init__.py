"""Models assembled of the blocks in nn/."""
