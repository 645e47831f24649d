"""The composition root: small functions from a configuration to the parts of a run."""
