"""Work that Functions hand over in I, for W."""
