"""Work that others hand over in I, for W: Functions' gradients, stores, modules with backward_dw()."""
