"""Mixtures of experts: which experts a token goes to (`routing`), how their load is balanced (`balance`), the way of
tokens to experts and back (`permutation`), and the layer that joins them (`layer`)."""
