"""What is done for the stages and schedules of a patched torch, beside I and W."""
