"""`megalith prove`: a run's own configuration in miniature, in fp64, over its layout and in one process."""
