"""Ranks of a run: rendezvous, process groups, collectives, random streams, supervision and hang reports."""
