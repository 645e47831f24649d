"""Writers: checkpoint folders of every format from a source, one tensor at a time."""
