"""The one place that holds zbpipe's version."""

__version__ = "0.1.0"
