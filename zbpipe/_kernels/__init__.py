"""Weight gradients that an ``autograd.Function`` leaves to W."""
