"""The weight names and layouts of the checkpoint formats of the world, as pure mappings."""
