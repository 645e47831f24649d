"""Where a run keeps its checkpoints: who owns the folder, how the ranks save, which iteration is the newest."""
