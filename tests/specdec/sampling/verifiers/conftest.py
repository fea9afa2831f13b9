from tests.specdec.sampling.conftest import one_thread

__all__ = ["one_thread"]  # a fixture that is used by being here
