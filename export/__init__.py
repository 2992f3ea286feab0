"""From a checkpoint to a bundle: the portable graph, how its weights are stored, and its lowering per target."""
