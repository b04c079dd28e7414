"""The one door to what is private in torch.

Each module here offers what zbpipe needs of one part of torch, under names of zbpipe's own; no module outside says a
private name of torch's (tests/test_layers.py). What is expected of torch, in which releases, and what depends on it is
one table, in ``needs.py``.
"""
