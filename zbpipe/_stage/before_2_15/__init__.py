"""What stages and schedules of torch 2.15 do themselves; this package goes when torch 2.14 does."""
