"""Save folders of runs: who owns the folder, how the ranks save, which iteration is the newest."""
