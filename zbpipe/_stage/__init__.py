"""What a patched torch's stages and schedules get beside I and W."""
