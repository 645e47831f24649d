"""Adapters of the ports: tensor, sequence, context, pipeline and data parallelism."""
