"""Training: state, step, loop, and the named moments of a run that others can listen to."""
