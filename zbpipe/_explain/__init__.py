"""zbpipe.explain: what a stage's weight pass will do, said before training."""
