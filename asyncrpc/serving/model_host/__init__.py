"""One model for all web workers of a host; see `ModelHost`."""

from asyncrpc.serving.model_host.host import ModelHost, ModelHostStatus

__all__ = ["ModelHost", "ModelHostStatus"]
