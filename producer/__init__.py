"""ec-producer: the vision encoder of a multimodal model as a service of its own."""

__version__ = "0.1.0"
